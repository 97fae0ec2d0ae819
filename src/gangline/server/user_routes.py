"""The routes of those who want tasks solved: submit, wait, fetch, cancel, look around."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import msgspec
from aiohttp import web
from pydantic import TypeAdapter

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import validated_id
from gangline.domain.lifecycle import Outcome, SessionState, TaskState
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_msgpack
from gangline.domain.views import (
    ResultReference,
    ServiceStatus,
    SessionPage,
    SessionView,
    Submitted,
    TaskPage,
    TaskView,
)
from gangline.listening import read_body
from gangline.server.routing import (
    MAX_WAIT_S,
    MSGPACK,
    SUBJECT,
    Query,
    Route,
    answer_json,
    number,
    path_id,
    wants_msgpack,
)
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
        SUBJECT.set(submitted.task_id)
        return answer_json(submitted)

    async def submit_batch(self, request: web.Request) -> web.Response:
        body = await read_body(request, self._max_task_bytes)
        submitted = await self._service.submit(_BATCH.validate_json(body))
        SUBJECT.set(f"{len(submitted)} tasks: " + ", ".join(one.task_id for one in submitted[:8]))
        return answer_json(submitted)

    async def list_tasks(self, request: web.Request) -> web.Response:
        store = self._service.store
        wanted = {"status": _one_of(request, "status", TaskState), "submitter": _name(request, "submitter")}
        return answer_json(await store.query(partial(store.tasks, **_page(request), **wanted)))

    async def list_sessions(self, request: web.Request) -> web.Response:
        store = self._service.store
        wanted = {
            "state": _one_of(request, "state", SessionState),
            "outcome": _one_of(request, "outcome", Outcome),
            "node_id": _name(request, "node_id"),
            "submitter": _name(request, "submitter"),
        }
        return answer_json(await store.query(partial(store.sessions, **_page(request), **wanted)))

    async def task(self, request: web.Request) -> web.Response:
        wait_s = number(request, "wait_s", 0, low=0, high=MAX_WAIT_S)
        return answer_json(await self._service.task(path_id(request, "task_id"), wait_s))

    async def task_result(self, request: web.Request) -> web.Response:
        task, results = await self._service.task_results(path_id(request, "task_id"), partial=_flag(request, "partial"))
        if wants_msgpack(request):
            return _msgpack(results)
        outcomes = tuple(session.outcome for session in task.sessions)
        record = TaskResults(
            task_id=task.task_id, status=task.status, rewards=task.rewards, outcomes=outcomes, results=results
        )
        return answer_json(record)

    async def task_references(self, request: web.Request) -> web.Response:
        task_id = path_id(request, "task_id")
        return answer_json(await self._service.task_references(task_id, partial=_flag(request, "partial")))

    async def cancel_task(self, request: web.Request) -> web.Response:
        return answer_json(await self._service.cancel_task(path_id(request, "task_id")))

    async def session(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer_json(await store.query(store.session, path_id(request, "session_id")))

    async def session_result(self, request: web.Request) -> web.Response:
        result = await self._service.session_result(path_id(request, "session_id"), _attempt(request))
        return _msgpack(result) if wants_msgpack(request) else answer_json(result)

    async def session_reference(self, request: web.Request) -> web.Response:
        return answer_json(await self._service.session_reference(path_id(request, "session_id"), _attempt(request)))

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
            Route("GET", "/v1/tasks", self.list_tasks, "List tasks, newest first.", answer=TaskPage, query=_TASKS),
            Route("GET", "/v1/tasks/{task_id}", self.task, "A task and its group; can wait until it has ended.",
                  answer=TaskView, query=_WAIT, errors=(400, 401, 404)),
            Route("GET", "/v1/tasks/{task_id}/result", self.task_result, "The results of a task's sessions.",
                  answer=TaskResults, answer_types=_RESULT_TYPES, query=_PARTIAL, errors=(400, 401, 404, 409)),
            Route("GET", "/v1/tasks/{task_id}/references", self.task_references,
                  "Where the results of a task's sessions lie, for who reads them there.",
                  answer=list[ResultReference], query=_PARTIAL, errors=(400, 401, 404, 409)),
            Route("DELETE", "/v1/tasks/{task_id}", self.cancel_task, "Cancel what has not ended of a task.",
                  answer=TaskView, errors=(400, 401, 404)),
            Route("GET", "/v1/sessions", self.list_sessions, "List sessions, newest first.", answer=SessionPage,
                  query=_SESSIONS),
            Route("GET", "/v1/sessions/{session_id}", self.session, "A session.", answer=SessionView,
                  errors=(400, 401, 404)),
            Route("GET", "/v1/sessions/{session_id}/result", self.session_result, "The result of a session.",
                  answer=SessionResult, answer_types=_RESULT_TYPES, query=_ATTEMPT, errors=(400, 401, 404, 409)),
            Route("GET", "/v1/sessions/{session_id}/reference", self.session_reference,
                  "Where the result of a session lies.", answer=ResultReference, query=_ATTEMPT,
                  errors=(400, 401, 404, 409)),
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
    Query("submitter", {"type": "string"}, "Only of this submitter; empty is of requests that name none."),
)
_TASKS = (*_PAGE, Query("status", {"type": "string", "enum": list(get_args(TaskState))}, "Only these."))
_SESSIONS = (
    *_PAGE,
    Query("state", {"type": "string", "enum": list(get_args(SessionState))}, "Only these."),
    Query("outcome", {"type": "string", "enum": list(get_args(Outcome))}, "Only those that ended so."),
    Query("node_id", {"type": "string"}, "Only those that this node holds, or held last."),
)


def _page(request: web.Request) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    limit = int(number(request, "limit", 50, low=1, high=1000))
    return {"limit": limit, "before": int(number(request, "before", _MAX_POSITION, low=0, high=_MAX_POSITION))}


def _one_of(request: web.Request, name: str, kind: Any) -> Any:
    """Raises: InvalidRequest."""
    value = request.query.get(name)
    if value is not None and value not in get_args(kind):
        raise InvalidRequest(f"{name} must be one of {', '.join(get_args(kind))}, got {value[:40]!r}.")
    return value


def _name(request: web.Request, name: str) -> str | None:
    """An id, or nothing at all; None is any. Raises: InvalidRequest."""
    value = request.query.get(name)
    return validated_id(value, name) if value else value


def _flag(request: web.Request, name: str) -> bool:
    return request.query.get(name, "0") not in ("0", "", "false")


def _attempt(request: web.Request) -> int | None:
    """Raises: InvalidRequest."""
    return int(number(request, "attempt", 0, low=0, high=2**31 - 1)) or None


def _msgpack(record: Any) -> web.Response:
    return web.Response(body=encode_msgpack(record), content_type=MSGPACK)
