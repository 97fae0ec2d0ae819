"""Routes that Polar's dashboard reads from a rollout server: nodes, tasks, their sessions, and live events.

Source: Polar's `rollout/server.py`, `rollout/manager.py` (063c948), `platform/events.py`: its published dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from gangline.domain.errors import NotFound
from gangline.domain.task import AgentSpec
from gangline.domain.views import Event, NodeView, SessionView, TaskSummary
from gangline.interop.polar.records import polar_session_status
from gangline.interop.polar.routes import newest_id, polar_name
from gangline.interop.polar.views import PolarNode, polar_node
from gangline.server.routes.events import EventForm, EventRoutes
from gangline.server.service.core import RolloutService
from gangline.wire.http.negotiation import answer_json, path_id
from gangline.wire.http.query import Name, Number, Whole
from gangline.wire.http.routes import Route, json_route

_MOST = 1000
_STATUSES = {"queued": "running", "running": "running", "ended": "completed", "cancelled": "cancelled"}
_STAGES = {"init": "INITIALIZING", "ready": "READY", "run": "RUNNING", "postrun": "POST_RUN"}
_TASK_EVENTS = {"task.submitted": "task.created", "task.ended": "task.completed"}


class PolarTaskLine(msgspec.Struct, frozen=True, kw_only=True):
    """One row in a list of tasks."""

    task_id: str
    status: str
    """`running`, `completed` or `cancelled`."""
    harness: str | None = None
    model: str | None = None
    num_samples: int
    completed_sessions: int
    errored_sessions: int
    mean_reward: float | None
    created_at: float
    updated_at: float
    source: str = "live"


class PolarTaskList(msgspec.Struct, frozen=True, kw_only=True):
    tasks: list[PolarTaskLine]


class PolarSessionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a task."""

    session_id: str
    task_id: str
    status: str
    node_id: str | None
    reward: float | None
    error: str | None


class PolarSessionList(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    sessions: list[PolarSessionLine]


class DashboardRoutes:
    def __init__(self, service: RolloutService, events: EventRoutes) -> None:
        self._service = service
        self._events = events

    def routes(self) -> list[Route]:
        return [
            json_route("GET", "/nodes", self.nodes, "Polar's list of nodes.", answer=list[PolarNode]),
            json_route("GET", "/nodes/{node_id}", self.node, "One of them.", answer=PolarNode, errors=(400, 401, 404)),
            json_route("GET", "/tasks", self.tasks, "Polar's list of tasks, those that changed last first.",
                  answer=PolarTaskList, query=(_STATUS, _HARNESS, _SINCE, _LIMIT)),
            json_route("GET", "/tasks/{task_id}/sessions", self.sessions, "The sessions of one.",
                  answer=PolarSessionList, errors=(400, 401, 404)),
            json_route("GET", "/events", self.events, "Polar's events from now on, as server-sent events.",
                  answer_types=("text/event-stream",)),
        ]  # fmt: skip

    async def nodes(self, _request: web.Request) -> web.Response:
        return answer_json([polar_node(node) for node in await self._nodes()])

    async def node(self, request: web.Request) -> web.Response:
        node_id = path_id(request, "node_id")
        found = next((node for node in await self._nodes() if node.node_id == node_id), None)
        if found is None:
            raise NotFound(f"no node {node_id!r}.")
        return answer_json(polar_node(found))

    async def _nodes(self) -> tuple[NodeView, ...]:
        return (await self._service.store.query(self._service.store.status)).nodes

    async def tasks(self, request: web.Request) -> web.Response:
        store, wanted, harness = self._service.store, _STATUS.read(request), _HARNESS.read(request)
        since, limit = _SINCE.read(request), _LIMIT.read(request)

        def found() -> Iterator[PolarTaskLine]:
            tasks = sorted(store.tasks(limit=_MOST).tasks, key=_changed_at, reverse=True)
            for task in tasks:
                if wanted not in ("", _STATUSES[task.status]) or _changed_at(task) < since:
                    continue
                with suppress(NotFound):  # deleted meanwhile
                    agent = store.request(task.task_id).agent
                    if harness in ("", agent.harness):
                        yield _line(task, agent)

        lines = await store.query(lambda: list(islice(found(), limit)))
        return answer_json(PolarTaskList(tasks=lines))

    async def sessions(self, request: web.Request) -> web.Response:
        task_id = await newest_id(self._service, path_id(request, "task_id"))
        view = await self._service.task(task_id)
        name = polar_name(task_id)
        return answer_json(
            PolarSessionList(task_id=name, sessions=[_session(session, name) for session in view.sessions])
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        return await self._events.stream(request, _FORM)


_STATUS = Name("status", "Only tasks of this status.")
_HARNESS = Name("harness", "Only tasks of this harness.")
_SINCE = Number("since", "Only tasks that changed at this time or later. Unix time, UTC, seconds.", high=1e12)
_LIMIT = Whole("limit", "The most tasks to list.", default=200, low=1, high=_MOST)


def _changed_at(task: TaskSummary) -> float:
    return task.ended_at or task.started_at or task.created_at


def _line(task: TaskSummary, agent: AgentSpec) -> PolarTaskLine:
    return PolarTaskLine(
        task_id=polar_name(task.task_id),
        status=_STATUSES[task.status],
        harness=agent.harness,
        model=agent.model_name,
        num_samples=task.num_samples,
        completed_sessions=task.num_samples - task.num_open,
        errored_sessions=sum(
            number for outcome, number in task.outcomes.items() if polar_session_status(outcome) != "COMPLETED"
        ),
        mean_reward=task.mean_reward,
        created_at=task.created_at,
        updated_at=_changed_at(task),
    )


def _session(session: SessionView, task_name: str) -> PolarSessionLine:
    return PolarSessionLine(
        session_id=session.session_id,
        task_id=task_name,
        status=_STAGES.get(session.stage or "", "REGISTERED")
        if session.outcome is None
        else polar_session_status(session.outcome),
        node_id=session.node_id,
        reward=session.reward,
        error=None if session.failure is None else session.failure.message,
    )


def _polar_event(event: Event) -> bytes:
    """Empty for events that Polar does not have."""
    task_id = polar_name(event.task_id or "")
    if (kind := _TASK_EVENTS.get(event.kind)) is not None:
        status = _STATUSES[event.data.get("status", "queued")]
        known = {name: event.data[name] for name in ("harness", "num_samples") if name in event.data}
        return _sent(kind, event.at, known | {"task_id": task_id, "status": status})
    if event.session_id is None:
        return b""
    outcome, stage = event.data.get("outcome"), event.data.get("stage")
    status = _STAGES.get(stage or "", "REGISTERED") if outcome is None else polar_session_status(outcome)
    data = {"task_id": task_id, "session_id": event.session_id, "status": status}
    return _sent("session.state_changed", event.at, data)


def _sent(kind: str, at: float, data: dict[str, Any]) -> bytes:
    event = {"type": kind, "ts": datetime.fromtimestamp(at, UTC), "data": data}
    return b"data: %s\n\n" % msgspec.json.encode(event)


def _hello(_after: int) -> bytes:
    return _sent("hello", datetime.now(UTC).timestamp(), {})


def _ping() -> bytes:
    return _sent("ping", datetime.now(UTC).timestamp(), {})


_FORM = EventForm(_hello, _polar_event, _ping)
