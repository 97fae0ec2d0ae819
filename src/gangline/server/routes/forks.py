"""Forks of recorded sessions: tasks whose sessions continue an ended session from one of its turns."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.contracts import RunsElsewhere, VariesBetweenRuns
from gangline.domain.errors import Conflict
from gangline.domain.ids import ID_PATTERN
from gangline.domain.seeds import derived_seed
from gangline.domain.session import SessionResult
from gangline.domain.task import MAX_EDIT_CHARS, MAX_SAMPLES, ForkSpec, SamplingPolicy, TaskRequest
from gangline.domain.views import ForkTree, Submitted
from gangline.rows.forks.calls import why_not_forkable
from gangline.rows.forks.tolerance import Tolerance
from gangline.server.service.core import RolloutService
from gangline.server.service.fork_tree import fork_tree
from gangline.settings import plugins
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.routes import SUBJECT, Route


class ForkRequest(BaseModel):
    """Body of `POST /v1/sessions/{session}/forks`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turn: int = Field(ge=1)
    """The last model call answered from the record; 1 is the first."""
    samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Sessions that continue from there."""
    sampling: SamplingPolicy | None = None
    """Sampling rules for the calls after the fork. Other parameters keep the task's rules."""
    edit: str | None = Field(default=None, max_length=MAX_EDIT_CHARS)
    """Text sent to the engine instead of the newest message before the first sampled call: the last tool result, or the
    user's message. The agent does not see it.
    """
    engine: str | None = Field(default=None, pattern=ID_PATTERN)
    """A role with its own engines, which answer the calls after the fork. None: the policy's engines. Sessions fail if
    its tokenizer or chat template differs from the record's, or if the role has no engine on their node.
    """
    task_id: str | None = Field(default=None, pattern=ID_PATTERN)
    """Id of the new task; None lets the server choose."""


class ForkRoutes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def fork(self, request: web.Request) -> web.Response:
        session_id = path_id(request, "session_id")
        SUBJECT.set(session_id)
        wanted = await read_record(request, ForkRequest)
        recorded = await self._service.session_result(session_id)
        parent = await self._service.task(recorded.task_id)
        task = TaskRequest.model_validate(parent.request)
        view = await self._service.store.query(self._service.store.session, session_id)
        fork = await asyncio.to_thread(_fork, task, recorded, view.sample_index, wanted)
        return answer(request, (await self._service.submit([fork], parent.tenant))[0])

    async def tree(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer(request, await store.query(fork_tree, store, path_id(request, "session_id")))

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/sessions/{session_id}/forks", self.tree,
                  "The tree of forks that a session is in, at most 1,000 sessions of 100 tasks.",
                  answer=ForkTree, errors=(400, 401, 404)),
            Route("POST", "/v1/sessions/{session_id}/forks", self.fork,
                  "Submit a task whose sessions continue an ended session from one of its turns.",
                  body=ForkRequest, answer=Submitted, errors=(400, 401, 404, 409, 413, 507)),
        ]  # fmt: skip


def _fork(task: TaskRequest, recorded: SessionResult, sample_index: int, wanted: ForkRequest) -> TaskRequest:
    """The task of the forks. Raises: Conflict if the session cannot be forked there."""
    if task.steps:
        raise Conflict(f"session {recorded.session_id} is not forkable, because its task has steps.")
    harness = plugins.make_harness(task.agent.harness, task.agent.settings)
    if isinstance(harness, RunsElsewhere):
        raise Conflict(f"session {recorded.session_id} is not forkable, because {harness.runs_elsewhere}.")
    tolerance = Tolerance(harness.varying_text if isinstance(harness, VariesBetweenRuns) else ())
    if (why := why_not_forkable(recorded.completions, wanted.turn, tolerance)) is not None:
        raise Conflict(f"session {recorded.session_id} is not forkable, because {why}.")
    seed = task.capture.session_seed(sample_index)
    capture = task.capture.model_copy(
        update={
            "sampling": _sampling(task.capture.sampling, wanted.sampling),
            # The parent's seed would sample the parent's answers again.
            "seed": None if seed is None else derived_seed(seed, wanted.turn),
        }
    )
    fork = ForkSpec(
        session_id=recorded.session_id,
        attempt=recorded.attempt,
        turn=wanted.turn,
        edit=wanted.edit,
        engine=wanted.engine,
    )
    changes: dict[str, Any] = {
        "task_id": wanted.task_id,
        "num_samples": wanted.samples,
        "capture": capture,
        "fork": fork,
        "callback_url": None,
        "vetting": None,
    }
    return TaskRequest.model_validate(task.model_copy(update=changes).model_dump())


def _sampling(own: SamplingPolicy | None, wanted: SamplingPolicy | None) -> SamplingPolicy | None:
    if own is None or wanted is None:
        return wanted or own
    return own.model_copy(update={name: rule for name, rule in wanted if rule is not None})
