"""The tables. One definition for SQLite and PostgreSQL; times are Unix times, UTC, seconds."""

from __future__ import annotations

import sqlalchemy as sa

__all__ = ["SCHEMA_VERSION", "events", "meta", "metadata", "nodes", "outbox", "sessions", "tasks"]

SCHEMA_VERSION = 1

metadata = sa.MetaData()

_Position = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""SQLite numbers rows by itself only where the key is spelled INTEGER."""

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
    sa.Index("tasks_by_status", "status", "position"),
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
    sa.Index("sessions_by_task", "task_id", "sample_index"),
    sa.Index("sessions_by_state", "state", "position"),
    # Only leased rows have an expiry, so this stays as small as what is running.
    sa.Index(
        "sessions_by_expiry",
        "expires_at",
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    ),
    sqlite_autoincrement=True,
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
    sa.Index("outbox_due", "state", "next_at"),
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
    # Numbers are never used twice, even when old rows are gone: clients resume by them.
    sqlite_autoincrement=True,
)
