"""Migrates from one version of the schema to the next: numbered steps, run in the transaction that opens the store.

A step sees the tables of its own time: it spells out everything it writes, and takes only *added* columns and indexes
from `schema.py`, which contains only the latest version. Missing tables are created after the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from gangline.domain.errors import OtherVersion
from gangline.domain.ids import run_of
from gangline.domain.task import TaskRequest, task_digest
from gangline.store.sql import schema

_OPENING = 0x67616E67_00000001
"""PostgreSQL's advisory lock for opening: two servers may start on an empty database at once."""


def found_version(conn: sa.Connection) -> int | None:
    """None for a database without our tables."""
    if not sa.inspect(conn).has_table(schema.meta.name):
        return None
    found = conn.scalar(sa.select(schema.meta.c.value).where(schema.meta.c.key == "schema_version"))
    return None if found is None else int(found)


def bring_up_to_date(conn: sa.Connection) -> None:
    """Create missing tables and migrate older ones. Raises: OtherVersion if the database has a later version."""
    if conn.dialect.name == "postgresql":
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_OPENING)))
    found = found_version(conn)
    if found is not None and found > schema.SCHEMA_VERSION:
        refuse_other_version(conn, found)
    for version in range((found or schema.SCHEMA_VERSION) + 1, schema.SCHEMA_VERSION + 1):
        _STEPS[version](conn)
    schema.metadata.create_all(conn)
    key = schema.meta.c.key == "schema_version"
    if found is None:
        conn.execute(sa.insert(schema.meta).values(key="schema_version", value=str(schema.SCHEMA_VERSION)))
    elif found != schema.SCHEMA_VERSION:
        conn.execute(sa.update(schema.meta).where(key).values(value=str(schema.SCHEMA_VERSION)))


def refuse_other_version(conn: sa.Connection, found: int | None) -> None:
    """Raises: OtherVersion unless this Gangline supports that version."""
    if found == schema.SCHEMA_VERSION:
        return
    advice = "a newer Gangline made it: use that one, or another data folder or database."
    if found is None:
        advice = "it holds no Gangline tables."
    elif found < schema.SCHEMA_VERSION:
        advice = "start its server once with this version, which brings it up to date."
    raise OtherVersion(
        f"the database at {conn.engine.url!r} has schema version {found}, this Gangline reads "
        f"{schema.SCHEMA_VERSION}; {advice}"
    )


def _to_2(conn: sa.Connection) -> None:
    """Priorities, turns between submitters, waiting after faults, sizes of results; digests without defaults."""
    _add_columns(conn, schema.tasks, "submitter", "priority", "result_bytes")
    _add_columns(conn, schema.sessions, "submitter", "priority", "turn", "ready_at")
    _add_columns(conn, schema.outbox, "secret")
    conn.exec_driver_sql("DROP INDEX sessions_by_state")
    _add_indexes(conn, schema.tasks, "tasks_by_end")
    _add_indexes(conn, schema.sessions, "sessions_waiting")
    _add_indexes(conn, schema.sessions, "sessions_by_node")
    _add_indexes(conn, schema.outbox, "outbox_by_task")
    _add_indexes(conn, schema.events, "events_of_no_task")
    ids = conn.execute(sa.text("SELECT task_id FROM tasks")).scalars().all()
    write = sa.text("UPDATE tasks SET digest = :digest WHERE task_id = :id")
    for task_id in ids:
        body = conn.scalar(sa.text("SELECT body FROM tasks WHERE task_id = :id"), {"id": task_id})
        digest = task_digest(TaskRequest.model_validate_json(body or ""))
        conn.execute(write, {"id": task_id, "digest": digest})


def _to_3(conn: sa.Connection) -> None:
    """Identities of nodes. The next node that uses a known id sets its identity."""
    _add_columns(conn, schema.nodes, "identity")


def _to_4(conn: sa.Connection) -> None:
    """Needs of sessions and offers of nodes; the queue's index includes needs. Existing sessions have no needs."""
    _add_columns(conn, schema.sessions, "needs")
    _add_columns(conn, schema.nodes, "offer")
    conn.exec_driver_sql("DROP INDEX IF EXISTS sessions_in_queue")
    _add_indexes(conn, schema.sessions, "sessions_in_queue")


def _to_5(conn: sa.Connection) -> None:
    """Forks of a session can be found without reading every task."""
    _add_columns(conn, schema.tasks, "fork_of")
    _add_indexes(conn, schema.tasks, "tasks_by_fork")
    table = schema.tasks.c
    for task_id, body in conn.execute(sa.select(table.task_id, table.body).where(table.body.like('%"fork":{%'))).all():
        fork = TaskRequest.model_validate_json(body).fork
        if fork is not None:
            changed = sa.update(schema.tasks).where(table.task_id == task_id).values(fork_of=fork.session_id)
            conn.execute(changed)


def _to_6(conn: sa.Connection) -> None:
    """Needs include names of images, which are longer. SQLite does not enforce text lengths."""
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql("ALTER TABLE IF EXISTS needs ALTER COLUMN body TYPE TEXT")


def _to_7(conn: sa.Connection) -> None:
    """Lists of tasks tell runs, harnesses, models and tokens; the last two stay unknown for existing sessions."""
    _add_columns(conn, schema.tasks, "run", "harness")
    _add_columns(conn, schema.sessions, "model", "num_sampled_tokens")
    _add_indexes(conn, schema.tasks, "tasks_by_run")
    write = sa.text("UPDATE tasks SET run = :run, harness = :harness WHERE task_id = :id")
    for task_id in conn.execute(sa.text("SELECT task_id FROM tasks")).scalars().all():
        body = conn.scalar(sa.text("SELECT body FROM tasks WHERE task_id = :id"), {"id": task_id})
        harness = msgspec.json.decode(body or "")["agent"]["harness"]
        conn.execute(write, {"id": task_id, "run": run_of(task_id), "harness": harness})


def _to_8(conn: sa.Connection) -> None:
    """Tenants: everything so far belongs to the first one. Turns are shared out within a tenant."""
    _add_columns(conn, schema.tasks, "tenant")
    _add_columns(conn, schema.sessions, "tenant")
    _add_columns(conn, schema.nodes, "key")
    _add_indexes(conn, schema.tasks, "tasks_by_tenant")
    conn.exec_driver_sql("DROP INDEX IF EXISTS sessions_by_submitter")
    new = ("sessions_by_tenant", "sessions_of_submitter", "sessions_queued_by_tenant", "sessions_leased_by_tenant")
    _add_indexes(conn, schema.sessions, *new)
    schema.tenants.create(conn)
    conn.exec_driver_sql("INSERT INTO tenants (name) VALUES ('default')")
    schema.turns.create(conn)
    if sa.inspect(conn).has_table("turns"):
        conn.exec_driver_sql(
            "INSERT INTO tenant_turns (tenant, priority, turn) SELECT 'default', priority, turn FROM turns"
        )
        conn.exec_driver_sql("DROP TABLE turns")


def _to_9(conn: sa.Connection) -> None:
    """Callbacks of tenants' tokens are told from operators'. Those of the first tenant so far are the operator's."""
    _add_columns(conn, schema.tasks, "bound")
    conn.exec_driver_sql("UPDATE tasks SET bound = tenant <> 'default'")


_STEPS: Mapping[int, Callable[[sa.Connection], None]] = {
    2: _to_2,
    3: _to_3,
    4: _to_4,
    5: _to_5,
    6: _to_6,
    7: _to_7,
    8: _to_8,
    9: _to_9,
}
"""version -> the step from the previous version to it."""


def _add_columns(conn: sa.Connection, table: sa.Table, *names: str) -> None:
    for name in names:
        column = CreateColumn(table.c[name]).compile(dialect=conn.dialect)
        conn.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {column}")


def _add_indexes(conn: sa.Connection, table: sa.Table, *names: str) -> None:
    for index in table.indexes:
        if index.name in names:
            index.create(conn)
