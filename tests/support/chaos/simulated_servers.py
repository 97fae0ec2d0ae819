"""The server's side of the simulation, twice: the pure decisions in memory, and the SQL store as it is.

Both are what remains of a rollout server without HTTP: a call is a transaction, which `Crash` raised in it undoes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.store.sql import leasing
from gangline.store.sql.leasing import Standing
from gangline.store.sql.outbox import Callback, Outbox
from gangline.store.sql.tasks import TaskStore
from support.service.running import NODE_URL

__all__ = ["Crash", "Ended", "PureServer", "Server", "SqlServer"]

Clock = Callable[[], float]
RETRY_BASE_S = 0.5
EXPIRY_S = 1e9


class Crash(Exception):
    """The server dies in the middle of a transaction."""


class Ended(msgspec.Struct, frozen=True):
    """Where a session stands for its submitter."""

    task_id: str
    state: str
    outcome: str | None
    failure_code: str | None
    attempt: int
    result_attempt: int | None


class Server(Protocol):
    def submit(self, task: TaskRequest) -> None: ...
    def lease(self, node_id: str, max_sessions: int) -> list[Lease]: ...
    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply: ...
    def release(self, node_id: str, session_id: str, fence: int) -> None: ...
    def report(self, result: SessionResult, keep: Callable[[], None]) -> None: ...
    def cancel(self, task_id: str) -> None: ...
    def sweep(self) -> None: ...
    def start_again(self) -> None: ...
    def due(self) -> list[Callback]: ...
    def delivered(self, callback: Callback) -> None: ...
    def failed(self, callback: Callback, next_at: float | None) -> None: ...
    def sessions(self) -> dict[str, Ended]: ...
    def callbacks(self) -> list[tuple[str, str]]: ...
    def num_ends(self) -> Counter[str]: ...
    def close(self) -> None: ...


class SqlServer:
    """The real store, over SQLite or PostgreSQL, opened again after each crash."""

    def __init__(self, target: str | Path, clock: Clock, lease_s: float) -> None:
        self._target, self._clock, self._lease_s = target, clock, lease_s
        self._open()

    def _open(self) -> None:
        self._store = TaskStore(
            self._target,
            clock=self._clock,
            lease_s=self._lease_s,
            retry_base_s=RETRY_BASE_S,
            callback_expiry_s=EXPIRY_S,
        )
        self._outbox = Outbox(self._store.database)

    def submit(self, task: TaskRequest) -> None:
        self._store.submit([task])

    def lease(self, node_id: str, max_sessions: int) -> list[Lease]:
        return self._store.lease(node_id, NODE_URL, max_sessions)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        return self._store.heartbeat(beat)

    def release(self, node_id: str, session_id: str, fence: int) -> None:
        self._store.release(node_id, session_id, fence)

    def report(self, result: SessionResult, keep: Callable[[], None]) -> None:
        self._store.report(result, keep)

    def cancel(self, task_id: str) -> None:
        self._store.cancel_task(task_id)

    def sweep(self) -> None:
        self._store.sweep()
        self._store.admit_ready()

    def start_again(self) -> None:
        self._store.close()
        self._open()
        self._store.grant_grace()

    def due(self) -> list[Callback]:
        return self._outbox.due(self._clock(), 100)

    def delivered(self, callback: Callback) -> None:
        self._outbox.delivered(callback, now=self._clock())

    def failed(self, callback: Callback, next_at: float | None) -> None:
        self._outbox.failed(callback, now=self._clock(), next_at=next_at, error="no answer")

    def sessions(self) -> dict[str, Ended]:
        found: dict[str, Ended] = {}
        for view in self._store.sessions(limit=1000).sessions:
            code = view.failure.code if view.failure else None
            found[view.session_id] = Ended(
                view.task_id, view.state, view.outcome, code, view.attempt, view.result_attempt
            )
        return found

    def callbacks(self) -> list[tuple[str, str]]:
        return list(self._outbox.all_states())

    def num_ends(self) -> Counter[str]:
        events = self._store.events(limit=100_000)
        return Counter(str(event.session_id) for event in events if event.kind == "session.ended")

    def close(self) -> None:
        self._store.close()


class _Row(msgspec.Struct):
    task_id: str
    standing: Standing
    result_attempt: int | None = None


class PureServer:
    """Only what `standing` and the outbox's rules decide, on dictionaries; a transaction assigns at its end."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock, self._lease_s = clock, lease_s
        self._tasks: dict[str, TaskRequest] = {}
        self._rows: dict[str, _Row] = {}
        self._outbox: dict[int, tuple[Callback, str]] = {}
        self._ends: Counter[str] = Counter()

    def submit(self, task: TaskRequest) -> None:
        task_id = str(task.task_id)
        if task_id in self._tasks:
            return
        self._tasks[task_id] = task
        for index in range(task.num_samples):
            self._rows[f"{task_id}-{index}"] = _Row(task_id, Standing(max_attempts=task.max_attempts))

    def _move(self, session_id: str, after: Standing | None, **changes: Any) -> None:
        row = self._rows[session_id]
        before = row.standing
        if after is None or after is before:
            return
        self._rows[session_id] = msgspec.structs.replace(row, standing=after, **changes)
        if after.state == "ended":
            self._ends[session_id] += 1
            group = [one for one in self._rows.values() if one.task_id == row.task_id]
            if all(one.standing.state == "ended" for one in group):
                self._add_callback(row.task_id, [one.standing.outcome for one in group])

    def _add_callback(self, task_id: str, outcomes: list[str | None]) -> None:
        now, number = self._clock(), len(self._outbox)
        body = msgspec.json.encode({"outcomes": outcomes}).decode()
        told: dict[str, Any] = {"id": number, "key": f"{task_id}:ended", "task_id": task_id, "url": "", "body": body}
        times = {"created_at": now, "next_at": now, "expires_at": now + EXPIRY_S}
        self._outbox[number] = (Callback(num_tries=0, **told, **times), "pending")

    def lease(self, node_id: str, max_sessions: int) -> list[Lease]:
        now = self._clock()
        leases: list[Lease] = []
        for session_id, row in self._rows.items():
            if len(leases) == max_sessions:
                break
            if row.standing.state != "queued" or (row.standing.ready_at or 0.0) > now:
                continue
            after = leasing.lease(row.standing, node_id=node_id, now=now, lease_s=self._lease_s)
            row.standing = after
            leases.append(
                Lease(
                    session_id=session_id,
                    task_id=row.task_id,
                    sample_index=0,
                    attempt=after.attempt,
                    fence=after.fence,
                    expires_at=now + self._lease_s,
                    lease_s=self._lease_s,
                    task={},
                )
            )
        return leases

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        now = self._clock()
        for session_id, row in self._rows.items():
            here = row.standing
            given = here.state == "leased" and here.node_id == beat.node_id and here.stage is None
            if given and session_id not in beat.sessions and (here.leased_at or 0.0) < now - self._lease_s / 3:
                self._move(session_id, leasing.unheard(here))
        renewed: list[str] = []
        lost: list[str] = []
        for session_id, (fence, stage) in beat.sessions.items():
            here = self._rows[session_id].standing
            after = leasing.renew(here, node_id=beat.node_id, fence=fence, stage=stage, now=now, lease_s=self._lease_s)
            self._move(session_id, after)
            if after is not None:
                renewed.append(session_id)
            elif here.reported_fence != fence:
                lost.append(session_id)
        return HeartbeatReply(renewed=tuple(renewed), lost=tuple(lost), lease_s=self._lease_s)

    def release(self, node_id: str, session_id: str, fence: int) -> None:
        self._move(session_id, leasing.release(self._rows[session_id].standing, node_id=node_id, fence=fence))

    def report(self, result: SessionResult, keep: Callable[[], None]) -> None:
        before = self._rows[result.session_id].standing
        ready_at = self._clock() + leasing.retry_pause_s(before.attempt, base_s=RETRY_BASE_S)
        after = leasing.report(
            before, fence=result.fence, outcome=result.outcome, failure=result.failure, ready_at=ready_at
        )
        if after is not before:
            keep()
            self._move(result.session_id, after, result_attempt=result.attempt)

    def cancel(self, task_id: str) -> None:
        for session_id, row in list(self._rows.items()):
            if row.task_id == task_id:
                self._move(session_id, leasing.cancel(row.standing))

    def sweep(self) -> None:
        for session_id, row in list(self._rows.items()):
            self._move(session_id, leasing.expire(row.standing, now=self._clock()))

    def start_again(self) -> None:
        for row in self._rows.values():
            if row.standing.state == "leased":
                row.standing = msgspec.structs.replace(row.standing, expires_at=self._clock() + self._lease_s)

    def due(self) -> list[Callback]:
        now = self._clock()
        return [one for one, state in self._outbox.values() if state == "pending" and one.next_at <= now]

    def delivered(self, callback: Callback) -> None:
        if self._outbox[callback.id][1] == "pending":
            self._outbox[callback.id] = (callback, "delivered")

    def failed(self, callback: Callback, next_at: float | None) -> None:
        if self._outbox[callback.id][1] == "pending":
            tried = msgspec.structs.replace(callback, num_tries=callback.num_tries + 1, next_at=next_at or 0.0)
            self._outbox[callback.id] = (tried, "expired" if next_at is None else "pending")

    def sessions(self) -> dict[str, Ended]:
        found: dict[str, Ended] = {}
        for session_id, row in self._rows.items():
            here = row.standing
            code = here.failure.code if here.failure else None
            found[session_id] = Ended(row.task_id, here.state, here.outcome, code, here.attempt, row.result_attempt)
        return found

    def callbacks(self) -> list[tuple[str, str]]:
        return [(one.key, state) for one, state in self._outbox.values()]

    def num_ends(self) -> Counter[str]:
        return Counter(self._ends)

    def close(self) -> None:
        return
