"""Tasks and their sessions in SQL: submitted once, leased, reported, cancelled, swept.

Laws
- Every method is one transaction: the change, its events and its callback become durable together, or not at all.
  Transactions that lost against another server's are retried.
- `leasing.py` decides on transitions, and `moving.py` and `nodes.py` write them. Transactions begin and end here.
- `on_events` is called with events only after they are durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from gangline.domain.errors import InvalidRequest
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tenancy import DEFAULT_TENANT
from gangline.domain.views import Annotation, Event, ResultReceipt, SessionView, Submitted, TaskView
from gangline.store.sql import leasing, retention
from gangline.store.sql.annotating import add_annotation
from gangline.store.sql.database import repeated
from gangline.store.sql.moving import end_reported, move
from gangline.store.sql.nodes import claim, hear, renew, touch_node
from gangline.store.sql.reader import TaskReader, session_view, task_view
from gangline.store.sql.rows import Learnt, Unit, admit_ready, locked_rows, one_row, rows_named, standing_of
from gangline.store.sql.schema import LEASED, meta, nodes, sessions
from gangline.store.sql.shares import set_tenant
from gangline.store.sql.submitting import MAX_TASK_ID, accept, session_id_of

__all__ = ["MAX_TASK_ID", "TaskStore", "session_id_of"]

T = TypeVar("T")


def _nobody(_events: Sequence[Event]) -> None:
    return None


class TaskStore(TaskReader):
    """Reads and writes. Methods block; on an event loop: `await store.run(store.lease, ...)`.

    Long because it has every change of a session.

    target: see `Database`. clock: Unix time, UTC, seconds. lease_s: duration of a lease and of each renewal.
    callback_expiry_s: how long a callback is tried. retry_base_s: pause of a session after the first attempt that
    failed through our fault. on_events: called with durable events on the writer's thread; their `seq` is not set.
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
        self._learnt = Learnt()

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run a write on the single writer thread. It is finished even if the caller is cancelled."""
        return await self.database.run(job, *args)

    def run_blocking(self, job: Callable[..., T], *args: Any) -> T:
        """The same, from a thread other than the writer's."""
        return self.database.run_blocking(job, *args)

    def announce_to(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        """Set the function that is called with durable events from now on."""
        self._on_events = on_events

    @contextmanager
    def _unit(self) -> Generator[Unit]:
        with self.database.writing() as conn:
            unit = Unit(conn, self._clock(), callback_expiry_s=self._callback_expiry_s, learnt=self._learnt)
            yield unit
            unit.flush()
        if unit.numbered:
            self.database.when_durable(lambda: self._learnt.interned.update(unit.numbered))
        if unit.events:
            self.database.when_durable(lambda: self._on_events(unit.events))

    # For users.

    @repeated
    def submit(
        self, requests: Sequence[TaskRequest], tenant: str = DEFAULT_TENANT, bound: bool = False
    ) -> list[Submitted]:
        """Accept all of them or none. Submitting the same task again returns the same response.

        Raises: as `accept`.
        """
        with self._unit() as unit:
            return accept(unit, requests, tenant, bound=bound)

    @repeated
    def cancel_task(self, task_id: str) -> TaskView:
        """End the open sessions. A task that already ended is unchanged. Raises: NotFound."""
        with self._unit() as unit:
            view = task_view(unit.conn, task_id, unit.now)
            still_open = [session.session_id for session in view.sessions if session.state != "ended"]
            for row in rows_named(unit, still_open):
                move(unit, row, leasing.cancel(standing_of(row)), ends_task="cancelled")
            return task_view(unit.conn, task_id, unit.now)

    @repeated
    def cancel_session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        with self._unit() as unit:
            row = one_row(unit, session_id)
            move(unit, row, leasing.cancel(standing_of(row)))
            return session_view(one_row(unit, session_id))

    @repeated
    def annotate(self, session_id: str, fields: Mapping[str, Any]) -> Annotation:
        """said: the annotation's fields. Raises: NotFound."""
        with self._unit() as unit:
            return add_annotation(unit.conn, session_id, unit.now, **fields)

    # For the server itself.

    @repeated
    def change_note(self, key: str, change: Callable[[str | None], str]) -> str:
        """Replace the note that the server stores under `key` by `change(note)`. Returns the new note."""
        with self._unit() as unit:
            is_it = meta.c.key == key
            found = unit.conn.scalar(sa.select(meta.c.value).where(is_it).with_for_update())
            value = change(found)
            if found is None:
                unit.conn.execute(sa.insert(meta).values(key=key, value=value))
            elif found != value:
                unit.conn.execute(sa.update(meta).where(is_it).values(value=value))
            return value

    @repeated
    def set_tenant(self, name: str, changes: Mapping[str, float | None]) -> None:
        """Set its weight and quotas. changes: columns that change."""
        with self._unit() as unit:
            set_tenant(unit, name, changes)

    @property
    def has_quotas(self) -> bool:
        """Whether there were quotas when a node last asked for work."""
        return self._learnt.has_quotas

    # For nodes.

    @repeated
    def lease(
        self,
        node_id: str,
        url: str,
        max_sessions: int,
        identity: str = "",
        task_ids: Sequence[str] | None = None,
        key: str = "",
    ) -> list[Lease]:
        """Lease up to `max_sessions` sessions to a node: by priority, then turn by turn between submitters.

        identity: see `Heartbeat`. task_ids: only sessions of these tasks. key: `Principal.node_key` of the node.
        Raises: NodeIdTaken.
        """
        with self._unit() as unit:
            offer, are_due = touch_node(unit, node_id, identity=identity, lease_s=self.lease_s, url=url, key=key)
            lease_s = self.lease_s
            return claim(unit, node_id, max_sessions, task_ids, lease_s=lease_s, offer=offer, are_due=are_due)

    @repeated
    def lease_elsewhere(self, request: TaskRequest, holder: str, max_sessions: int) -> list[Lease]:
        """Accept a task that runs outside of nodes, and lease up to `max_sessions` of its sessions to `holder`, who is
        not a node. Asked again, its sessions that have not ended are leased anew.

        The task must need a label that no node has, so that none leases its other sessions. Raises: as `submit`.
        """
        with self._unit() as unit:
            (submitted,) = accept(unit, [request], for_nodes=False)
            for row in rows_named(unit, submitted.session_ids):
                if row["state"] == "leased":
                    released = leasing.release(standing_of(row), node_id=holder, fence=row["fence"])
                    move(unit, row, released, kind="session.released")
            return claim(unit, holder, max_sessions, [submitted.task_id], lease_s=self.lease_s, offer=None)

    @repeated
    def passed_over(self, task_id: str, needs: Sequence[str]) -> None:
        """Record that no present node can run the task. `needs`: the fields that they do not serve."""
        with self._unit() as unit:
            unit.emit("task.passed_over", task_id, needs=", ".join(needs))

    @repeated
    def heartbeat(self, beat: Heartbeat, key: str = "") -> HeartbeatReply:
        """Renew the leases that the node still holds, and name the sessions that it must drop. Raises: NodeIdTaken."""
        with self._unit() as unit:
            return hear(unit, beat, lease_s=self.lease_s, key=key)

    @repeated
    def renew(self, beat: Heartbeat) -> set[str]:
        """Renew leases that the server itself keeps for a node, without recording contact. Returns the sessions it
        holds.
        """
        with self._unit() as unit:
            return renew(unit, beat, lease_s=self.lease_s)

    @repeated
    def release(self, node_id: str, session_id: str, fence: int, has_run: bool = False) -> None:
        """Return a session to the queue. If its agent has started, the attempt is used up. Raises: NotFound,
        LeaseLost.
        """
        with self._unit() as unit:
            row = one_row(unit, session_id)
            after = leasing.release(standing_of(row), node_id=node_id, fence=fence, has_run=has_run)
            move(unit, row, after, kind="session.requeued" if has_run else "session.released")

    @repeated
    def report(self, result: SessionResult, keep: Callable[[], object], num_bytes: int = 0) -> ResultReceipt:
        """Accept a node's result.

        keep: makes the staged result final; called only if it is accepted, before the commit, possibly more than once.
        num_bytes: size of the stored result. Raises: NotFound, LeaseLost, InvalidRequest if the result names another
        task or attempt.
        """
        columns: dict[str, Any] = {
            "reward": result.reward,
            "result_attempt": result.attempt,
            "model": result.completions[-1].model if result.completions else None,
            "num_sampled_tokens": sum(len(call.sampled_ids) for call in result.completions),
        }
        with self._unit() as unit:
            if end_reported(unit, result, num_bytes=num_bytes, **columns):
                keep()
                return ResultReceipt(accepted=True, state="ended")
            row = one_row(unit, result.session_id)
            before = standing_of(row)
            ready_at = unit.now + leasing.retry_pause_s(before.attempt, base_s=self._retry_base_s)
            after = leasing.report(
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
            move(unit, row, after, num_bytes=num_bytes, **columns)
            return ResultReceipt(accepted=True, state=after.state)

    # For the server's own upkeep.

    @repeated
    def sweep(self) -> int:
        """Reclaim expired leases. Returns their number."""
        with self._unit() as unit:
            rows = locked_rows(unit, LEASED & (sessions.c.expires_at <= unit.now), skip_locked=True)
            for row in rows:
                move(unit, row, leasing.expire(standing_of(row), now=unit.now))
            return len(rows)

    @repeated
    def admit_ready(self) -> int:
        """Admit sessions to the queue that waited long enough after a fault. Returns their number."""
        with self._unit() as unit:
            return admit_ready(unit)

    @repeated
    def forget(self, task_ids: Sequence[str]) -> int:
        """Delete ended tasks with all their data; tasks still needed are kept. Returns the number deleted."""
        with self._unit() as unit:
            return retention.forget(unit.conn, task_ids)

    @repeated
    def forget_events(self, before: float) -> int:
        """Delete old events without a task. Returns their number."""
        with self._unit() as unit:
            return retention.forget_events(unit.conn, before)

    @repeated
    def forget_nodes(self, before: float) -> int:
        """Delete nodes without contact since then. Returns their number."""
        with self._unit() as unit:
            return retention.forget_nodes(unit.conn, nodes.c.last_seen_at < before)

    @repeated
    def grant_grace(self) -> int:
        """Renew all leases, after a time in which *we* could not receive heartbeats. Returns their number."""
        with self._unit() as unit:
            held = sa.update(sessions).where(LEASED)
            return unit.conn.execute(held.values(expires_at=unit.now + self.lease_s)).rowcount
