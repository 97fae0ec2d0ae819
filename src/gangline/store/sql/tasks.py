"""Tasks and their sessions in SQL: submitted once, leased, reported, cancelled, swept.

Laws
- Every method is one transaction: the change, its events and its callback become durable together, or not at all. A
  transaction that lost against another server's is retried.
- `standing.py` decides on transitions; this module reads, applies and writes them.
- `on_events` receives events only after they are durable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from gangline.domain.errors import Failure, InvalidRequest, NodeIdTaken
from gangline.domain.lifecycle import TaskState
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import Annotation, Event, ResultReceipt, SessionView, Submitted, TaskView
from gangline.store.sql import retention, standing
from gangline.store.sql.annotating import add_annotation
from gangline.store.sql.database import repeated
from gangline.store.sql.outbox import add_callback
from gangline.store.sql.reader import TaskReader, session_view, task_view
from gangline.store.sql.rows import (
    Unit,
    let_in,
    locked_rows,
    one_row,
    queued_rows,
    rows_named,
    standing_of,
    write_standing,
    write_standings,
)
from gangline.store.sql.schema import LEASED, meta, nodes, sessions, tasks
from gangline.store.sql.standing import Standing
from gangline.store.sql.submitting import MAX_TASK_ID, accept, remember_turns, session_id_of

__all__ = ["MAX_TASK_ID", "TaskStore", "session_id_of"]

T = TypeVar("T")

_MAX_TOLD_CHARS = 300
"""Characters of a failure's message in an event; the session's view has all of it."""


def _nobody(_events: Sequence[Event]) -> None:
    return None


class TaskStore(TaskReader):
    """Reads and writes. Methods block; on an event loop: `await store.run(store.lease, ...)`.

    target: see `Database`.
    clock: Unix time, UTC, seconds.
    lease_s: how long a lease, and each renewal, lasts.
    callback_expiry_s: how long a callback is tried.
    retry_base_s: how long a session rests after the first attempt that failed through our fault.
    on_events: hears of durable events, on the writer's thread; their `seq` is not set.
    Raises (all methods): StoreError, DiskFull.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        lease_s: float = 30.0,
        callback_expiry_s: float = 24 * 3600.0,
        retry_base_s: float = 1.0,
        on_events: Callable[[Sequence[Event]], None] = _nobody,
    ) -> None:
        super().__init__(target, clock=clock, read_only=False)
        self.lease_s = lease_s
        self._callback_expiry_s = callback_expiry_s
        self._retry_base_s = retry_base_s
        self._on_events = on_events

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run a write on the one writer thread; it is finished even when the caller is cancelled."""
        return await self.database.run(job, *args)

    def run_blocking(self, job: Callable[..., T], *args: Any) -> T:
        """The same, from a thread other than the writer's."""
        return self.database.run_blocking(job, *args)

    def announce_to(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        """Set who hears of durable events from now on."""
        self._on_events = on_events

    @contextmanager
    def _unit(self) -> Generator[Unit]:
        with self.database.writing() as conn:
            unit = Unit(conn, self._clock())
            yield unit
            unit.flush()
        if unit.events:
            self.database.when_durable(lambda: self._on_events(unit.events))

    # From the user's side.

    @repeated
    def submit(self, requests: Sequence[TaskRequest]) -> list[Submitted]:
        """Accept all of them or none. The same task again is answered as the first time.

        Raises: Conflict when an id is taken by another task, InvalidRequest when an id is too long.
        """
        with self._unit() as unit:
            return accept(unit, requests)

    @repeated
    def cancel_task(self, task_id: str) -> TaskView:
        """End the sessions that have not ended. A task that ended before stays as it is. Raises: NotFound."""
        with self._unit() as unit:
            view = task_view(unit.conn, task_id)
            still_open = [session.session_id for session in view.sessions if session.state != "ended"]
            for row in rows_named(unit, still_open):
                self._move(unit, row, standing.cancel(standing_of(row)), ends_task="cancelled")
            return task_view(unit.conn, task_id)

    @repeated
    def cancel_session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        with self._unit() as unit:
            row = one_row(unit, session_id)
            self._move(unit, row, standing.cancel(standing_of(row)))
            return session_view(one_row(unit, session_id))

    @repeated
    def annotate(self, session_id: str, said: Mapping[str, Any]) -> Annotation:
        """said: the annotation's own fields. Raises: NotFound."""
        with self._unit() as unit:
            return add_annotation(unit.conn, session_id, unit.now, **said)

    # The server's own.

    @repeated
    def change_note(self, key: str, change: Callable[[str | None], str]) -> str:
        """Replace the note that the server keeps under `key` by `change(note)`; returns the new one."""
        with self._unit() as unit:
            is_it = meta.c.key == key
            found = unit.conn.scalar(sa.select(meta.c.value).where(is_it).with_for_update())
            value = change(found)
            if found is None:
                unit.conn.execute(sa.insert(meta).values(key=key, value=value))
            elif found != value:
                unit.conn.execute(sa.update(meta).where(is_it).values(value=value))
            return value

    # From a node's side.

    @repeated
    def lease(
        self, node_id: str, url: str, max_sessions: int, identity: str = "", task_ids: Sequence[str] | None = None
    ) -> list[Lease]:
        """Claim up to `max_sessions` sessions for a node: by priority, then turn by turn between submitters.

        identity: see `Heartbeat`. task_ids: sessions of these tasks alone. Raises: NodeIdTaken.
        """
        with self._unit() as unit:
            self._meet_node(unit, node_id, url=url, identity=identity)
            let_in(unit)
            now, lease_s = unit.now, self.lease_s
            claimed = [
                (row, standing.lease(standing_of(row), node_id=node_id, now=now, lease_s=lease_s))
                for row in queued_rows(unit, max_sessions, task_ids)
            ]
            write_standings(unit, claimed)
            remember_turns(unit, [row for row, _ in claimed])
            return _leases(unit, claimed, lease_s)

    @repeated
    def passed_over(self, task_id: str, needs: Sequence[str]) -> None:
        """Note that the nodes that there are cannot run the task. `needs`: the fields that they do not serve."""
        with self._unit() as unit:
            unit.emit("task.passed_over", task_id, needs=", ".join(needs))

    @repeated
    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Renew the leases that the node still holds; name the sessions that it must drop. Raises: NodeIdTaken."""
        with self._unit() as unit:
            self._meet_node(
                unit,
                beat.node_id,
                url=beat.url,
                identity=beat.identity,
                capacity=beat.capacity,
                draining=beat.draining,
                backends=msgspec.json.encode(beat.backends).decode(),
                metrics=msgspec.json.encode(beat.metrics).decode(),
            )
            self._take_back_unheard(unit, beat)
            rows = rows_named(unit, list(beat.sessions))
            renewed = self._renew(unit, rows, beat)
            reported = {str(row["session_id"]) for row in rows if _is_reported(row, beat)}
            lost = set(beat.sessions) - renewed - reported
            return HeartbeatReply(renewed=tuple(sorted(renewed)), lost=tuple(sorted(lost)), lease_s=self.lease_s)

    @repeated
    def renew(self, beat: Heartbeat) -> set[str]:
        """Renew leases that the server itself keeps for a node, which is not thereby heard. Returns those it holds."""
        with self._unit() as unit:
            return self._renew(unit, rows_named(unit, list(beat.sessions)), beat)

    def _meet_node(self, unit: Unit, node_id: str, *, identity: str, **told: Any) -> None:
        """Note that a node was heard. A node of another data folder may take an id that was silent for a lease's time.

        Raises: NodeIdTaken.
        """
        told |= {"identity": identity, "last_seen_at": unit.now}
        which = {"id": node_id, "same": identity, "gone_since": unit.now - self.lease_s}
        if unit.conn.execute(_HEARD, {**told, **which}).rowcount:
            return
        known = unit.conn.execute(_KNOWN_NODE, {"id": node_id}).first()
        if known is not None:
            raise _id_taken(node_id, known.url, free_in_s=known.last_seen_at + self.lease_s - unit.now)
        blank = {"capacity": 0, "draining": False, "backends": "[]", "metrics": "{}"}
        first = {"node_id": node_id, "first_seen_at": unit.now}
        unit.conn.execute(sa.insert(nodes).values(**{**blank, **told, **first}))
        unit.emit("node.joined", node=node_id, url=told.get("url"))

    def _take_back_unheard(self, unit: Unit, beat: Heartbeat) -> None:
        """Put back leases whose answer never reached the node: given out a while ago, and not named by its heartbeat.

        Should the answer come after all, its fence is an old one.
        """
        given = LEASED & (sessions.c.node_id == beat.node_id) & sessions.c.stage.is_(None)
        for row in locked_rows(unit, given & (sessions.c.leased_at < unit.now - self.lease_s / 3)):
            if row["session_id"] not in beat.sessions:
                after = standing.release(standing_of(row), node_id=beat.node_id, fence=row["fence"])
                self._move(unit, row, after, kind="session.released")

    def _renew(self, unit: Unit, rows: Sequence[sa.RowMapping], beat: Heartbeat) -> set[str]:
        """Gives the ids of those that the node still holds."""
        renewed: list[tuple[sa.RowMapping, Standing]] = []
        for row in rows:
            fence, stage = beat.sessions[row["session_id"]]
            before = standing_of(row)
            after = standing.renew(
                before, node_id=beat.node_id, fence=fence, stage=stage, now=unit.now, lease_s=self.lease_s
            )
            if after is None:
                continue
            renewed.append((row, after))
            if before.stage != after.stage:
                unit.emit("session.stage", row["task_id"], row["session_id"], node=beat.node_id, stage=stage)
        write_standings(unit, renewed)
        return {str(row["session_id"]) for row, _ in renewed}

    @repeated
    def release(self, node_id: str, session_id: str, fence: int) -> None:
        """Put a session back unharmed; its attempt is not spent. Raises: NotFound, LeaseLost."""
        with self._unit() as unit:
            row = one_row(unit, session_id)
            self._move(
                unit, row, standing.release(standing_of(row), node_id=node_id, fence=fence), kind="session.released"
            )

    @repeated
    def report(self, result: SessionResult, keep: Callable[[], object], num_bytes: int = 0) -> ResultReceipt:
        """Accept a node's result.

        keep: makes the staged result final; called only when it is accepted, before commit; may be called again.
        num_bytes: of the stored result.
        Raises: NotFound, LeaseLost, InvalidRequest when the result names another task or attempt.
        """
        with self._unit() as unit:
            row = one_row(unit, result.session_id)
            before = standing_of(row)
            ready_at = unit.now + standing.retry_pause_s(before.attempt, base_s=self._retry_base_s)
            after = standing.report(
                before, fence=result.fence, outcome=result.outcome, failure=result.failure, ready_at=ready_at
            )
            if after is before:
                return ResultReceipt(accepted=True, state=before.state)
            if (result.task_id, result.attempt) != (row["task_id"], before.attempt):
                raise InvalidRequest(
                    f"the result is of task {result.task_id!r}, attempt {result.attempt}; fence {result.fence} of "
                    f"{result.session_id!r} was leased for task {row['task_id']!r}, attempt {before.attempt}."
                )
            keep()
            self._move(unit, row, after, num_bytes=num_bytes, reward=result.reward, result_attempt=result.attempt)
            return ResultReceipt(accepted=True, state=after.state)

    # From the server's own side.

    @repeated
    def sweep(self) -> int:
        """Take back leases that ran out; gives how many."""
        with self._unit() as unit:
            rows = locked_rows(unit, LEASED & (sessions.c.expires_at <= unit.now), skip_locked=True)
            for row in rows:
                self._move(unit, row, standing.expire(standing_of(row), now=unit.now))
            return len(rows)

    @repeated
    def let_in(self) -> int:
        """Let those into the queue that waited long enough after a fault; gives how many."""
        with self._unit() as unit:
            return let_in(unit)

    @repeated
    def forget(self, task_ids: Sequence[str]) -> int:
        """Delete tasks that ended, with all that is known of them; one that is still needed stays. Gives how many."""
        with self._unit() as unit:
            return retention.forget(unit.conn, task_ids)

    @repeated
    def forget_events(self, before: float) -> int:
        """Delete old events that are of no task; gives how many."""
        with self._unit() as unit:
            return retention.forget_events(unit.conn, before)

    @repeated
    def grant_grace(self) -> int:
        """Renew all leases: after a time in which *we* could hear no heartbeat. Gives how many."""
        with self._unit() as unit:
            held = sa.update(sessions).where(LEASED)
            return unit.conn.execute(held.values(expires_at=unit.now + self.lease_s)).rowcount

    def _move(
        self,
        unit: Unit,
        row: sa.RowMapping,
        after: Standing | None,
        *,
        kind: str = "session.requeued",
        ends_task: TaskState = "ended",
        num_bytes: int = 0,
        **columns: Any,
    ) -> None:
        """Write where the session now stands, say so, and end its task with its last session.

        num_bytes: of a result that was stored for it.
        """
        if after is None:
            return
        session_id, task_id = row["session_id"], row["task_id"]
        if after.state == "ended":
            write_standing(unit, row, after, ended_at=unit.now, **columns)
            unit.emit(
                "session.ended",
                task_id,
                session_id,
                outcome=after.outcome,
                attempt=after.attempt,
                node=after.node_id,
                reward=columns.get("reward"),
                **_why(after.failure),
            )
            if _count(unit, task_id, num_ended=1, num_bytes=num_bytes) == 0:
                self._end_task(unit, task_id, ends_task)
        else:
            write_standing(unit, row, after)
            if num_bytes:
                _count(unit, task_id, num_bytes=num_bytes)
            why = _why(after.failure) if kind == "session.requeued" else {}
            if after.ready_at is not None:
                why["ready_at"] = after.ready_at
            unit.emit(kind, task_id, session_id, node=after.node_id, attempt=after.attempt, **why)

    def _end_task(self, unit: Unit, task_id: str, status: TaskState) -> None:
        unit.conn.execute(_END_TASK, {"id": task_id, "status": status, "ended_at": unit.now})
        if msgspec.json.decode(_body_of(unit, task_id)).get("callback_url"):
            add_callback(unit.conn, task_view(unit.conn, task_id), now=unit.now, expiry_s=self._callback_expiry_s)
        unit.emit("task.ended", task_id, status=status)


def _why(failure: Failure | None) -> dict[str, Any]:
    """The failure's fields in an event."""
    if failure is None:
        return {}
    return {"boundary": failure.boundary, "code": failure.code, "message": failure.message[:_MAX_TOLD_CHARS]}


# Made once, as in rows.py.
_IT = tasks.c.task_id == sa.bindparam("id")
_END_TASK = sa.update(tasks).where(_IT)
_START_TASK = sa.update(tasks).where(_IT, tasks.c.status == "queued")
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
_THESE = tasks.c.task_id.in_(sa.bindparam("ids", expanding=True))
_BODIES = sa.select(tasks.c.task_id, tasks.c.status, tasks.c.body).where(_THESE)
_SAME_NODE = sa.or_(
    nodes.c.identity.is_(None),
    nodes.c.identity == sa.bindparam("same"),
    nodes.c.last_seen_at <= sa.bindparam("gone_since"),
)
_HEARD = sa.update(nodes).where(nodes.c.node_id == sa.bindparam("id"), _SAME_NODE)
_KNOWN_NODE = sa.select(nodes.c.url, nodes.c.last_seen_at).where(nodes.c.node_id == sa.bindparam("id"))


def _count(unit: Unit, task_id: str, *, num_ended: int = 0, num_bytes: int = 0) -> int:
    """Gives how many sessions of the task are still open."""
    return unit.conn.scalar(_COUNT, {"id": task_id, "num_ended": num_ended, "num_bytes": num_bytes}) or 0


def _body_of(unit: Unit, task_id: str) -> str:
    return unit.conn.scalar(_BODY, {"id": task_id}) or "{}"


def _id_taken(node_id: str, url: str, *, free_in_s: float) -> NodeIdTaken:
    return NodeIdTaken(
        f"another node has the id {node_id!r}: it runs from another data folder, at {url}. Give this one another --id, "
        f"or stop the other; if the other is gone, its id is free in {max(1, math.ceil(free_in_s))} s."
    )


def _is_reported(row: sa.RowMapping, beat: Heartbeat) -> bool:
    """Whether the node's result is here already, though it has not heard so: nothing to renew, nothing to drop."""
    fence, _stage = beat.sessions[row["session_id"]]
    return row["reported_fence"] == fence > 0


def _leases(unit: Unit, claimed: Sequence[tuple[sa.RowMapping, Standing]], lease_s: float) -> list[Lease]:
    """The node's leases; tasks whose first session is leased have begun."""
    if not claimed:
        return []
    found = unit.conn.execute(_BODIES, {"ids": sorted({row["task_id"] for row, _ in claimed})}).all()
    for task_id in sorted(row.task_id for row in found if row.status == "queued"):
        if unit.conn.execute(_START_TASK, {"id": task_id, "status": "running", "started_at": unit.now}).rowcount:
            unit.emit("task.started", task_id)
    bodies = {row.task_id: msgspec.json.decode(row.body) for row in found}
    return [_lease(unit, row, after, lease_s, bodies[row["task_id"]]) for row, after in claimed]


def _lease(unit: Unit, row: sa.RowMapping, after: Standing, lease_s: float, task: dict[str, Any]) -> Lease:
    session_id, task_id = row["session_id"], row["task_id"]
    unit.emit("session.leased", task_id, session_id, node=after.node_id, attempt=after.attempt, fence=after.fence)
    return Lease(
        session_id=session_id,
        task_id=task_id,
        sample_index=row["sample_index"],
        attempt=after.attempt,
        fence=after.fence,
        expires_at=unit.now + lease_s,
        lease_s=lease_s,
        task=task,
    )
