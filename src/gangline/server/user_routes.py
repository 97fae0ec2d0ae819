"""The routes of those who want tasks solved: submit, wait, fetch, cancel, look around."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec
from aiohttp import web
from pydantic import TypeAdapter

from gangline.domain.errors import InvalidRequest
from gangline.domain.lifecycle import TaskState
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_msgpack
from gangline.domain.views import ServiceStatus, SessionView, Submitted, TaskPage, TaskView
from gangline.server.problems import read_body
from gangline.server.routing import MAX_WAIT_S, MSGPACK, Query, Route, answer_json, number, path_id, wants_msgpack
from gangline.server.service import RolloutService

__all__ = ["TaskResults", "UserRoutes"]

_BATCH: TypeAdapter[list[TaskRequest]] = TypeAdapter(list[TaskRequest])
_RESULT_TYPES = ("application/json", MSGPACK)
_MAX_POSITION = 2**53


class TaskResults(msgspec.Struct, frozen=True, kw_only=True):
    """A task's results as JSON; as MessagePack the answer is the bare list."""

    task_id: str
    status: TaskState
    rewards: tuple[float | None, ...]
    """[num_samples], by sample index."""
    outcomes: tuple[str | None, ...]
    """[num_samples]"""
    results: list[SessionResult]
    """Of ended sessions, by sample index."""


class UserRoutes:
    def __init__(self, service: RolloutService, *, max_task_bytes: int) -> None:
        self._service = service
        self._max_task_bytes = max_task_bytes

    async def submit(self, request: web.Request) -> web.Response:
        body = await read_body(request, self._max_task_bytes)
        submitted = (await self._service.submit([TaskRequest.model_validate_json(body)]))[0]
        return answer_json(submitted)

    async def submit_batch(self, request: web.Request) -> web.Response:
        body = await read_body(request, self._max_task_bytes)
        return answer_json(await self._service.submit(_BATCH.validate_json(body)))

    async def list_tasks(self, request: web.Request) -> web.Response:
        status = request.query.get("status")
        if status is not None and status not in get_args(TaskState):
            raise InvalidRequest(f"status must be one of {', '.join(get_args(TaskState))}, got {status[:40]!r}.")
        store = self._service.store
        limit = int(number(request, "limit", 50, low=1, high=1000))
        before = int(number(request, "before", _MAX_POSITION, low=0, high=_MAX_POSITION))
        page = await store.query(
            lambda: store.tasks(limit=limit, before=before, status=cast("TaskState | None", status))
        )
        return answer_json(page)

    async def task(self, request: web.Request) -> web.Response:
        wait_s = number(request, "wait_s", 0, low=0, high=MAX_WAIT_S)
        return answer_json(await self._service.task(path_id(request, "task_id"), wait_s))

    async def task_result(self, request: web.Request) -> web.Response:
        partial = request.query.get("partial", "0") not in ("0", "", "false")
        task, results = await self._service.task_results(path_id(request, "task_id"), partial=partial)
        if wants_msgpack(request):
            return _msgpack(results)
        outcomes = tuple(session.outcome for session in task.sessions)
        record = TaskResults(
            task_id=task.task_id, status=task.status, rewards=task.rewards, outcomes=outcomes, results=results
        )
        return answer_json(record)

    async def cancel_task(self, request: web.Request) -> web.Response:
        return answer_json(await self._service.cancel_task(path_id(request, "task_id")))

    async def session(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer_json(await store.query(store.session, path_id(request, "session_id")))

    async def session_result(self, request: web.Request) -> web.Response:
        attempt = int(number(request, "attempt", 0, low=0, high=2**31)) or None
        result = await self._service.session_result(path_id(request, "session_id"), attempt)
        return _msgpack(result) if wants_msgpack(request) else answer_json(result)

    async def cancel_session(self, request: web.Request) -> web.Response:
        return answer_json(await self._service.cancel_session(path_id(request, "session_id")))

    async def status(self, _request: web.Request) -> web.Response:
        return answer_json(await self._service.store.query(self._service.store.status))

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/tasks", self.submit, "Submit a task; the same one again is answered as the first time.",
                  body=TaskRequest, answer=Submitted, errors=(400, 401, 409, 413, 507)),
            Route("POST", "/v1/tasks:batch", self.submit_batch, "Submit tasks: all of them, or none.",
                  body=list[TaskRequest], answer=list[Submitted], errors=(400, 401, 409, 413, 507)),
            Route("GET", "/v1/tasks", self.list_tasks, "List tasks, newest first.", answer=TaskPage, query=_PAGE),
            Route("GET", "/v1/tasks/{task_id}", self.task, "A task and its group; can wait until it has ended.",
                  answer=TaskView, query=_WAIT, errors=(400, 401, 404)),
            Route("GET", "/v1/tasks/{task_id}/result", self.task_result, "The results of a task's sessions.",
                  answer=TaskResults, answer_types=_RESULT_TYPES, query=_PARTIAL, errors=(400, 401, 404, 409)),
            Route("DELETE", "/v1/tasks/{task_id}", self.cancel_task, "Cancel what has not ended of a task.",
                  answer=TaskView, errors=(400, 401, 404)),
            Route("GET", "/v1/sessions/{session_id}", self.session, "A session.", answer=SessionView,
                  errors=(400, 401, 404)),
            Route("GET", "/v1/sessions/{session_id}/result", self.session_result, "The result of a session.",
                  answer=SessionResult, answer_types=_RESULT_TYPES, query=_ATTEMPT, errors=(400, 401, 404, 409)),
            Route("DELETE", "/v1/sessions/{session_id}", self.cancel_session, "Cancel a session.", answer=SessionView,
                  errors=(400, 401, 404)),
            Route("GET", "/v1/status", self.status, "Tasks, sessions, stages, callbacks and nodes.",
                  answer=ServiceStatus),
        ]  # fmt: skip


_WAIT = (Query("wait_s", {"type": "number", "minimum": 0}, "Wait so long for the task to end."),)
_PARTIAL = (Query("partial", {"type": "integer", "enum": [0, 1]}, "1: also before the task has ended."),)
_ATTEMPT = (Query("attempt", {"type": "integer", "minimum": 1}, "Of this attempt instead of the one that counted."),)
_PAGE = (
    Query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "How many; 50 by default."),
    Query("before", {"type": "integer"}, "The `next` of the page above."),
    Query("status", {"type": "string", "enum": list(get_args(TaskState))}, "Only these."),
)


def _msgpack(record: Any) -> web.Response:
    return web.Response(body=encode_msgpack(record), content_type=MSGPACK)
