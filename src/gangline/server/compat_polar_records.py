"""Polar's words for a task, a session's result and a trace, and ours for them; pure.

Source: Polar, A.3 (task), A.4 (trace), 3.3.2 (a timeout keeps its partial traces). Where its published code has more
fields than the paper, those that have a meaning here are understood, and others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from gangline.domain.lifecycle import Outcome
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.trajectory import Trace
from gangline.domain.views import TaskView
from gangline.evaluators.transcript import chat_messages
from gangline.trajectories.shared_prefixes import with_whole_prompts

__all__ = ["LogprobForm", "chat_tools", "polar_result", "polar_session_status", "polar_task_status", "task_from_polar"]

LogprobForm = Literal["objects", "floats"]
"""`response_logprobs` as the paper has it, `{"token_id", "logprob"}` each, or as numbers, as its later code has it."""

_NETWORKS = {"host": "full", "bridge": "full", None: "proxy"}
_STATUSES: dict[Outcome, str] = {
    "completed": "COMPLETED",
    "turn_limit": "COMPLETED",
    "token_limit": "COMPLETED",
    "agent_timeout": "TIMEOUT",
}
_STAGE_FIELDS = {"init": "init_ms", "ready": "ready_queue_ms", "run": "run_ms", "postrun": "postrun_ms"}
_MEBIBYTE = 1024**2


def task_from_polar(payload: Any) -> TaskRequest:
    """A task as in A.3. Raises: pydantic.ValidationError, which names what is not understood."""
    if not isinstance(payload, dict):
        return TaskRequest.model_validate(payload)
    task = {name: value for name, value in cast("dict[str, Any]", payload).items() if value is not None}
    if isinstance(runtime := task.get("runtime"), dict):
        task["runtime"] = _runtime(cast("dict[str, Any]", runtime))
    if isinstance(builder := task.get("builder"), dict):
        task["builder"] = _flat(cast("dict[str, Any]", builder))
    return TaskRequest.model_validate(task)


def _runtime(given: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's networks are Docker's; the harness must reach the model whichever it is."""
    runtime = {name: value for name, value in given.items() if value is not None}
    limits = {"cpus": runtime.pop("cpus", None)}
    if isinstance(memory_mb := runtime.pop("memory_mb", None), int | float):
        limits["memory_bytes"] = int(memory_mb * _MEBIBYTE)
    named = {name: value for name, value in limits.items() if value is not None}
    if named and isinstance(runtime.get("limits", {}), dict):
        runtime["limits"] = named | runtime.get("limits", {})
    network = runtime.get("network")
    if network is None or isinstance(network, str):
        runtime["network"] = _NETWORKS.get(network, network)
    if runtime.pop("allow_internet", True) is False:
        runtime["network"] = "proxy"
    return runtime


def _flat(builder: Mapping[str, Any]) -> dict[str, Any]:
    """A builder's settings stand beside its strategy here, under `config` there."""
    fields = dict(builder)
    config = fields.pop("config", None)
    return fields | (cast("dict[str, Any]", config) if isinstance(config, dict) else {})


def polar_task_status(task: TaskView) -> str:
    """`running`, `completed` or `cancelled`."""
    if not task.ended:
        return "running"
    return "cancelled" if task.status == "cancelled" else "completed"


def polar_session_status(outcome: Outcome) -> str:
    """`COMPLETED`, `TIMEOUT` or `ERROR`."""
    return _STATUSES.get(outcome, "ERROR")


def polar_result(result: SessionResult, harness: str, form: LogprobForm) -> dict[str, Any]:
    """A session's result, with its traces as in A.4."""
    status = polar_session_status(result.outcome)
    error = None if result.failure is None else result.failure.message
    if status == "ERROR" and error is None:
        error = result.outcome
    trajectory = result.trajectory
    traces = () if trajectory is None else with_whole_prompts(trajectory.traces)
    about = {"session_id": result.session_id, "task_id": result.task_id, "harness": harness}
    if trajectory is not None:
        about["builder"] = trajectory.builder
    return {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "status": status,
        "trajectory": {
            "status": status,
            "metadata": about | {"record_count": 0 if trajectory is None else trajectory.num_completions},
            "traces": [_trace(trace, result.reward, about, form) for trace in traces],
            "error": error,
        },
        "timing": _timing(result),
        "node_id": result.node_id,
        "error": error,
        "metadata": {"outcome": result.outcome, "attempt": result.attempt, "reward": result.reward},
    }


def _timing(result: SessionResult) -> dict[str, float]:
    spent = dict.fromkeys(_STAGE_FIELDS.values(), 0.0)
    for timing in result.timings:
        spent[_STAGE_FIELDS[timing.stage]] += 1000 * (timing.ended_at - timing.started_at)
    return spent | {"e2e_ms": sum(spent.values())}


def _trace(trace: Trace, reward: float | None, about: Mapping[str, Any], form: LogprobForm) -> dict[str, Any]:
    ids, logprobs = trace.response_ids.tolist(), trace.response_logprobs.tolist()
    pairs = [{"token_id": token, "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)]
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "response_ids": ids,
        "loss_mask": trace.loss_mask.tolist(),
        "response_logprobs": pairs if form == "objects" else logprobs,
        "prompt_messages": chat_messages(trace.prompt_messages),
        "response_messages": chat_messages(trace.response_messages),
        "tools": chat_tools(trace) or None,
        "finish_reason": trace.finish_reason,
        "reward": reward if trace.reward is None else trace.reward,
        "metadata": {**trace.metadata, **about, "trace_id": trace.trace_id, "role": trace.role}
        | ({} if trace.untrainable is None else {"untrainable": trace.untrainable}),
    }


def chat_tools(trace: Trace) -> list[dict[str, Any]]:
    """The trace's tools in OpenAI's form."""
    named = [(tool.name, tool.description, tool.parameters) for tool in trace.tools]
    return [
        {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}
        for name, description, parameters in named
    ]
