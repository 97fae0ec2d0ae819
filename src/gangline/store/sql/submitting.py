"""Accepts tasks, many at once, and assigns turns that share the queue between submitters.

Each session gets a *turn* when it is submitted, and the queue is ordered by (priority, turn, position). Turns of one
submitter are consecutive, and its first one follows the latest leased turn. So two submitters with queued sessions
alternate, independent of arrival and of the number queued, an idle submitter saves up no turns, and the head of the
queue is one index lookup. (Start-time fair queueing: every session counts as one, however long it runs.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from gangline.domain.errors import Conflict, InvalidRequest, NotFound
from gangline.domain.ids import new_id, run_of
from gangline.domain.placement import Needs, needs_of
from gangline.domain.task import TaskRequest, task_digest
from gangline.domain.tenancy import DEFAULT_TENANT
from gangline.domain.views import Submitted
from gangline.store.sql.placing import intern, unserved
from gangline.store.sql.rows import Unit
from gangline.store.sql.schema import QUEUED, sessions, tasks, turns
from gangline.store.sql.shares import admit

MAX_TASK_ID = 123
"""An id has at most 128 characters, and a session's id is its task's plus `.` and at most four digits."""

_MANY = 500
_TENANT_OF = sa.select(sessions.c.tenant).where(sessions.c.session_id == sa.bindparam("id"))
_ADD_TASKS = sa.insert(tasks).returning(tasks.c.position)
_ADD_SESSIONS = sa.insert(sessions).returning(sessions.c.position)
"""With what SQLAlchemy returns of many rows, they are one statement."""


def session_id_of(task_id: str, sample_index: int) -> str:
    return f"{task_id}.{sample_index}"


def accept(
    unit: Unit,
    requests: Sequence[TaskRequest],
    tenant: str = DEFAULT_TENANT,
    *,
    for_nodes: bool = True,
    bound: bool = False,
) -> list[Submitted]:
    """Accept all of them or none. Submitting the same task again returns the same response.

    for_nodes: whether nodes are to run them; else it is not asked which node could. bound: whether the caller sees
    nothing of other tenants, so that his tasks fork no session of theirs, nor one to come.
    Raises: Conflict if an id is taken by another task, InvalidRequest if an id is too long, NotFound for such a
    fork, QuotaExceeded.
    """
    named = [(request.task_id or new_id("task"), request) for request in requests]
    known = _digests(unit, [task_id for task_id, _ in named], tenant)
    if bound:
        _refuse_foreign_forks(unit, requests, tenant)
    fresh: list[tuple[str, TaskRequest, str]] = []
    answers: list[Submitted] = []
    for task_id, request in named:
        digest = task_digest(request)
        created = _is_new(task_id, digest, known)
        if created:
            known[task_id] = digest
            fresh.append((task_id, request, digest))
        session_ids = tuple(session_id_of(task_id, index) for index in range(request.num_samples))
        answers.append(Submitted(task_id=task_id, session_ids=session_ids, created=created))
    numbers = intern(unit, {needs_of(request) for _, request in named})
    if fresh:
        admit(unit, tenant, sum(request.num_samples for _, request, _ in fresh))
        _insert(unit, fresh, numbers, tenant, bound)
    waiting = unserved(unit.conn, unit.now, numbers if for_nodes else ())
    placed = [
        msgspec.structs.replace(answer, unplaced=waiting.get(needs_of(request)))
        for answer, (_, request) in zip(answers, named, strict=True)
    ]
    for answer in placed:
        if answer.created and answer.unplaced is not None:
            unit.emit("task.unplaced", answer.task_id, why=answer.unplaced)
    return placed


def _is_new(task_id: str, digest: str, known: dict[str, str]) -> bool:
    """Raises: Conflict, InvalidRequest."""
    if len(task_id) > MAX_TASK_ID:
        raise InvalidRequest(f"task_id must have at most {MAX_TASK_ID} characters, it has {len(task_id)}.")
    if known.get(task_id, digest) != digest:
        raise Conflict(
            f"task_id {task_id!r} is taken by a task with other content; choose another id, "
            "or submit exactly the same task.",
            task_id=task_id,
        )
    return task_id not in known


def _refuse_foreign_forks(unit: Unit, requests: Sequence[TaskRequest], tenant: str) -> None:
    """Raises: NotFound."""
    for session_id in {request.fork.session_id for request in requests if request.fork is not None}:
        if unit.conn.scalar(_TENANT_OF, {"id": session_id}) != tenant:
            raise NotFound(f"fork: no session {session_id!r}.")


def _digests(unit: Unit, task_ids: Sequence[str], tenant: str) -> dict[str, str]:
    """Digests of existing tasks; empty for another tenant's."""
    found: dict[str, str] = {}
    for start in range(0, len(task_ids), _MANY):
        some = tasks.c.task_id.in_(task_ids[start : start + _MANY])
        rows = unit.conn.execute(sa.select(tasks.c.task_id, tasks.c.digest, tasks.c.tenant).where(some))
        found.update({row.task_id: row.digest if row.tenant == tenant else "" for row in rows})
    return found


def _insert(
    unit: Unit, fresh: Sequence[tuple[str, TaskRequest, str]], numbers: Mapping[Needs, int], tenant: str, bound: bool
) -> None:
    counter = _Turns(unit, tenant)
    rows: list[dict[str, Any]] = []
    for task_id, request, _ in fresh:
        rows.extend(_session_rows(unit, task_id, request, counter, numbers[needs_of(request)]))
        told: dict[str, Any] = {
            "num_samples": request.num_samples,
            "harness": request.agent.harness,
            "run": run_of(task_id),
        }
        unit.emit("task.submitted", task_id, **told)
    unit.conn.execute(_ADD_TASKS, [{**_task_row(unit, *task), "tenant": tenant, "bound": bound} for task in fresh])
    unit.conn.execute(_ADD_SESSIONS, rows)


def _task_row(unit: Unit, task_id: str, request: TaskRequest, digest: str) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "digest": digest,
        "body": request.model_copy(update={"task_id": task_id}).model_dump_json(),
        "status": "queued",
        "num_samples": request.num_samples,
        "num_open": request.num_samples,
        "created_at": unit.now,
        "submitter": request.submitter or "",
        "priority": request.priority,
        "fork_of": None if request.fork is None else request.fork.session_id,
        "run": run_of(task_id),
        "harness": request.agent.harness,
    }


def _session_rows(unit: Unit, task_id: str, request: TaskRequest, counter: _Turns, needs: int) -> list[dict[str, Any]]:
    first = counter.take(request.priority, request.submitter or "", request.num_samples)
    return [
        {
            "session_id": session_id_of(task_id, index),
            "task_id": task_id,
            "sample_index": index,
            "state": "queued",
            "attempt": 1,
            "max_attempts": request.max_attempts,
            "fence": 0,
            "reported_fence": 0,
            "created_at": unit.now,
            "submitter": request.submitter or "",
            "tenant": counter.tenant,
            "priority": request.priority,
            "turn": first + index,
            "needs": needs,
        }
        for index in range(request.num_samples)
    ]


class _Turns:
    """The next turns of a tenant's submitters in one batch."""

    def __init__(self, unit: Unit, tenant: str) -> None:
        self.tenant = tenant
        self._conn = unit.conn
        self._last: dict[tuple[int, str], int] = {}

    def take(self, priority: int, submitter: str, count: int) -> int:
        """The first of `count` turns."""
        key = (priority, submitter)
        if key not in self._last:
            self._last[key] = max(self._latest_leased(priority), self._latest_queued(priority, submitter))
        first = self._last[key] + 1
        self._last[key] += count
        return first

    def _latest_leased(self, priority: int) -> int:
        found = self._conn.scalar(
            sa.select(turns.c.turn).where(turns.c.tenant == self.tenant, turns.c.priority == priority)
        )
        if found is None:
            self._conn.execute(sa.insert(turns).values(tenant=self.tenant, priority=priority, turn=0))
        return found or 0

    def _latest_queued(self, priority: int, submitter: str) -> int:
        whose = sessions.c.tenant == self.tenant
        mine = sa.and_(QUEUED, whose, sessions.c.submitter == submitter, sessions.c.priority == priority)
        return self._conn.scalar(sa.select(sa.func.max(sessions.c.turn)).where(mine)) or 0


_BEHIND = sa.and_(
    turns.c.tenant == sa.bindparam("whose"),
    turns.c.priority == sa.bindparam("of"),
    turns.c.turn < sa.bindparam("to"),
)
_MOVE_ON = sa.update(turns).where(_BEHIND).values(turn=sa.bindparam("to"))


def remember_turns(unit: Unit, leased: Sequence[sa.RowMapping]) -> None:
    """Advance to the turns of the leased sessions."""
    latest: dict[tuple[str, int], int] = {}
    for row in leased:
        key = (row["tenant"], row["priority"])
        latest[key] = max(row["turn"], latest.get(key, 0))
    if latest:
        moves = [{"whose": tenant, "of": of, "to": turn} for (tenant, of), turn in sorted(latest.items())]
        unit.conn.execute(_MOVE_ON, moves)
