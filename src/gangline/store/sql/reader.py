"""Reads tasks, sessions, nodes and events without writing, so it also works on another server's data folder."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import msgspec
import sqlalchemy as sa

from gangline import __version__
from gangline.domain.errors import NotFound
from gangline.domain.lifecycle import Outcome, SessionState, TaskState
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tenancy import TenantView, UsageBy, UsageRow
from gangline.domain.views import (
    AnnotationPage,
    Event,
    NodeView,
    ServiceStatus,
    SessionPage,
    SessionView,
    TaskPage,
    TaskSummary,
    TaskView,
    Verdict,
)
from gangline.store.results.files import Results
from gangline.store.sql import retention
from gangline.store.sql.annotating import read_annotations
from gangline.store.sql.database import Database
from gangline.store.sql.placing import image_waits, unplaced
from gangline.store.sql.rows import newest, queue
from gangline.store.sql.schema import IN_QUEUE, LEASED, QUEUED, WAITING, events, nodes, outbox, sessions, tasks
from gangline.store.sql.shares import held_back, summed_use, tenant_views

T = TypeVar("T")

_MANY = 500
"""Ids per statement."""

_LEASED_STAGE: sa.ColumnElement[str] = sa.literal_column("'leased'")
_SUMMARY_NAMES = [name for name in TaskSummary.__struct_fields__ if name in tasks.c]
_SUMMARY = [tasks.c[name] for name in _SUMMARY_NAMES]
_SESSION_NAMES = [name for name in SessionView.__struct_fields__ if name in sessions.c]
_NODE_NAMES = ("node_id", "url", "capacity", "draining", "first_seen_at", "last_seen_at", "key")
_EVENT = [events.c[name] for name in Event.__struct_fields__]
_SESSION = [*(sessions.c[name] for name in _SESSION_NAMES), sessions.c.needs, sessions.c.tenant]


class TaskReader:
    """The read side. Methods block and run in one snapshot; on an event loop: `await store.query(store.task, id)`.

    target: see `Database`. Long because it has a short method for each question.
    """

    def __init__(self, target: str | Path, *, clock: Callable[[], float] = time.time, read_only: bool = True) -> None:
        self.database = Database(target, read_only=read_only)
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.database.close()

    async def query(self, job: Callable[..., T], *args: Any) -> T:
        """Run a read on a separate thread."""
        return await self.database.query(job, *args)

    def task(self, task_id: str) -> TaskView:
        """Raises: NotFound."""
        with self.database.reading() as conn:
            return task_view(conn, task_id, self._clock())

    def task_summary(self, task_id: str) -> TaskSummary:
        """Raises: NotFound."""
        with self.database.reading() as conn:
            row = conn.execute(sa.select(*_SUMMARY).where(tasks.c.task_id == task_id)).mappings().one_or_none()
        if row is None:
            raise _no_task(task_id)
        return TaskSummary(**_summary_fields(row, []))

    def task_ended(self, task_id: str) -> bool:
        """A cheap check for waiting callers. Raises: NotFound."""
        with self.database.reading(once=True) as conn:
            found = conn.execute(sa.select(tasks.c.ended_at).where(tasks.c.task_id == task_id)).one_or_none()
        if found is None:
            raise _no_task(task_id)
        return found.ended_at is not None

    def tasks(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        status: TaskState | None = None,
        submitter: str | None = None,
        run: str | None = None,
        tenant: str | None = None,
    ) -> TaskPage:
        """Newest first. before: the `next` of the previous page."""
        query = newest(_SUMMARY, limit, before, status=status, submitter=submitter, run=run, tenant=tenant)
        with self.database.reading() as conn:
            rows = conn.execute(query).mappings().all()
            ended = _ended_by_outcome(conn, [row["task_id"] for row in rows[:limit]])
        page = tuple(TaskSummary(**_summary_fields(row, ended[row["task_id"]])) for row in rows[:limit])
        return TaskPage(tasks=page, next=page[-1].position if len(rows) > limit else None)

    def request(self, task_id: str) -> TaskRequest:
        """The task as it was submitted. Raises: NotFound."""
        with self.database.reading() as conn:
            body = conn.scalar(sa.select(tasks.c.body).where(tasks.c.task_id == task_id))
        if body is None:
            raise _no_task(task_id)
        return TaskRequest.model_validate_json(body)

    def sessions(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        state: SessionState | None = None,
        outcome: Outcome | None = None,
        task_id: str | None = None,
        node_id: str | None = None,
        submitter: str | None = None,
        tenant: str | None = None,
    ) -> SessionPage:
        """Newest first. before: the `next` of the previous page. node_id: the node that holds it, or held it last.

        Raises: NotFound if there is no such task.
        """
        owner = None if task_id is None else self.tenant_of_task(task_id)
        if task_id is not None and (owner is None or tenant not in (None, owner)):
            raise _no_task(task_id)
        wanted = {"state": state, "outcome": outcome, "task_id": task_id, "node_id": node_id, "submitter": submitter}
        query = newest(_SESSION, limit, before, tenant=tenant, **wanted)
        with self.database.reading() as conn:
            found = _session_views(conn, query, self._clock())
        page = tuple(found[:limit])
        return SessionPage(sessions=page, next=page[-1].position if len(found) > limit else None)

    def session(self, session_id: str) -> SessionView:
        """Raises: NotFound."""
        with self.database.reading() as conn:
            query = sa.select(*_SESSION).where(sessions.c.session_id == session_id)
            found = _session_views(conn, query, self._clock())
        if not found:
            raise NotFound(f"no session {session_id!r}.")
        return found[0]

    def annotations(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        session_id: str | None = None,
        dataset: str | None = None,
        verdict: Verdict | None = None,
        tenant: str | None = None,
    ) -> AnnotationPage:
        """Newest first. before: the `next` of the previous page."""
        wanted = {"session_id": session_id, "dataset": dataset, "verdict": verdict}
        with self.database.reading() as conn:
            return read_annotations(conn, tenant, limit=limit, before=before, **wanted)

    def status(self, tenant: str | None = None) -> ServiceStatus:
        """tenant: only of its tasks, and without nodes and callbacks; None: of all, and of the whole service."""
        now = self._clock()
        mine = [] if tenant is None else [sessions.c.tenant == tenant]
        my_tasks = [] if tenant is None else [tasks.c.tenant == tenant]
        with self.database.reading() as conn:
            oldest = conn.scalar(queue(sessions.c.created_at).where(*mine).limit(1))
            stages, since = _stages(conn, mine)
            queued = _counts(conn, sessions.c.submitter, QUEUED, *mine)
            states = {"leased": sum(stages.values()), "queued": sum(queued.values())}  # no index covers all states
            unplaced = _num_unplaced(conn, now, mine)
            nodes_now = _node_views(conn, now) if tenant is None else ()
            draining = sum(node.num_sessions for node in nodes_now if node.draining)
            states["ended"] = _count(conn, sessions, *mine) - sum(states.values())
            return ServiceStatus(
                version=__version__,
                at=now,
                tasks=_counts(conn, tasks.c.status, *my_tasks),
                sessions={state: count for state, count in states.items() if count},
                stages=stages,
                stage_ages_s={stage: max(0.0, now - at) for stage, at in since.items()},
                oldest_queued_s=None if oldest is None else max(0.0, now - oldest),
                oldest_queued=_oldest_queued(conn, now, mine),
                callbacks=_counts(conn, outbox.c.state) if tenant is None else {},
                nodes=nodes_now,
                queued=queued,
                unplaced=unplaced,
                demand=states["leased"] - draining + states["queued"] - max(0, sum(unplaced.values()) - 1),
                num_waiting=_count(conn, sessions, WAITING, *mine),
                result_bytes=int(conn.scalar(sa.select(sa.func.sum(tasks.c.result_bytes)).where(*my_tasks)) or 0),
                tenant=tenant or "",
            )

    def tenant_of_task(self, task_id: str) -> str | None:
        """None if there is no such task."""
        with self.database.reading(once=True) as conn:
            return conn.scalar(sa.select(tasks.c.tenant).where(tasks.c.task_id == task_id))

    def tenant_of_session(self, session_id: str) -> str | None:
        """None if there is no such session."""
        with self.database.reading(once=True) as conn:
            return conn.scalar(sa.select(sessions.c.tenant).where(sessions.c.session_id == session_id))

    def tasks_of(self, tenant: str, task_ids: Collection[str]) -> set[str]:
        """Those of the given tasks that are the tenant's."""
        found = sa.select(tasks.c.task_id).where(tasks.c.task_id.in_(task_ids), tasks.c.tenant == tenant)
        with self.database.reading(once=True) as conn:
            return set(conn.scalars(found))

    def tenants(self, name: str | None = None) -> list[TenantView]:
        """name: only this one."""
        with self.database.reading() as conn:
            return tenant_views(conn, self._clock(), name)

    def usage(self, by: UsageBy, since: float, until: float, tenant: str | None = None) -> list[UsageRow]:
        with self.database.reading() as conn:
            return summed_use(conn, by, since, until, tenant)

    def is_forked(self, session_id: str) -> bool:
        """Whether an open task of the same tenant forks the session."""
        forks = sa.select(tasks.c.task_id).where(tasks.c.fork_of == session_id, tasks.c.num_open > 0)
        forks = forks.join(sessions, sessions.c.session_id == session_id).where(sessions.c.tenant == tasks.c.tenant)
        with self.database.reading(once=True) as conn:
            return conn.scalar(forks.limit(1)) is not None

    def token_of_holder(self, name: str, is_node: bool = False) -> str | None:
        """Id of the token of the node that holds this session, or of this node; empty: the control token."""
        held = sa.select(nodes.c.key).where(nodes.c.node_id == name)
        if not is_node:
            held = sa.select(nodes.c.key).join(sessions, sessions.c.node_id == nodes.c.node_id)
            held = held.where(LEASED, sessions.c.session_id == name)
        with self.database.reading(once=True) as conn:
            key = conn.scalar(held)
        return None if key is None else key.partition(".")[0]

    def backends(self) -> list[dict[str, Any]]:
        """Engines, as reported by all nodes."""
        with self.database.reading() as conn:
            return [one for row in conn.scalars(sa.select(nodes.c.backends)) for one in msgspec.json.decode(row)]

    def forks_of(self, session_ids: Sequence[str], limit: int) -> list[str]:
        """Ids of the tasks whose sessions are forks of one of these, oldest first."""
        forks = sa.select(tasks.c.task_id).where(tasks.c.fork_of.in_(session_ids)).order_by(tasks.c.position)
        with self.database.reading() as conn:
            return list(conn.scalars(forks.limit(limit)))

    def fences(self, node_id: str, session_ids: Sequence[str]) -> dict[str, int]:
        """Fences of the live leases that the node holds on these sessions."""
        held = sa.select(sessions.c.session_id, sessions.c.fence).where(LEASED, sessions.c.node_id == node_id)
        with self.database.reading() as conn:
            return dict(conn.execute(held.where(sessions.c.session_id.in_(session_ids))).all())

    def open_of(self, session_ids: Sequence[str]) -> set[str]:
        """The given sessions that have not ended."""
        found: set[str] = set()
        with self.database.reading() as conn:
            for start in range(0, len(session_ids), _MANY):
                named = sessions.c.session_id.in_(session_ids[start : start + _MANY])
                found |= set(conn.scalars(sa.select(sessions.c.session_id).where(named, sessions.c.state != "ended")))
        return found

    def queued_requests(self, known: Collection[str]) -> dict[str, str | None]:
        """Tasks with sessions that may be leased, from the queue's head: id -> request as JSON, or None for ids in
        `known`.
        """
        bodies = sa.select(tasks.c.task_id, tasks.c.body)
        head = sa.func.max(sessions.c.priority).desc(), sa.func.min(sessions.c.turn), sa.func.min(sessions.c.position)
        queued = sa.select(sessions.c.task_id).where(IN_QUEUE).group_by(sessions.c.task_id).order_by(*head)
        with self.database.reading() as conn:
            found: dict[str, str | None] = dict.fromkeys(conn.execute(queued).scalars())
            unknown = [task_id for task_id in found if task_id not in known]
            for start in range(0, len(unknown), _MANY):
                some = tasks.c.task_id.in_(unknown[start : start + _MANY])
                found |= {row.task_id: row.body for row in conn.execute(bodies.where(some))}
        return found

    def forgettable(self, keep: retention.Keep, limit: int) -> list[str]:
        """Tasks beyond the retention limits: the oldest, at most `limit`."""
        with self.database.reading() as conn:
            return retention.forgettable(conn, keep, now=self._clock(), limit=limit)

    def events(self, *, after: int = 0, limit: int = 500, task_id: str | None = None) -> list[Event]:
        """Events with `seq > after`, in order."""
        query = sa.select(*_EVENT).where(events.c.seq > after).order_by(events.c.seq).limit(limit)
        if task_id is not None:
            query = query.where(events.c.task_id == task_id)
        with self.database.reading(once=True) as conn:  # many rows each second where a page is open, so no mappings
            return [_event(*row) for row in conn.execute(query).all()]

    def last_event(self) -> int:
        """The highest `seq` so far; 0 if there are no events."""
        with self.database.reading(once=True) as conn:
            return conn.scalar(sa.select(sa.func.max(events.c.seq))) or 0


def task_view(conn: sa.Connection, task_id: str, now: float) -> TaskView:
    """Raises: NotFound."""
    row = conn.execute(sa.select(*_SUMMARY, tasks.c.body).where(tasks.c.task_id == task_id)).mappings().one_or_none()
    if row is None:
        raise _no_task(task_id)
    query = sa.select(*_SESSION).where(sessions.c.task_id == task_id).order_by(sessions.c.sample_index)
    group = tuple(_session_views(conn, query, now))
    return TaskView(
        **_summary_fields(row, _ended_by_outcome(conn, [task_id])[task_id]),
        states=dict(Counter(session.state for session in group)),
        rewards=tuple(session.reward for session in group),
        sessions=group,
        request=msgspec.json.decode(row["body"]),
    )


def _ended_by_outcome(conn: sa.Connection, task_ids: Sequence[str]) -> defaultdict[str, list[sa.RowMapping]]:
    """task id -> rows of outcome, num_ended, model, and the sums that `_summary_fields` takes."""
    query = (
        sa.select(
            sessions.c.task_id,
            sessions.c.outcome,
            sa.func.count().label("num_ended"),
            sa.func.count(sessions.c.reward).label("num_rewards"),
            sa.func.sum(sessions.c.reward).label("reward_sum"),
            sa.func.max(sessions.c.model).label("model"),
            sa.func.sum(sessions.c.num_sampled_tokens).label("num_sampled_tokens"),
            sa.func.count(sessions.c.leased_at).label("num_leased"),
            sa.func.sum(sessions.c.ended_at - sessions.c.leased_at).label("session_s"),
        )
        .where(sessions.c.task_id.in_(task_ids), sessions.c.outcome.is_not(None))
        .group_by(sessions.c.task_id, sessions.c.outcome)
        .order_by(sessions.c.outcome)
    )
    found = defaultdict[str, list[sa.RowMapping]](list)
    for row in conn.execute(query).mappings():
        found[row["task_id"]].append(row)
    return found


def _summary_fields(row: sa.RowMapping, ended: Sequence[sa.RowMapping]) -> dict[str, Any]:
    def total(name: str) -> float | None:
        known = [one[name] for one in ended if one[name] is not None]
        return sum(known) if known else None

    return {
        **{name: row[name] for name in _SUMMARY_NAMES},
        "outcomes": {one["outcome"]: one["num_ended"] for one in ended},
        "mean_reward": _mean(total("reward_sum"), total("num_rewards")),
        "model": max((one["model"] for one in ended if one["model"] is not None), default=None),
        "num_sampled_tokens": total("num_sampled_tokens"),
        "mean_session_s": _mean(total("session_s"), total("num_leased")),
    }


def _mean(total: float | None, num: float | None) -> float | None:
    return total / num if total is not None and num else None


def _session_views(conn: sa.Connection, query: sa.Select[Any], now: float) -> list[SessionView]:
    rows = conn.execute(query).mappings().all()
    is_queued = any(row["state"] == "queued" for row in rows)
    waiting: Mapping[int, str] = unplaced(conn, now) if is_queued else MappingProxyType({})
    starting = {(row["node_id"], row["needs"]) for row in rows if row["stage"] == "init" and row["needs"]}
    pulls: Mapping[tuple[str, int], str] = image_waits(conn, starting) if starting else MappingProxyType({})
    held: Mapping[str, str] = held_back(conn, now) if is_queued else MappingProxyType({})
    return [session_view(row, waiting, pulls, held.get(row["tenant"])) for row in rows]


def _oldest_queued(conn: sa.Connection, now: float, where: Sequence[Any]) -> SessionView | None:
    resting = sa.select(*_SESSION).where(WAITING, *where).order_by(sessions.c.ready_at)
    found = [
        one for query in (queue(*_SESSION).where(*where), resting) for one in _session_views(conn, query.limit(1), now)
    ]
    return min(found, key=lambda one: one.created_at, default=None)


def session_view(
    row: sa.RowMapping,
    waiting: Mapping[int, str] = MappingProxyType({}),
    pulls: Mapping[tuple[str, int], str] = MappingProxyType({}),
    held: str | None = None,
) -> SessionView:
    """waiting: see `unplaced`. pulls: see `image_waits`. held: see `held_back`."""
    fields: dict[str, Any] = {name: row[name] for name in _SESSION_NAMES}
    fields["unplaced"] = waiting.get(row["needs"], held) if row["state"] == "queued" else None
    fields["waits_for"] = pulls.get((row["node_id"], row["needs"])) if row["stage"] == "init" else None
    fields["failure"] = None if row["failure"] is None else msgspec.json.decode(row["failure"])
    return msgspec.convert(fields, SessionView)


def result_of(session: SessionView, results: Results) -> SessionResult:
    """The result of an ended session: the stored one, or the known facts if no node reported one.

    Raises: NotFound if its file is gone, DiskFull, StoreError.
    """
    if session.result_attempt is not None:
        return results.read(session.task_id, session.session_id, session.result_attempt)
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task_id,
        node_id=session.node_id or "",
        attempt=session.attempt,
        fence=session.fence,
        outcome=session.outcome or "infra_error",
        failure=session.failure,
    )


def _counts(conn: sa.Connection, key: Any, *where: Any) -> dict[str, int]:
    found = conn.execute(sa.select(key, sa.func.count()).where(*where).group_by(key))
    return {row[0]: row[1] for row in found}


def _stages(conn: sa.Connection, where: Sequence[Any]) -> tuple[dict[str, int], dict[str, float]]:
    """stage -> number of leased sessions; stage -> since when the oldest of them is in it."""
    stage = sa.func.coalesce(sessions.c.stage, _LEASED_STAGE)
    since = sa.func.min(sa.func.coalesce(sessions.c.stage_at, sessions.c.leased_at))
    found = conn.execute(sa.select(stage, sa.func.count(), since).where(LEASED, *where).group_by(stage)).all()
    return {name: count for name, count, _ in found}, {name: at for name, _, at in found}


def _num_unplaced(conn: sa.Connection, now: float, where: Sequence[Any]) -> dict[str, int]:
    waiting = unplaced(conn, now)
    if not waiting:
        return {}
    found = sa.select(sessions.c.needs, sa.func.count()).where(QUEUED, *where).group_by(sessions.c.needs)
    return {waiting[row[0]]: row[1] for row in conn.execute(found) if row[0] in waiting}


def _count(conn: sa.Connection, table: sa.Table, *where: Any) -> int:
    return conn.scalar(sa.select(sa.func.count()).select_from(table).where(*where)) or 0


def _node_views(conn: sa.Connection, now: float) -> tuple[NodeView, ...]:
    held = _counts(conn, sessions.c.node_id, LEASED)
    rows = conn.execute(sa.select(nodes).order_by(nodes.c.node_id)).mappings()
    return tuple(
        NodeView(
            **{name: row[name] for name in _NODE_NAMES},
            num_sessions=held.get(row["node_id"], 0),
            backends=msgspec.json.decode(row["backends"], type=tuple[dict[str, Any], ...]),
            metrics=msgspec.json.decode(row["metrics"], type=dict[str, float]),
            age_s=max(0.0, now - row["last_seen_at"]),
        )
        for row in rows
    )


def _event(seq: int, at: float, kind: str, task_id: str | None, session_id: str | None, data: str) -> Event:
    told = msgspec.json.decode(data)
    return Event(seq=seq, at=at, kind=kind, task_id=task_id, session_id=session_id, data=told)


def _no_task(task_id: str) -> NotFound:
    return NotFound(f"no task {task_id!r}; `GET /v1/tasks` lists them.")
