"""Writes a decision about a session: its row, the event that announces it, and the end of its task."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from gangline.domain.errors import Failure
from gangline.domain.lifecycle import TaskState
from gangline.domain.session import SessionResult, is_usable
from gangline.store.sql.leasing import Standing, cancel, fault_of, reported_end
from gangline.store.sql.outbox import add_callback
from gangline.store.sql.reader import task_view
from gangline.store.sql.rows import Unit, end_leased, locked_rows, standing_of, write_standings
from gangline.store.sql.schema import events, sessions, tasks

CALLBACK = "callback"
"""Name in the data of a task's last event, where a callback is due."""

_ENDED = "session.ended"
_MAX_KNOWN = 10_000
_MAX_TOLD_CHARS = 300
"""Characters of a failure's message in an event; the session's view has the full message."""

# Built once, as in rows.py.
_IT = tasks.c.task_id == sa.bindparam("id")
_ADD_BYTES = sa.update(tasks).where(_IT).values(result_bytes=tasks.c.result_bytes + sa.bindparam("num_bytes"))
_IS_LAST = tasks.c.num_open == 1
_COUNT_END = _ADD_BYTES.values(
    num_open=tasks.c.num_open - 1,
    status=sa.case((_IS_LAST, sa.bindparam("ends", type_=sa.String())), else_=tasks.c.status),
    ended_at=sa.case((_IS_LAST, sa.bindparam("now", type_=sa.Float()))),
).returning(tasks.c.position, sa.case((tasks.c.num_open == 0, tasks.c.body)).label("last_body"))
_BODY = sa.select(tasks.c.body).where(_IT)
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
    **columns: Any,
) -> None:
    """Write the session's new state, emit its event, and end its task with its last session.

    after: None changes nothing. kind: of the event, if the session does not end. ends_task: the task's state if this
    ends it. num_bytes: size of a result stored for it. columns: further columns of its row, if it ends.
    """
    if after is None:
        return
    session_id, task_id = row["session_id"], row["task_id"]
    if row["state"] == "leased":
        unit.charge(row, columns.get("num_sampled_tokens"))
    if after.state == "ended":
        write_standings(unit, [(row, after)], ended_at=unit.now, **columns)
        told = {"outcome": after.outcome, "attempt": after.attempt, "node": after.node_id}
        unit.emit(_ENDED, task_id, session_id, **told, reward=columns.get("reward"), **_why(after.failure))
        _count_end(unit, task_id, num_bytes, ends_task)
    else:
        write_standings(unit, [(row, after)])
        if num_bytes:
            unit.conn.execute(_ADD_BYTES, {"id": task_id, "num_bytes": num_bytes})
        why = _why(after.failure) if kind == "session.requeued" else {}
        if after.ready_at is not None:
            why["ready_at"] = after.ready_at
        unit.emit(kind, task_id, session_id, node=after.node_id, attempt=after.attempt, **why)


def end_reported(unit: Unit, result: SessionResult, *, num_bytes: int, **columns: Any) -> bool:
    """As `move`, for a report that ends its session whatever else is known of it. False, without any change, if its
    attempt does not hold the session, or the end is not sure.
    """
    if fault_of(result.outcome, result.failure) is not None:
        return False
    changes = reported_end(result.fence, result.outcome, result.failure)
    if (ended := end_leased(unit, result, changes, ended_at=unit.now, **columns)) is None:
        return False
    unit.charge(ended, columns.get("num_sampled_tokens"))
    told: dict[str, Any] = {"outcome": result.outcome, "attempt": result.attempt, "node": ended["node_id"]}
    usable = {"usable": True} if is_usable(result) else {}
    unit.emit(_ENDED, result.task_id, result.session_id, **told, reward=result.reward, **usable, **_why(result.failure))
    position, has_ended = _count_end(unit, result.task_id, num_bytes, "ended")
    if usable and not has_ended:
        _stop_early(unit, result.task_id, position)
    return True


def _stop_early(unit: Unit, task_id: str, position: int) -> None:
    """Cancel the open sessions of a task with enough usable sessions: see `is_usable`.

    A session that another transaction is changing is skipped: it is being reported, and waits for the task's row.
    """
    if position not in unit.learnt.enough:
        if len(unit.learnt.enough) >= _MAX_KNOWN:
            unit.learnt.enough.clear()
        unit.learnt.enough[position] = _enough(unit, task_id)
    if (enough := unit.learnt.enough[position]) is None:
        return
    ends = [msgspec.json.decode(data) for data in unit.conn.execute(_ENDS, {"id": task_id}).scalars()]
    ends += [event.data for event in unit.events if (event.kind, event.task_id) == (_ENDED, task_id)]
    if sum("usable" in data for data in ends) < enough:
        return
    still_open = sa.and_(sessions.c.task_id == task_id, sessions.c.state != "ended")
    for row in locked_rows(unit, still_open, skip_locked=True):
        move(unit, row, cancel(standing_of(row)))


def _enough(unit: Unit, task_id: str) -> int | None:
    wanted = msgspec.json.decode(unit.conn.scalar(_BODY, {"id": task_id}) or "{}", type=_Enough)
    return None if wanted.held_out else wanted.enough_sessions  # else an evaluation would favour short sessions


def _why(failure: Failure | None) -> dict[str, Any]:
    """The failure's fields in an event."""
    if failure is None:
        return {}
    return {"boundary": failure.boundary, "code": failure.code, "message": failure.message[:_MAX_TOLD_CHARS]}


def _count_end(unit: Unit, task_id: str, num_bytes: int, ends: TaskState) -> tuple[int, bool]:
    """Count the end of one of the task's sessions; the last one ends the task. Returns the task's position, and whether
    it has ended.
    """
    values = {"id": task_id, "num_bytes": num_bytes, "ends": ends, "now": unit.now}
    position, body = unit.conn.execute(_COUNT_END, values).one()
    if body is not None:
        _announce_end(unit, task_id, ends, body)
    return position, body is not None


def _announce_end(unit: Unit, task_id: str, status: TaskState, body: str) -> None:
    has_callback = bool(msgspec.json.decode(body).get("callback_url"))
    if has_callback:
        view = task_view(unit.conn, task_id, unit.now)
        add_callback(unit.conn, view, now=unit.now, expiry_s=unit.callback_expiry_s)
    due: dict[str, Any] = {CALLBACK: True} if has_callback else {}
    unit.emit("task.ended", task_id, status=status, **due)
