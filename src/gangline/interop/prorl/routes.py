"""ProRL Agent's routes: a job is a task with one session, and its request waits for the result.

A job outlives its connection: sending it again with the same id and content resumes waiting. Engines are added to and
cleared from all nodes, including those that join later. `/stop` cancels jobs of `/process` in flight and refuses new
ones until `/start`; tasks from other routes continue.

Source: ProRL Agent, listing 3 and 3.3.4.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.errors import NotFound, ServerUnavailable
from gangline.domain.ids import new_id, validated_id
from gangline.domain.lifecycle import TaskState
from gangline.interop.prorl.jobs import JOB_PREFIX, job_result, task_id_of, task_of_instance
from gangline.interop.prorl.nodes import NodeEngines
from gangline.interop.prorl.templates import Templates
from gangline.server.service.core import RolloutService
from gangline.wire.http.negotiation import answer_json, read_record
from gangline.wire.http.query import MAX_WAIT_S
from gangline.wire.http.routes import SUBJECT, Route, json_route

_KEY = "prorl_jobs"
_PLACING_S = 10.0
"""Seconds to wait for a node that can run a job before its caller is informed that there is none."""
_PAGE = 1000
_OPEN_STATES: tuple[TaskState, ...] = ("queued", "running")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ProrlJob(_Record):
    """Body of `POST /process`."""

    instance: dict[str, Any]
    """A task, or data for the template, preset or handler named by its `data_source`."""
    sampling_params: dict[str, Any] = {}
    job_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """None: chosen by the server; such a job cannot be cancelled by id while it runs."""


class ProrlCancel(_Record):
    job_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


class ProrlEngine(_Record):
    address: str = Field(pattern=r"^https?://[^\s/]+", max_length=2000)
    """`http://host:port/v1`"""


class ProrlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    """A readable status."""
    nodes: tuple[str, ...] = ()
    """Nodes that made the change."""
    cancelled_jobs: int = 0


class ProrlStatus(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    """`running` or `stopped`"""
    pending_jobs: int
    """Connections waiting for a job."""
    queues: dict[str, int]
    """`queued`, then stage -> number of sessions in it, for the whole server."""


class ProrlRoutes:
    def __init__(
        self,
        service: RolloutService,
        engines: NodeEngines,
        templates: Templates,
        *,
        max_task_bytes: int,
    ) -> None:
        self._service = service
        self._engines = engines
        self._templates = templates
        self._max_task_bytes = max_task_bytes
        self._num_waiting = 0

    async def process_job(self, request: web.Request) -> web.Response:
        job = await read_record(request, ProrlJob, max_bytes=self._max_task_bytes)
        await self._refuse_when_stopped()
        job_id = job.job_id or new_id("x")
        task, ignored = await asyncio.to_thread(
            task_of_instance, job.instance, job.sampling_params, job_id, self._templates.task_of
        )
        SUBJECT.set(task.task_id)
        await self._service.submit([task])
        self._num_waiting += 1
        try:
            return await self._when_ended(job_id, ignored, is_named=job.job_id is not None)
        finally:
            self._num_waiting -= 1

    async def _when_ended(self, job_id: str, ignored: list[str], *, is_named: bool) -> web.Response:
        """is_named: the caller can send it again. Raises: ServerUnavailable, also if no node can run it."""
        task_id, wait_s = task_id_of(job_id), _PLACING_S
        while not (task := await self._service.task(task_id, wait_s)).ended:
            if self._service.stopping:
                raise ServerUnavailable(f"the server is stopping; job {job_id!r} continues: send it again with its id.")
            if (why := task.sessions[0].unplaced) is not None:
                if not is_named:  # no client could ask for it later
                    await self._service.cancel_task(task_id)
                later = f"It waits: send job {job_id!r} again with its id." if is_named else "It was cancelled."
                raise ServerUnavailable(f"no node can run this job: {why}. {later}")
            wait_s = MAX_WAIT_S
        _, results = await self._service.task_results(task_id, partial=False)
        return await asyncio.to_thread(lambda: answer_json(job_result(results[0], job_id, task.request, ignored)))

    async def cancel_job(self, request: web.Request) -> web.Response:
        job = await read_record(request, ProrlCancel)
        SUBJECT.set(task_id_of(job.job_id))
        try:
            await self._service.cancel_task(validated_id(task_id_of(job.job_id), "job_id"))
        except NotFound as error:
            raise NotFound(f"no job {job.job_id!r}.") from error
        return answer_json(ProrlAnswer(status=f"Cancelled job {job.job_id}", cancelled_jobs=1))

    async def add_llm_server(self, request: web.Request) -> web.Response:
        engine = await read_record(request, ProrlEngine)
        SUBJECT.set(engine.address)
        nodes = await self._engines.add(engine.address)
        return answer_json(ProrlAnswer(status=f"Added LLM server address: {engine.address}", nodes=tuple(nodes)))

    async def clear_llm_server(self, _request: web.Request) -> web.Response:
        nodes = await self._engines.clear()
        return answer_json(ProrlAnswer(status="Cleared all LLM server addresses", nodes=tuple(nodes)))

    async def start_jobs(self, _request: web.Request) -> web.Response:
        await self._set_state("running")
        return answer_json(ProrlAnswer(status="Server started successfully"))

    async def stop_jobs(self, _request: web.Request) -> web.Response:
        await self._set_state("stopped")
        open_jobs = await self._open_jobs()
        for task_id in open_jobs:
            await self._service.cancel_task(task_id)
        return answer_json(ProrlAnswer(status="Server stopped successfully", cancelled_jobs=len(open_jobs)))

    async def prorl_status(self, _request: web.Request) -> web.Response:
        status = await self._service.store.query(self._service.store.status)
        queues = {"queued": status.sessions.get("queued", 0), "init": 0, "ready": 0, "run": 0, "eval": 0}
        queues |= {"eval" if stage == "postrun" else stage: number for stage, number in status.stages.items()}
        return answer_json(ProrlStatus(status=await self._state(), pending_jobs=self._num_waiting, queues=queues))

    async def _open_jobs(self) -> list[str]:
        return [task_id for state in _OPEN_STATES for task_id in await self._jobs_in(state)]

    async def _jobs_in(self, state: TaskState) -> list[str]:
        store = self._service.store
        found: list[str] = []
        before: int | None = None
        while True:
            page = await store.query(partial(store.tasks, limit=_PAGE, before=before, status=state))
            found += [task.task_id for task in page.tasks if task.task_id.startswith(JOB_PREFIX)]
            if (before := page.next) is None:
                return found

    async def _state(self) -> str:
        def unchanged(kept: str | None) -> str:
            return kept or "running"

        return await self._service.store.run(self._service.store.change_note, _KEY, unchanged)

    async def _set_state(self, state: Literal["running", "stopped"]) -> None:
        """Store the state, so that it survives a restart."""

        def changed(_kept: str | None) -> str:
            return state

        await self._service.store.run(self._service.store.change_note, _KEY, changed)

    async def _refuse_when_stopped(self) -> None:
        """Raises: ServerUnavailable."""
        if await self._state() == "stopped":
            raise ServerUnavailable("jobs are stopped; POST /start resumes them.")

    def routes(self) -> list[Route]:
        return [
            json_route("POST", "/process", self.process_job, "ProRL Agent's job: answered when it has ended.",
                  body=ProrlJob, errors=(400, 401, 409, 413, 503, 507)),
            json_route("POST", "/cancel", self.cancel_job, "Cancel a job; its waiting callers get an answer.",
                  body=ProrlCancel, answer=ProrlAnswer, errors=(400, 401, 404)),
            json_route("POST", "/add_llm_server", self.add_llm_server,
                  "Add an engine on every node, now or when it joins.",
                  body=ProrlEngine, answer=ProrlAnswer, errors=(400, 401, 409, 502, 503)),
            json_route("POST", "/clear_llm_server", self.clear_llm_server, "Remove all engines; calls wait.",
                  answer=ProrlAnswer, errors=(400, 401, 502, 503)),
            json_route("POST", "/start", self.start_jobs, "Resume taking jobs.", answer=ProrlAnswer),
            json_route("POST", "/stop", self.stop_jobs,
                  "Cancel the jobs in flight, and take no more.", answer=ProrlAnswer),
            json_route("GET", "/status", self.prorl_status, "Whether jobs are taken, and how deep the queues are.",
                  answer=ProrlStatus),
        ]  # fmt: skip
