"""Polar's routes for those who want tasks solved, over the same core as ours: submit, poll, look around.

Source: Polar, A.5. A task submitted here is a task like any other, and can be seen on every other route.
"""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import msgspec
from aiohttp import web

from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_json
from gangline.domain.views import TaskView
from gangline.http.audit import SUBJECT
from gangline.http.negotiation import JSON, answer_json, path_id, read_record
from gangline.http.query import Choice
from gangline.http.routes import Route, json_route
from gangline.server.compat.polar.tasks import task_from_polar
from gangline.server.compat.records import LogprobForm, polar_result, polar_task_status
from gangline.server.service.core import RolloutService

__all__ = ["PolarRoutes", "PolarStatus", "PolarSubmitted", "PolarTask", "polar_task"]

_NEWEST_TASKS = 1000


class PolarSubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a submit."""

    task_id: str
    status: str
    session_ids: tuple[str, ...]


class PolarTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task while it runs, with the results that there are, and when it has ended."""

    task_id: str
    status: str
    """`running`, `completed` or `cancelled`."""
    total_sessions: int
    completed_sessions: int
    results: list[dict[str, Any]]
    """Polar's session results; traces as in its A.4."""
    result_paths: list[str] = []
    metadata: dict[str, Any] = {}
    """As submitted: a trainer finds its group, rollout step and policy version there (A.3)."""


class PolarStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks, nodes and pending sessions."""

    tasks: dict[str, str]
    """task id -> status, of the newest thousand."""
    task_states: dict[str, int]
    """task state -> how many of all."""
    pending_sessions: int
    """Sessions that no node has yet."""
    running_sessions: int
    nodes: dict[str, dict[str, Any]]
    """node id -> its address, its last report, the age of that report."""


class PolarRoutes:
    def __init__(self, service: RolloutService, *, max_task_bytes: int) -> None:
        self._service = service
        self._max_task_bytes = max_task_bytes

    async def submit_polar_task(self, request: web.Request) -> web.Response:
        task = task_from_polar(await read_record(request, object, max_bytes=self._max_task_bytes))
        submitted = (await self._service.submit([task]))[0]
        SUBJECT.set(submitted.task_id)
        view = await self._service.task(submitted.task_id)
        return answer_json(
            PolarSubmitted(task_id=submitted.task_id, status=polar_task_status(view), session_ids=submitted.session_ids)
        )

    async def polar_task(self, request: web.Request) -> web.Response:
        form: LogprobForm = _LOGPROBS.read(request) or "objects"
        body = await polar_task(self._service, path_id(request, "task_id"), form)
        return web.Response(body=body, content_type=JSON)

    async def polar_status(self, _request: web.Request) -> web.Response:
        store = self._service.store
        status = await store.query(store.status)
        page = await store.query(lambda: store.tasks(limit=_NEWEST_TASKS))
        states = {"queued": "running", "running": "running", "ended": "completed", "cancelled": "cancelled"}
        record = PolarStatus(
            tasks={task.task_id: states[task.status] for task in page.tasks},
            task_states=status.tasks,
            pending_sessions=status.sessions.get("queued", 0),
            running_sessions=status.sessions.get("leased", 0),
            nodes={node.node_id: msgspec.to_builtins(node) for node in status.nodes},
        )
        return answer_json(record)

    def routes(self) -> list[Route]:
        return [
            json_route("POST", "/rollout/task/submit", self.submit_polar_task, "Polar's submit; does not wait.",
                  body=TaskRequest, answer=PolarSubmitted, errors=(400, 401, 409, 413, 507)),
            json_route("GET", "/rollout/task/{task_id}", self.polar_task,
                  "Polar's poll: status, results so far, results.",
                  answer=PolarTask, query=(_LOGPROBS,), errors=(400, 401, 404)),
            json_route("GET", "/rollout/status", self.polar_status,
                  "Polar's view of tasks, nodes and pending sessions.",
                  answer=PolarStatus),
        ]  # fmt: skip


_LOGPROBS = Choice("logprobs", "Objects, as in A.4, or numbers.", get_args(LogprobForm))


async def polar_task(service: RolloutService, task_id: str, form: LogprobForm = "objects") -> bytes:
    """A `PolarTask` as JSON: the answer to a poll, and the body of a callback. Raises: NotFound, StoreError."""
    task, results = await service.task_results(task_id, partial=True)
    return await asyncio.to_thread(_record, task, results, form)  # it may be large


def _record(task: TaskView, results: list[SessionResult], form: LogprobForm) -> bytes:
    agent: dict[str, Any] = task.request.get("agent", {})
    record = PolarTask(
        task_id=task.task_id,
        status=polar_task_status(task),
        total_sessions=task.num_samples,
        completed_sessions=len(results),
        results=[polar_result(result, str(agent.get("harness")), form) for result in results],
        metadata=task.request.get("metadata", {}),
    )
    return encode_json(record)
