"""Finds tasks that may be deleted: ended, with their callback delivered or expired; the first to end comes first.

A task is deleted with its sessions, annotations, events and callback. The owner of its results must remove these
before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from gangline.store.sql.schema import LEASED, annotations, events, nodes, outbox, sessions, tasks


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of retention. None means no limit."""

    for_s: float | None = None
    """Seconds since the end of a task."""
    max_bytes: int | None = None
    """Bytes of all stored results. Beyond it, tasks that ended first are deleted first."""


_DELIVERED = ~sa.exists().where(outbox.c.task_id == tasks.c.task_id, outbox.c.state == "pending")
_ENDED = tasks.c.ended_at.is_not(None)


def forgettable(conn: sa.Connection, keep: Keep, *, now: float, limit: int) -> list[str]:
    """Ids of tasks beyond the retention limits, at most `limit`."""
    ended = sa.select(tasks.c.task_id, tasks.c.ended_at, tasks.c.result_bytes).where(_ENDED, _DELIVERED)
    rows = conn.execute(ended.order_by(tasks.c.ended_at, tasks.c.position).limit(limit)).all()
    too_many_bytes = 0
    if keep.max_bytes is not None:
        too_many_bytes = (conn.scalar(sa.select(sa.func.sum(tasks.c.result_bytes))) or 0) - keep.max_bytes
    chosen: list[str] = []
    for task_id, ended_at, num_bytes in rows:
        is_old = keep.for_s is not None and ended_at < now - keep.for_s
        if not is_old and too_many_bytes <= 0:
            break  # the rest ended later
        too_many_bytes -= num_bytes
        chosen.append(task_id)
    return chosen


def forget(conn: sa.Connection, task_ids: Sequence[str]) -> int:
    """Returns the number of deleted tasks."""
    named = tasks.c.task_id.in_(task_ids)
    locked = sa.select(tasks.c.task_id).where(named, _ENDED, _DELIVERED).with_for_update()
    gone = conn.execute(locked).scalars().all()
    for table in (annotations, events, outbox, sessions, tasks):
        conn.execute(sa.delete(table).where(table.c.task_id.in_(gone)))
    return len(gone)


def forget_events(conn: sa.Connection, before: float) -> int:
    """Delete events without a task. Events of tasks are deleted with their tasks."""
    return conn.execute(sa.delete(events).where(events.c.task_id.is_(None), events.c.at < before)).rowcount


def forget_nodes(conn: sa.Connection, which: sa.ColumnElement[bool]) -> int:
    """Delete those of these nodes that hold no lease. A node that returns joins like a new one."""
    holds = sa.exists().where(LEASED, sessions.c.node_id == nodes.c.node_id)
    return conn.execute(sa.delete(nodes).where(which, ~holds)).rowcount
