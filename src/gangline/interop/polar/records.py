"""Converts tasks, session results and traces to Polar's records; pure.

Source: Polar, A.4 (trace), A.5 (poll), 3.3.2 (a timeout keeps its partial traces); its published models, which read
these records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.domain.session import SessionResult, is_usable
from gangline.domain.trajectory import Trace
from gangline.domain.views import TaskView
from gangline.grading.transcript import chat_messages
from gangline.rows.shared_prefixes import with_whole_prompts

LogprobForm = Literal["objects", "floats"]
"""Form of `response_logprobs`: objects as in the paper, `{"token", "token_id", "logprob"}` for sampled tokens and
without `token` for others; or numbers as in its published code, which rejects objects.
"""

_STATUSES: dict[str, str] = {
    "completed": "COMPLETED",
    **dict.fromkeys(STOPPED_BY_LIMIT, "COMPLETED"),
    "agent_timeout": "TIMEOUT",
}
_SCHEDULING = ("group_id", "policy_version", "rollout_step")
"""Keys of a task's metadata by which a trainer finds its group."""
_STAGE_FIELDS = {"init": "init_ms", "ready": "ready_queue_ms", "run": "run_ms", "postrun": "postrun_ms"}


def polar_task_status(task: TaskView) -> str:
    """`running`, `completed` or `cancelled`."""
    if not task.ended:
        return "running"
    return "cancelled" if task.status == "cancelled" else "completed"


def polar_session_status(outcome: str) -> str:
    """`COMPLETED`, `TIMEOUT` or `ERROR`."""
    return _STATUSES.get(outcome, "ERROR")


def stopped_early(task: TaskView, results: Sequence[SessionResult]) -> dict[str, Any]:
    """Fields for sessions that were cancelled because their group had enough results; empty if there are none.

    Source: Polar's `_early_stop_result`, `rollout/pipeline.py`, 01bc72d.
    """
    enough = task.request.get("enough_sessions")
    if enough is None or task.status != "ended":
        return {}
    return {
        "early_stop_cancelled": True,
        "fully_masked": True,
        "early_stop_reason": "minimum_usable_sessions_reached",
        "early_stop_min_usable_sessions": enough,
        "early_stop_usable_sessions": sum(map(is_usable, results)),
    }


def polar_result(
    result: SessionResult, request: Mapping[str, Any], form: LogprobForm, early: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A session's result, with traces as in A.4. request: its task, as JSON data. early: see `stopped_early`."""
    stopped = dict(early) if early and result.outcome == "cancelled" else dict[str, Any]()
    status = polar_session_status(result.outcome)
    error = None if result.failure is None else result.failure.message
    if status == "ERROR" and error is None:
        error = result.outcome
    trajectory = result.trajectory
    traces = () if trajectory is None else with_whole_prompts(trajectory.traces)
    timeout = _agent_timeout(result, request)
    agent: Mapping[str, Any] = request.get("agent", {})
    about = {"session_id": result.session_id, "task_id": result.task_id, "harness": str(agent.get("harness"))}
    if trajectory is not None:
        about["builder"] = trajectory.builder
    if stopped:
        error = "session cancelled: enough sessions of its group had ended with tokens to train on"
    return {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "status": status,
        "trajectory": {
            "status": status,
            "metadata": about
            | stopped
            | _whole(result, request)
            | ({} if timeout is None else {"agent_result": timeout}),
            "traces": [
                _trace(trace, result.reward, about | _training_filter(trace, result, timeout), form) for trace in traces
            ],
            "error": error,
        },
        "timing": _timing(result),
        "node_id": result.node_id,
        "error": error,
        "metadata": {"outcome": result.outcome, "attempt": result.attempt, "reward": result.reward}
        | stopped
        | request.get("metadata", {}),
    }


def _whole(result: SessionResult, request: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the whole trajectory, apart from its ids."""
    metadata: dict[str, Any] = request.get("metadata", {})
    found: dict[str, Any] = {name: metadata[name] for name in _SCHEDULING if name in metadata}
    found["record_count"] = 0 if result.trajectory is None else result.trajectory.num_completions
    found["task_metadata"] = metadata
    if result.reward is not None:
        found["evaluation"] = {"outcome_reward": result.reward}
    return found


def _agent_timeout(result: SessionResult, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether the agent's or the session's budget ended RUN; None if neither did."""
    if result.outcome != "agent_timeout":
        return None
    own = request.get("metadata", {}).get("agent_timeout")
    source = "agent" if own is not None and own == request.get("timeout_seconds") else "session"
    return {"status": "timeout", "return_code": -1, "timeout_source": source, "timeout_stage": "exec"}


def _training_filter(trace: Trace, result: SessionResult, timeout: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metadata that makes a trainer accept rows of an agent that used up its own budget; without it they are dropped.

    Empty for a session whose grading failed. A gateway's own entry is not overwritten.
    """
    if timeout is None or timeout["timeout_source"] != "agent":
        return {}
    if result.failure is not None or "training_filter" in trace.metadata:
        return {}
    trainable = bool(trace.loss_mask.any())
    reason = "agent_timeout" if trainable else "agent_timeout_unaligned"
    return {"training_filter": {"masked": not trainable, "trainable": trainable, "reason": reason}}


def _timing(result: SessionResult) -> dict[str, float]:
    spent = dict.fromkeys(_STAGE_FIELDS.values(), 0.0)
    for timing in result.timings:
        spent[_STAGE_FIELDS[timing.stage]] += 1000 * (timing.ended_at - timing.started_at)
    return spent | {"e2e_ms": sum(spent.values())}


def _trace(trace: Trace, reward: float | None, about: Mapping[str, Any], form: LogprobForm) -> dict[str, Any]:
    ids, logprobs = trace.response_ids.tolist(), trace.response_logprobs.tolist()
    texts = trace.response_texts or (None,) * len(ids)
    pairs = [
        ({} if text is None else {"token": text}) | {"token_id": token, "logprob": logprob}
        for text, token, logprob in zip(texts, ids, logprobs, strict=True)
    ]
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
