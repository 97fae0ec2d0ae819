"""Polar's routes for submitters: submit, poll, list and cancel tasks.

Source: Polar, A.5; its published source for cancelling a task. A task submitted here is an ordinary task and visible on
all other routes.

Task ids may be reused: Polar's trainer counts them from 0 in each of its runs. In Polar only the id of a running task
is taken. Here a task is stored under its id, so the next task of that name gets the id `NAME--again-2`, and responses
call it `NAME`.

Source: the `submit_task` of Polar's published rollout server.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, get_args
from urllib.parse import parse_qs, urlsplit

import msgspec
from aiohttp import web

from gangline.domain.errors import Conflict, NotFound
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_json
from gangline.domain.views import TaskView
from gangline.interop.polar.records import LogprobForm, polar_result, polar_task_status, stopped_early
from gangline.interop.polar.tasks import task_from_polar
from gangline.interop.polar.views import PolarNode, polar_node
from gangline.server.service.core import RolloutService
from gangline.wire.http.negotiation import JSON, answer_json, path_id, read_record
from gangline.wire.http.query import Choice, Flag
from gangline.wire.http.routes import SUBJECT, Route, json_route

_NEWEST_TASKS = 1000
_REMEMBERED_S = 300.0
"""Seconds for which a cancellation is remembered before its task is submitted."""

_AGAIN = re.compile(r"--again-\d+\Z")


def polar_name(task_id: str) -> str:
    return _AGAIN.sub("", task_id)


async def newest_id(service: RolloutService, name: str) -> str:
    """Id of the newest task of that name; the name itself if there is none. Raises: StoreError."""
    return _numbered(name, max(await _num_tasks(service, name), 1))


async def id_to_submit(service: RolloutService, name: str) -> str:
    """Id of the unfinished task of that name, or a new id. Raises: StoreError."""
    number = await _num_tasks(service, name)
    if number and not await service.store.query(service.store.task_ended, _numbered(name, number)):
        return _numbered(name, number)
    return _numbered(name, number + 1)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}--again-{number}"


async def _num_tasks(service: RolloutService, name: str) -> int:
    number = 0
    while await _exists(service, _numbered(name, number + 1)):
        number += 1
    return number


async def _exists(service: RolloutService, task_id: str) -> bool:
    try:
        await service.store.query(service.store.task_ended, task_id)
    except NotFound:
        return False
    return True


class PolarSubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a submit."""

    task_id: str
    status: str
    session_ids: tuple[str, ...]


class PolarTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task with the results that are available, while it runs and after it has ended."""

    task_id: str
    status: str
    """`running`, `completed` or `cancelled`."""
    total_sessions: int
    completed_sessions: int
    results: list[dict[str, Any]]
    """Session results in Polar's form; traces as in its A.4."""
    result_paths: list[str] = []
    metadata: dict[str, Any] = {}
    """As submitted: a trainer finds its group, rollout step and policy version there (A.3)."""


class PolarPipeline(msgspec.Struct, frozen=True, kw_only=True):
    pending_sessions: int
    """Sessions that have not ended."""


class PolarNodes(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[PolarNode, ...]


class PolarStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks, nodes and pending sessions."""

    tasks: dict[str, str]
    """task id -> status, for the newest thousand."""
    task_states: dict[str, int]
    """task state -> number of all tasks in it."""
    pending_sessions: int
    """Sessions that are not assigned to a node yet."""
    running_sessions: int
    pipeline: PolarPipeline
    nodes: PolarNodes


class PolarRoutes:
    def __init__(
        self, service: RolloutService, *, max_task_bytes: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._max_task_bytes = max_task_bytes
        self._monotonic = monotonic
        self._cancelled: dict[str, float] = {}
        """Task cancelled before its submit arrived -> expiry time."""

    async def submit_polar_task(self, request: web.Request) -> web.Response:
        task = task_from_polar(await read_record(request, object, max_bytes=self._max_task_bytes))
        if task.task_id is not None:
            self._refuse_cancelled(task.task_id)
            task = task.model_copy(update={"task_id": await id_to_submit(self._service, task.task_id)})
        submitted = (await self._service.submit([task]))[0]
        SUBJECT.set(submitted.task_id)
        view = await self._service.task(submitted.task_id)
        name, status = polar_name(submitted.task_id), polar_task_status(view)
        return answer_json(PolarSubmitted(task_id=name, status=status, session_ids=submitted.session_ids))

    async def polar_task(self, request: web.Request) -> web.Response:
        form: LogprobForm = _LOGPROBS.read(request) or "floats"
        task_id = await newest_id(self._service, path_id(request, "task_id"))
        body = await polar_task(self._service, task_id, form)
        return web.Response(body=body, content_type=JSON)

    async def cancel_polar_task(self, request: web.Request) -> web.Response:
        name = path_id(request, "task_id")
        form: LogprobForm = _LOGPROBS.read(request) or "floats"
        task_id = await newest_id(self._service, name)
        try:
            await self._service.cancel_task(task_id)
        except NotFound:
            if not _REGISTER.read(request):
                raise
            self._forget_cancelled()
            self._cancelled[name] = self._monotonic() + _REMEMBERED_S
            unknown = PolarTask(task_id=name, status="cancelled", total_sessions=0, completed_sessions=0, results=[])
            return answer_json(unknown)
        return web.Response(body=await polar_task(self._service, task_id, form), content_type=JSON)

    def _refuse_cancelled(self, task_id: str) -> None:
        """Raises: Conflict."""
        self._forget_cancelled()
        if task_id in self._cancelled:
            raise Conflict(f"task {task_id!r} was cancelled before it was submitted.")

    def _forget_cancelled(self) -> None:
        now = self._monotonic()
        self._cancelled = {name: until for name, until in self._cancelled.items() if until > now}

    async def polar_status(self, _request: web.Request) -> web.Response:
        store = self._service.store
        status = await store.query(store.status)
        page = await store.query(lambda: store.tasks(limit=_NEWEST_TASKS))
        states = {"queued": "running", "running": "running", "ended": "completed", "cancelled": "cancelled"}
        record = PolarStatus(
            tasks={polar_name(task.task_id): states[task.status] for task in reversed(page.tasks)},
            task_states=status.tasks,
            pending_sessions=status.sessions.get("queued", 0),
            running_sessions=status.sessions.get("leased", 0),
            pipeline=PolarPipeline(
                pending_sessions=status.sessions.get("queued", 0) + status.sessions.get("leased", 0)
            ),
            nodes=PolarNodes(nodes=tuple(map(polar_node, status.nodes))),
        )
        return answer_json(record)

    def routes(self) -> list[Route]:
        return [
            json_route("POST", "/rollout/task/submit", self.submit_polar_task, "Polar's submit; does not wait.",
                  body=TaskRequest, answer=PolarSubmitted, errors=(400, 401, 409, 413, 507)),
            json_route("GET", "/rollout/task/{task_id}", self.polar_task,
                  "Polar's poll: status, results so far, results.",
                  answer=PolarTask, query=(_LOGPROBS,), errors=(400, 401, 404)),
            json_route("DELETE", "/rollout/task/{task_id}", self.cancel_polar_task,
                  "Cancel a task, and all its sessions.",
                  answer=PolarTask, query=(_LOGPROBS, _REGISTER), errors=(400, 401, 404)),
            json_route("GET", "/rollout/status", self.polar_status,
                  "Polar's view of tasks, nodes and pending sessions.",
                  answer=PolarStatus),
        ]  # fmt: skip


_LOGPROBS = Choice("logprobs", "Objects, as in A.4, or numbers, which are usual.", get_args(LogprobForm))
_REGISTER = Flag("register_if_missing", "Whether a task that is not known is refused when it is submitted later.")


async def polar_callback(service: RolloutService, task_id: str, url: str) -> bytes:
    """The body of a callback to `url`, which may ask for `logprobs=objects` like a poll. Raises: as `polar_task`."""
    wanted = parse_qs(urlsplit(url).query).get("logprobs")
    return await polar_task(service, task_id, "objects" if wanted == ["objects"] else "floats")


async def polar_task(service: RolloutService, task_id: str, form: LogprobForm = "floats") -> bytes:
    """A `PolarTask` as JSON: the answer to a poll. Raises: NotFound, StoreError."""
    task, results = await service.task_results(task_id, partial=True)
    return await asyncio.to_thread(_record, task, results, form)  # it may be large


def _record(task: TaskView, results: list[SessionResult], form: LogprobForm) -> bytes:
    early = stopped_early(task, results)
    record = PolarTask(
        task_id=polar_name(task.task_id),
        status=polar_task_status(task),
        total_sessions=task.num_samples,
        completed_sessions=len(results),
        results=[
            polar_result(result, task.request, form, early) | {"task_id": polar_name(task.task_id)}
            for result in results
        ],
        metadata=task.request.get("metadata", {}),
    )
    return encode_json(record)
