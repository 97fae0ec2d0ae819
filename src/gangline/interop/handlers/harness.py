"""Harness `handler`: runs an `AgentHandler` as the session's agent, `init` in INIT and `run` in RUN.

A failed `init` is a failed preparation, which is retried. A failed `run` is the agent's failure. In both cases the
handler's callback returns the result.
"""

from __future__ import annotations

import traceback
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from gangline.domain.contracts import AgentRun, HarnessContext, HarnessVerdict
from gangline.domain.errors import CallerError, PrepareFailed, RuntimeFault
from gangline.domain.sandbox import ExecResult
from gangline.interop.handlers.contract import AgentHandler, JobDetails, LLMConfig
from gangline.interop.handlers.jobs import Job, as_json, keep_job
from gangline.settings import plugins

_MAX_SHOWN_CHARS = 2_000


class HandlerConfig(BaseModel):
    """Settings of harness `handler`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    handler: str = Field(min_length=1, max_length=100)
    """Name of an entry point of the group `gangline.handlers`."""
    instance: dict[str, Any] = Field(default_factory=dict)
    """The task's data, `job_details.instance`."""
    agent_config: dict[str, Any] = Field(default_factory=dict)
    """The agent's settings, `job_details.agent_config`."""

    @field_validator("handler")
    @classmethod
    def _is_known(cls, handler: str) -> str:
        try:
            plugins.load("handler", handler)
        except CallerError as error:
            raise ValueError(error.message) from error
        return handler


class HandlerHarness:
    """Runs one handler in the node's process."""

    name: ClassVar[str] = "handler"
    Config: ClassVar[type[BaseModel]] = HandlerConfig

    def __init__(self, config: HandlerConfig) -> None:
        self._config = config
        self._job: Job | None = None

    async def prepare(self, context: HarnessContext) -> AgentRun:
        """Raises: PrepareFailed if the handler's `init` failed."""
        handler: AgentHandler = plugins.load("handler", self._config.handler)()
        job = Job(self._config.handler, handler, self._details(context))
        details = job.details
        try:
            details.runtime, details.metadata, details.config = await handler.init(details)
        except Exception as error:
            details.results = handler.init_exception(details, error)
            raise PrepareFailed(
                f"handler {job.handler_name!r} failed in init: {type(error).__name__}: {error}; its result: "
                f"{_shown(handler.final_result(details))}"
            ) from error
        self._job = job
        keep_job(context.session_id, job)
        return lambda: _run(job)

    def judge(self, result: ExecResult) -> HarnessVerdict:
        if result.ok:
            return HarnessVerdict(True)
        lines = result.stderr.decode(errors="replace").strip().splitlines() or ["the handler was ended"]
        return HarnessVerdict(False, f"handler {self._config.handler!r} failed in run: {lines[-1]}")

    def _details(self, context: HarnessContext) -> JobDetails:
        limit = {} if context.max_turns is None else {"max_iterations": context.max_turns}
        return JobDetails(
            job_id=context.session_id,
            instance=dict(self._config.instance),
            llm_config=LLMConfig(context.model, f"{context.node_url}/v1", context.api_key),
            runtime=context.runtime,
            agent_config=limit | self._config.agent_config,
        )


async def _run(job: Job) -> ExecResult:
    """Exit code 0 with the results as JSON on stdout, or 1 with the callback's result on stdout and the traceback on
    stderr.

    Raises: RuntimeFault if the sandbox broke, which is not the handler's fault.
    """
    details = job.details
    try:
        details.run_results = await job.handler.run(details)
        return ExecResult(exit_code=0, stdout=_encoded(details.run_results))
    except RuntimeFault:
        raise
    except Exception as error:
        details.results = job.handler.run_exception(details, error)
        return ExecResult(
            exit_code=1, stdout=_encoded(details.results), stderr="".join(traceback.format_exception(error)).encode()
        )


def _encoded(result: dict[str, Any]) -> bytes:
    return msgspec.json.encode(as_json(result))


def _shown(result: dict[str, Any]) -> str:
    return _encoded(result).decode()[:_MAX_SHOWN_CHARS]
