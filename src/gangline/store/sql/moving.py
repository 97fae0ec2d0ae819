"""Writes a decision about a session: its row, the event that announces it, and the end of its task."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from gangline.domain.errors import Failure
from gangline.domain.lifecycle import TaskState
from gangline.store.sql.leasing import Standing, cancel
from gangline.store.sql.outbox import add_callback
from gangline.store.sql.reader import task_view
from gangline.store.sql.rows import Unit, locked_rows, standing_of, write_standing
from gangline.store.sql.schema import events, sessions, tasks

CALLBACK = "callback"
"""Name in the data of a task's last event, where a callback is due."""

_ENDED = "session.ended"
_MAX_TOLD_CHARS = 300
"""Characters of a failure's message in an event; the session's view has the full message."""

# Built once, as in rows.py.
_IT = tasks.c.task_id == sa.bindparam("id")
_END_TASK = sa.update(tasks).where(_IT)
_COUNT = (
    sa.update(tasks)
    .where(_IT)
    .values(
        num_open=tasks.c.num_open - sa.bindparam("num_ended"),
        result_bytes=tasks.c.result_bytes + sa.bindparam("num_bytes"),
    )
    .returning(tasks.c.num_open)
)
_BODY = sa.select(tasks.c.body).where(_IT)
_OPEN_BODY = _BODY.where(tasks.c.num_open > 0)
_ENDS = sa.select(events.c.data).where(events.c.task_id == sa.bindparam("id"), events.c.kind == _ENDED)


class _Enough(msgspec.Struct):
    """The fields of a task's request that determine when its group has enough sessions."""

    enough_sessions: int | None = None
    held_out: bool = False


def move(
    unit: Unit,
    row: sa.RowMapping,
    after: Standing | None,
    *,
    kind: str = "session.requeued",
    ends_task: TaskState = "ended",
    num_bytes: int = 0,
    is_usable: bool = False,
    **columns: Any,
) -> None:
    """Write the session's new state, emit its event, and end its task with its last session.

    after: None changes nothing. kind: of the event, if the session does not end. ends_task: the task's state if this
    ends it. num_bytes: size of a result stored for it. is_usable: see `stop_early`. columns: further columns of its
    row, if it ends.
    """
    if after is None:
        return
    session_id, task_id = row["session_id"], row["task_id"]
    if after.state == "ended":
        write_standing(unit, row, after, ended_at=unit.now, **columns)
        unit.emit(
            _ENDED,
            task_id,
            session_id,
            outcome=after.outcome,
            attempt=after.attempt,
            node=after.node_id,
            reward=columns.get("reward"),
            **({"usable": True} if is_usable else {}),
            **_why(after.failure),
        )
        if _count(unit, task_id, num_ended=1, num_bytes=num_bytes) == 0:
            _end_task(unit, task_id, ends_task)
    else:
        write_standing(unit, row, after)
        if num_bytes:
            _count(unit, task_id, num_bytes=num_bytes)
        why = _why(after.failure) if kind == "session.requeued" else {}
        if after.ready_at is not None:
            why["ready_at"] = after.ready_at
        unit.emit(kind, task_id, session_id, node=after.node_id, attempt=after.attempt, **why)


def stop_early(unit: Unit, task_id: str) -> None:
    """Cancel the open sessions of a task with enough usable sessions: see `is_usable`.

    A session that another transaction is changing is skipped: it is being reported, and waits for the task's row.
    """
    wanted = msgspec.json.decode(unit.conn.scalar(_OPEN_BODY, {"id": task_id}) or "{}", type=_Enough)
    if wanted.enough_sessions is None or wanted.held_out:  # else an evaluation would favour short sessions
        return
    ends = [msgspec.json.decode(data) for data in unit.conn.execute(_ENDS, {"id": task_id}).scalars()]
    ends += [event.data for event in unit.events if (event.kind, event.task_id) == (_ENDED, task_id)]
    if sum("usable" in data for data in ends) < wanted.enough_sessions:
        return
    still_open = sa.and_(sessions.c.task_id == task_id, sessions.c.state != "ended")
    for row in locked_rows(unit, still_open, skip_locked=True):
        move(unit, row, cancel(standing_of(row)))


def _why(failure: Failure | None) -> dict[str, Any]:
    """The failure's fields in an event."""
    if failure is None:
        return {}
    return {"boundary": failure.boundary, "code": failure.code, "message": failure.message[:_MAX_TOLD_CHARS]}


def _count(unit: Unit, task_id: str, *, num_ended: int = 0, num_bytes: int = 0) -> int:
    """Returns the number of the task's sessions that are still open."""
    return unit.conn.scalar(_COUNT, {"id": task_id, "num_ended": num_ended, "num_bytes": num_bytes}) or 0


def _end_task(unit: Unit, task_id: str, status: TaskState) -> None:
    unit.conn.execute(_END_TASK, {"id": task_id, "status": status, "ended_at": unit.now})
    body = unit.conn.scalar(_BODY, {"id": task_id}) or "{}"
    has_callback = bool(msgspec.json.decode(body).get("callback_url"))
    if has_callback:
        view = task_view(unit.conn, task_id, unit.now)
        add_callback(unit.conn, view, now=unit.now, expiry_s=unit.callback_expiry_s)
    due: dict[str, Any] = {CALLBACK: True} if has_callback else {}
    unit.emit("task.ended", task_id, status=status, **due)
