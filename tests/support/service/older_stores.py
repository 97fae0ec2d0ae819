"""Databases as earlier versions left them."""

from __future__ import annotations

import sqlalchemy as sa


def make_older(conn: sa.Connection, version: int) -> None:
    """Take away what versions 7 to 9 of the schema added, and mark the database as of `version`."""
    by_tenant = ("tasks_by_tenant", "sessions_by_tenant", "sessions_of_submitter")
    for statement in (
        *(f"DROP INDEX {name}" for name in (*by_tenant, "sessions_queued_by_tenant", "sessions_leased_by_tenant")),
        *(f"ALTER TABLE {name} DROP COLUMN tenant" for name in ("tasks", "sessions")),
        "ALTER TABLE nodes DROP COLUMN key",
        "ALTER TABLE tasks DROP COLUMN bound",
        *(f"DROP TABLE {name}" for name in ("tenants", "tokens", "tenant_turns")),
        "CREATE TABLE turns (priority INTEGER PRIMARY KEY, turn BIGINT NOT NULL)",
        "DROP INDEX tasks_by_run",
        *(f"ALTER TABLE tasks DROP COLUMN {name}" for name in ("run", "harness")),
        *(f"ALTER TABLE sessions DROP COLUMN {name}" for name in ("model", "num_sampled_tokens")),
        f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'",
    ):
        conn.exec_driver_sql(statement)
