"""The routes for users: submit, wait, fetch, cancel, list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import msgspec
from aiohttp import web
from pydantic import TypeAdapter

from gangline.domain.lifecycle import Outcome, SessionState, TaskState
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import (
    ResultReference,
    ServiceStatus,
    SessionPage,
    SessionView,
    Submitted,
    TaskPage,
    TaskView,
)
from gangline.server.access import TENANT, tenant_of
from gangline.server.service.core import RolloutService
from gangline.wire.http.listening import read_body
from gangline.wire.http.negotiation import answer, path_id, prefers_msgpack, read_record
from gangline.wire.http.query import Choice, Flag, Number, Text, Whole, given
from gangline.wire.http.routes import PRINCIPAL, SUBJECT, Route

_BATCH: TypeAdapter[list[TaskRequest]] = TypeAdapter(list[TaskRequest])
_MAX_POSITION = 2**53


class TaskResults(msgspec.Struct, frozen=True, kw_only=True):
    """A task's results as JSON; as MessagePack the response is the bare list."""

    task_id: str
    status: TaskState
    rewards: tuple[float | None, ...]
    """[num_samples], by sample index."""
    outcomes: tuple[str | None, ...]
    """[num_samples]"""
    results: list[SessionResult]
    """Results of ended sessions, by sample index."""


class UserRoutes:
    def __init__(self, service: RolloutService, *, max_task_bytes: int) -> None:
        self._service = service
        self._max_task_bytes = max_task_bytes

    async def submit(self, request: web.Request) -> web.Response:
        task = await read_record(request, TaskRequest, max_bytes=self._max_task_bytes)
        submitted = (await self._submit([task]))[0]
        SUBJECT.set(submitted.task_id)
        return answer(request, submitted)

    async def submit_batch(self, request: web.Request) -> web.Response:
        body = await read_body(request, self._max_task_bytes)
        submitted = await self._submit(_BATCH.validate_json(body))
        SUBJECT.set(f"{len(submitted)} tasks: " + ", ".join(one.task_id for one in submitted[:8]))
        return answer(request, submitted)

    async def _submit(self, tasks: list[TaskRequest]) -> list[Submitted]:
        caller = PRINCIPAL.get()
        return await self._service.submit(tasks, caller.tenant, bound=caller.bound_to is not None)

    async def list_tasks(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer(request, await store.query(partial(store.tasks, **_wanted(request, _TASKS))))

    async def list_sessions(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer(request, await store.query(partial(store.sessions, **_wanted(request, _SESSIONS))))

    async def task(self, request: web.Request) -> web.Response:
        wait_s = _WAIT.read(request)
        return answer(request, await self._service.task(path_id(request, "task_id"), wait_s))

    async def task_result(self, request: web.Request) -> web.Response:
        task, results = await self._service.task_results(path_id(request, "task_id"), partial=_PARTIAL.read(request))
        if prefers_msgpack(request):
            return answer(request, results)
        outcomes = tuple(session.outcome for session in task.sessions)
        record = TaskResults(
            task_id=task.task_id, status=task.status, rewards=task.rewards, outcomes=outcomes, results=results
        )
        return answer(request, record)

    async def task_references(self, request: web.Request) -> web.Response:
        task_id = path_id(request, "task_id")
        return answer(request, await self._service.task_references(task_id, partial=_PARTIAL.read(request)))

    async def cancel_task(self, request: web.Request) -> web.Response:
        return answer(request, await self._service.cancel_task(path_id(request, "task_id")))

    async def session(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer(request, await store.query(store.session, path_id(request, "session_id")))

    async def session_result(self, request: web.Request) -> web.Response:
        result = await self._service.session_result(path_id(request, "session_id"), _ATTEMPT.read(request) or None)
        return answer(request, result)

    async def session_reference(self, request: web.Request) -> web.Response:
        return answer(
            request,
            await self._service.session_reference(path_id(request, "session_id"), _ATTEMPT.read(request) or None),
        )

    async def cancel_session(self, request: web.Request) -> web.Response:
        return answer(request, await self._service.cancel_session(path_id(request, "session_id")))

    async def status(self, request: web.Request) -> web.Response:
        return answer(request, await self._service.status(tenant_of(request)))

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/tasks", self.submit, "Submit a task; a repeated submission gets the first answer.",
                  body=TaskRequest, answer=Submitted, errors=(400, 401, 409, 413, 507)),
            Route("POST", "/v1/tasks:batch", self.submit_batch, "Submit tasks: all of them, or none.",
                  body=list[TaskRequest], answer=list[Submitted], errors=(400, 401, 409, 413, 507)),
            Route("GET", "/v1/tasks", self.list_tasks, "List tasks, newest first.", answer=TaskPage, query=_TASKS),
            Route("GET", "/v1/tasks/{task_id}", self.task, "A task and its group; can wait until it has ended.",
                  answer=TaskView, query=(_WAIT,), errors=(400, 401, 404)),
            Route("GET", "/v1/tasks/{task_id}/result", self.task_result, "The results of a task's sessions.",
                  answer=TaskResults, query=(_PARTIAL,), errors=(400, 401, 404, 409)),
            Route("GET", "/v1/tasks/{task_id}/references", self.task_references,
                  "References to the stored results of a task's sessions, for readers of that storage.",
                  answer=list[ResultReference], query=(_PARTIAL,), errors=(400, 401, 404, 409)),
            Route("DELETE", "/v1/tasks/{task_id}", self.cancel_task, "Cancel a task's unfinished sessions.",
                  answer=TaskView, errors=(400, 401, 404)),
            Route("GET", "/v1/sessions", self.list_sessions, "List sessions, newest first.", answer=SessionPage,
                  query=_SESSIONS, errors=(400, 401, 404)),
            Route("GET", "/v1/sessions/{session_id}", self.session, "A session.", answer=SessionView,
                  errors=(400, 401, 404)),
            Route("GET", "/v1/sessions/{session_id}/result", self.session_result, "The result of a session.",
                  answer=SessionResult, query=(_ATTEMPT,), errors=(400, 401, 404, 409)),
            Route("GET", "/v1/sessions/{session_id}/reference", self.session_reference,
                  "Reference to the stored result of a session.", answer=ResultReference, query=(_ATTEMPT,),
                  errors=(400, 401, 404, 409)),
            Route("DELETE", "/v1/sessions/{session_id}", self.cancel_session, "Cancel a session.", answer=SessionView,
                  errors=(400, 401, 404)),
            Route("GET", "/v1/status", self.status, "Tasks, sessions, stages, callbacks and nodes.",
                  answer=ServiceStatus, query=(TENANT,)),
        ]  # fmt: skip


_WAIT = Number("wait_s", "Seconds to wait for the task to end.")
_PARTIAL = Flag("partial", "1: also before the task has ended.")
_ATTEMPT = Whole("attempt", "Number of an attempt; left out, the one that counted.", low=1, high=2**31 - 1)
_LIMIT = Whole("limit", "Length of the page.", default=50, low=1, high=1000)
_BEFORE = Whole("before", "The `next` of the page above.", default=2**53, high=2**53)
_SUBMITTER = Text("submitter", "Only of this submitter; empty selects requests that name none.")
_RUN = Text("run", "Only tasks of this training run or evaluation; empty selects those of none.")
_STATUS = Choice("status", "Only tasks in this state.", get_args(TaskState))
_STATE = Choice("state", "Only sessions in this state.", get_args(SessionState))
_OUTCOME = Choice("outcome", "Only sessions with this outcome.", get_args(Outcome))
_TASK_ID = Text("task_id", "Only sessions of this task.")
_NODE_ID = Text("node_id", "Only sessions that this node holds, or held last.")
_TASKS = (_LIMIT, _BEFORE, _SUBMITTER, _RUN, _STATUS, TENANT)
_SESSIONS = (_LIMIT, _BEFORE, _SUBMITTER, _STATE, _OUTCOME, _TASK_ID, _NODE_ID, TENANT)


def _wanted(request: web.Request, queries: Sequence[Whole | Choice | Text]) -> dict[str, Any]:
    return given(request, queries) | {"tenant": tenant_of(request)}
