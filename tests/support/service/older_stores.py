"""Databases as earlier versions left them."""

from __future__ import annotations

import sqlalchemy as sa


def make_older(conn: sa.Connection, version: int) -> None:
    """Take away what version 7 of the schema added, and mark the database as of `version`."""
    for statement in (
        "DROP INDEX tasks_by_run",
        *(f"ALTER TABLE tasks DROP COLUMN {name}" for name in ("run", "harness")),
        *(f"ALTER TABLE sessions DROP COLUMN {name}" for name in ("model", "num_sampled_tokens")),
        f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'",
    ):
        conn.exec_driver_sql(statement)
