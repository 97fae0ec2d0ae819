"""`AgentHandler`, ProRL Agent's interface for task families, and the job that its methods share.

Handlers are found by entry point (group `gangline.handlers`); each session gets a new instance. The methods are
coroutines on the node's event loop: use `asyncio.to_thread` for blocking work.

Source: ProRL Agent, listing 1. `JobDetails` has the fields that its handlers read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class LLMConfig:
    """Access to the session's model through OpenAI Chat. Every call is captured."""

    model: str
    base_url: str
    """Ends in `/v1`. Reachable from the node, but not from its sandboxes."""
    api_key: str = field(repr=False)


@dataclass
class JobDetails:
    """One session, from `init` to `final_result`. Handlers may modify it and set further attributes."""

    job_id: str
    """The session's id."""
    instance: dict[str, Any]
    llm_config: LLMConfig
    runtime: Any
    """The session's sandbox, a started `Sandbox`; after `init`, the runtime that it returned."""
    agent_config: dict[str, Any] = field(default_factory=dict[str, Any])
    """`max_iterations`, if the task limits its turns, and `agent_config` of the harness settings."""
    metadata: Any = None
    config: Any = None
    agent: Any = None
    controller: Any = None
    run_results: dict[str, Any] | None = None
    """Returned by `run`; None if it failed, timed out or hit a limit."""
    eval_results: dict[str, Any] | None = None
    results: dict[str, Any] | None = None
    """Returned by a failed stage's callback."""
    timeout_error: bool = False


class AgentHandler(ABC):
    """A task family: three methods, and a callback for the failure of each."""

    @abstractmethod
    async def init(self, job_details: JobDetails) -> tuple[Any, Any, Any]:
        """Provide the environment, in the started sandbox `job_details.runtime`.

        Returns: runtime, metadata, config. They are stored in the job.
        """

    @abstractmethod
    async def run(self, job_details: JobDetails) -> dict[str, Any]:
        """Drive the agent. Returns its trajectory and artifacts; only JSON-serializable values are kept."""

    @abstractmethod
    async def eval(self, job_details: JobDetails) -> dict[str, Any]:
        """Score the output. Returns `reward`, a number, or `resolved`, which gives 1 or 0.

        The agent's processes are dead by then, and the session's model no longer answers.
        """

    def init_exception(self, job_details: JobDetails, exc: Exception) -> dict[str, Any]:
        return _failed(job_details, "init", exc)

    def run_exception(self, job_details: JobDetails, exc: Exception) -> dict[str, Any]:
        """The result of a session whose `run` failed. A `reward` or `resolved` in it becomes the session's reward."""
        return _failed(job_details, "run", exc)

    def eval_exception(self, job_details: JobDetails, exc: Exception) -> dict[str, Any]:
        return _failed(job_details, "eval", exc)

    def final_result(self, job_details: JobDetails) -> dict[str, Any]:
        """The job's final result, for any outcome."""
        late = {"critical_error": "timeout"} if job_details.timeout_error else {}
        if job_details.results is not None:
            return {**job_details.results, **late}
        found = {**(job_details.run_results or {}), "resolved": False, **(job_details.eval_results or {})}
        return {"instance_id": job_details.instance.get("instance_id"), "critical_error": None, **found, **late}


def _failed(job: JobDetails, stage: Literal["init", "run", "eval"], exc: Exception) -> dict[str, Any]:
    return {
        "instance_id": job.instance.get("instance_id"),
        **(job.run_results or {}),
        "success": False,
        "resolved": False,
        "error": f"Error in {stage}: {type(exc).__name__}: {exc}",
        "critical_error": stage,
    }
