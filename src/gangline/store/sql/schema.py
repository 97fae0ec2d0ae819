"""The tables, defined once for SQLite and PostgreSQL. Times are Unix times, UTC, seconds."""

from __future__ import annotations

import sqlalchemy as sa

from gangline.domain.tenancy import DEFAULT_TENANT

SCHEMA_VERSION = 9
"""Increase it together with a step in `migrations.py`."""

metadata = sa.MetaData()

_Position = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""SQLite numbers rows automatically only if the key is declared INTEGER."""

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("position", _Position, primary_key=True, autoincrement=True),
    sa.Column("task_id", sa.String(128), nullable=False, unique=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # the TaskRequest as JSON
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("num_samples", sa.Integer, nullable=False),
    sa.Column("num_open", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("submitter", sa.String(128), nullable=False, server_default=""),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("result_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("fork_of", sa.String(128)),  # the session that this task forks
    sa.Column("run", sa.String(128), nullable=False, server_default=""),  # see `run_of`
    sa.Column("harness", sa.Text, nullable=False, server_default=""),
    sa.Column("tenant", sa.String(32), nullable=False, server_default=DEFAULT_TENANT),
    sa.Column("bound", sa.Boolean, nullable=False, server_default=sa.false()),  # submitted by a tenant's own token
    sa.Index("tasks_by_tenant", "tenant", "position"),
    sa.Index("tasks_by_status", "status", "position"),
    sa.Index("tasks_by_end", "ended_at"),
    sa.Index("tasks_by_run", "run", "position"),
    sqlite_autoincrement=True,
)

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("position", _Position, primary_key=True, autoincrement=True),
    sa.Column("session_id", sa.String(128), nullable=False, unique=True),
    sa.Column("task_id", sa.String(128), sa.ForeignKey("tasks.task_id"), nullable=False),
    sa.Column("sample_index", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("reported_fence", sa.BigInteger, nullable=False),
    sa.Column("node_id", sa.String(128)),
    sa.Column("stage", sa.String(16)),
    sa.Column("outcome", sa.String(32)),
    sa.Column("failure", sa.Text),  # a Failure as JSON
    sa.Column("reward", sa.Float),
    sa.Column("result_attempt", sa.Integer),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("leased_at", sa.Float),
    sa.Column("stage_at", sa.Float),
    sa.Column("expires_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("submitter", sa.String(128), nullable=False, server_default=""),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"),  # see submitting.py
    sa.Column("ready_at", sa.Float),
    sa.Column("needs", sa.Integer, nullable=False, server_default="0"),  # id in `needs`; 0 is none
    sa.Column("model", sa.Text),
    sa.Column("num_sampled_tokens", sa.Integer),
    sa.Column("tenant", sa.String(32), nullable=False, server_default=DEFAULT_TENANT),  # its task's
    sa.Index("sessions_by_tenant", "tenant", "position"),
    sa.Index("sessions_by_task", "task_id", "sample_index"),
    sqlite_autoincrement=True,
)


def _state(name: str) -> sa.ColumnElement[bool]:
    """Spelled out, because a planner uses a partial index only if the query visibly implies its condition."""
    return sessions.c.state == sa.literal_column(f"'{name}'")


LEASED = _state("leased")
QUEUED = _state("queued")
IN_QUEUE = sa.and_(QUEUED, sessions.c.ready_at.is_(None))
"""Sessions that may be leased."""
WAITING = sa.and_(QUEUED, sessions.c.ready_at.is_not(None))
"""Sessions admitted to the queue when they are due."""


def _partial_index(name: str, *columns: sa.ColumnElement[object], where: sa.ColumnElement[bool]) -> sa.Index:
    return sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


_partial_index("tasks_by_fork", tasks.c.fork_of, where=tasks.c.fork_of.is_not(None))
# Each of these stays as small as the running or queued sessions, however much is stored. There is no index over all
# states: SQLite, which has no size estimates, would use it for the queue and sort.
_partial_index("sessions_by_expiry", sessions.c.expires_at, where=LEASED)
_partial_index("sessions_by_node", sessions.c.node_id, sessions.c.position, where=LEASED)
# Its last column lets a node skip sessions that it cannot run without reading their rows.
_partial_index(
    "sessions_in_queue",
    *(sessions.c.priority.desc(), sessions.c.turn, sessions.c.position, sessions.c.needs),
    where=IN_QUEUE,
)
_partial_index("sessions_waiting", sessions.c.ready_at, where=WAITING)
_partial_index(
    "sessions_of_submitter",
    *(sessions.c.tenant, sessions.c.submitter, sessions.c.priority, sessions.c.turn),
    where=QUEUED,
)
_partial_index(
    "sessions_queued_by_tenant",
    *(sessions.c.tenant, sessions.c.priority.desc(), sessions.c.turn, sessions.c.position, sessions.c.needs),
    where=IN_QUEUE,
)
_partial_index("sessions_leased_by_tenant", sessions.c.tenant, sessions.c.leased_at, where=LEASED)

turns = sa.Table(
    "tenant_turns",
    metadata,
    sa.Column("tenant", sa.String(32), primary_key=True),
    sa.Column("priority", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("turn", sa.BigInteger, nullable=False),  # the latest leased turn
)

needs = sa.Table(
    "needs",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("body", sa.Text, nullable=False, unique=True),  # Needs as JSON; few differ, and none is deleted
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("node_id", sa.String(128), primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("capacity", sa.Integer, nullable=False),
    sa.Column("draining", sa.Boolean, nullable=False),
    sa.Column("backends", sa.Text, nullable=False),  # JSON list
    sa.Column("metrics", sa.Text, nullable=False),  # JSON object
    sa.Column("first_seen_at", sa.Float, nullable=False),
    sa.Column("last_seen_at", sa.Float, nullable=False),
    sa.Column("identity", sa.String(64)),  # of the node's data folder; null if not heard from since version 2
    sa.Column("offer", sa.Text),  # Offer as JSON; null if the node reports none and takes all
    sa.Column("key", sa.String(32), nullable=False, server_default=""),  # `Principal.node_key` of its token
)

tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("weight", sa.Float, nullable=False, server_default="1"),
    sa.Column("max_running", sa.Integer),
    sa.Column("max_queued", sa.Integer),
    sa.Column("max_slot_s_per_day", sa.Float),
    sa.Column("max_tokens_per_day", sa.BigInteger),
    sa.Column("clock", sa.Float, nullable=False, server_default="0"),  # see shares.py
    sa.Column("num_leases", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("slot_s", sa.Float, nullable=False, server_default="0"),
    sa.Column("num_sampled_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("day", sa.Integer, nullable=False, server_default="0"),  # of UTC, to which the next two belong
    sa.Column("day_slot_s", sa.Float, nullable=False, server_default="0"),
    sa.Column("day_tokens", sa.BigInteger, nullable=False, server_default="0"),
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("token_id", sa.String(16), primary_key=True),
    sa.Column("digest", sa.String(64), nullable=False),  # SHA-256 of the secret
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("tenant", sa.String(32), nullable=False),
    sa.Column("note", sa.String(200), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Column("revoked_at", sa.Float),
    sa.Column("number", sa.Integer, nullable=False),  # how often it was made or rotated
    sa.Column("old_digest", sa.String(64)),
    sa.Column("grace_until", sa.Float),  # of the old one
)

outbox = sa.Table(
    "outbox",
    metadata,
    sa.Column("id", _Position, primary_key=True, autoincrement=True),
    sa.Column("key", sa.String(200), nullable=False, unique=True),  # Idempotency-Key
    sa.Column("task_id", sa.String(128), sa.ForeignKey("tasks.task_id"), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # JSON, without the server's own address
    sa.Column("state", sa.String(16), nullable=False),  # pending, delivered, expired
    sa.Column("num_tries", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("next_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("last_error", sa.Text),
    sa.Column("secret", sa.String(128)),  # name of the environment variable that holds the key
    sa.Index("outbox_due", "state", "next_at"),
    sa.Index("outbox_by_task", "task_id"),
    sqlite_autoincrement=True,
)

annotations = sa.Table(
    "annotations",
    metadata,
    sa.Column("position", _Position, primary_key=True, autoincrement=True),
    sa.Column("session_id", sa.String(128), nullable=False),
    sa.Column("task_id", sa.String(128), sa.ForeignKey("tasks.task_id"), nullable=False),
    sa.Column("call", sa.Integer),
    sa.Column("verdict", sa.String(16)),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("by", sa.String(128), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Index("annotations_by_session", "session_id", "position"),
    sa.Index("annotations_by_dataset", "dataset", "position"),
    sa.Index("annotations_by_task", "task_id"),
    sqlite_autoincrement=True,
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", _Position, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("task_id", sa.String(128)),
    sa.Column("session_id", sa.String(128)),
    sa.Column("data", sa.Text, nullable=False),  # JSON object
    sa.Index("events_by_task", "task_id", "seq"),
    # Numbers are never reused, even if old rows are deleted, because clients resume by them.
    sqlite_autoincrement=True,
)

_partial_index("events_of_no_task", events.c.at, where=events.c.task_id.is_(None))
