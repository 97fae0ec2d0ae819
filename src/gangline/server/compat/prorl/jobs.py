"""ProRL Agent's jobs: an instance and sampling parameters become a task, a session's result becomes a job's; pure.

An instance is a task of ours as it is (it has `agent` and `instruction`), or data for the template, preset or
handler that its `data_source` names: see `templates`.

Source: ProRL Agent, listings 2 and 3, 3.3.3 (messages carry ids and log-probs), 3.3.4 (errors are structured results).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.trajectory import Trace
from gangline.evaluators.transcript import chat_messages
from gangline.server.compat.records import chat_tools, polar_result
from gangline.trajectories.shared_prefixes import with_whole_prompts

__all__ = ["JOB_PREFIX", "job_result", "task_id_of", "task_of_instance"]

JOB_PREFIX = "job-"
"""Prefix of the task id of a job: `/stop` finds jobs by it, also after a restart."""

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}


def task_id_of(job_id: str) -> str:
    return JOB_PREFIX + job_id


def task_of_instance(
    instance: Mapping[str, Any],
    sampling: Mapping[str, Any],
    job_id: str,
    task_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> tuple[TaskRequest, list[str]]:
    """The task of a job, and the names of sampling parameters that have no meaning here.

    task_of: body of the task of an instance with a `data_source`. Raises: InvalidRequest, StoreError.

    Raises: pydantic.ValidationError, InvalidRequest, StoreError.
    """
    fields = _own_fields(instance) if "agent" in instance else task_of(instance)
    task = {name: value for name, value in fields.items() if value is not None}
    task |= {"task_id": task_id_of(job_id), "num_samples": 1, "metadata": {"instance": dict(instance)}}
    ignored = _apply(sampling, task)
    return TaskRequest.model_validate(task), ignored


def _own_fields(instance: Mapping[str, Any]) -> dict[str, Any]:
    return {name: instance[name] for name in TaskRequest.model_fields if name in instance}


def _apply(sampling: Mapping[str, Any], task: dict[str, Any]) -> list[str]:
    """Copy the supported parameters into `task`. A key for the model (`api_key`) is never kept: nodes have their
    own."""
    rules: dict[str, Any] = {}
    ignored: list[str] = []
    agent = dict(cast("dict[str, Any]", task["agent"])) if isinstance(task.get("agent"), dict) else {}
    for name, value in sampling.items():
        known = _ALIASES.get(name, name)
        if known in _SAMPLING:
            rules[known] = {"override": value}
        elif name == "model":
            agent.setdefault("model_name", value)
        elif name == "max_iterations":
            agent["max_turns"] = value
        else:
            ignored.append(name)
    capture = dict(cast("dict[str, Any]", task["capture"])) if isinstance(task.get("capture"), dict) else {}
    if rules:
        given = capture.get("sampling")
        capture["sampling"] = (cast("dict[str, Any]", given) if isinstance(given, dict) else {}) | rules
    task["agent"], task["capture"] = agent, capture
    return sorted(ignored)


def job_result(
    result: SessionResult, job_id: str, request: Mapping[str, Any], ignored: Sequence[str]
) -> dict[str, Any]:
    """The answer of `/process`: reward, trajectory, messages with their ids, and any failure with its boundary."""
    instance = cast("dict[str, Any]", request.get("metadata", {})).get("instance", {})
    messages, tools = _messages(result)
    told = polar_result(result, {**request, "metadata": {}}, "floats")
    timing = {timing.stage: timing.ended_at - timing.started_at for timing in result.timings}
    return {
        "job_id": job_id,
        "instance_id": instance.get("instance_id"),
        "trajectory_id": instance.get("trajectory_id"),
        "resolved": result.reward is not None and result.reward >= 1.0,  # in full: partial credit resolves nothing
        "reward": result.reward,
        "report": result.reward_details,
        "success": result.outcome == "completed",
        "finish": result.outcome == "completed",
        "outcome": result.outcome,
        "error": told["error"],
        "critical_error": _critical_error(result),
        "filter": result.outcome not in ("completed", *STOPPED_BY_LIMIT),
        "messages": messages,
        "tools": tools,
        "trajectory": told["trajectory"],
        "timing": {"init": timing.get("init", 0.0), "run": timing.get("run", 0.0), "eval": timing.get("postrun", 0.0)},
        "ignored_sampling_params": list(ignored),
    }


def _critical_error(result: SessionResult) -> str | None:
    """The stage that broke: `timeout`, `cancelled`, `init`, `run`, `eval`, or nothing."""
    if result.outcome in ("agent_timeout", "cancelled"):
        return "timeout" if result.outcome == "agent_timeout" else "cancelled"
    if result.failure is None:
        return None
    return {"runtime": "init", "evaluator": "eval", "builder": "eval"}.get(result.failure.boundary, "run")


def _messages(result: SessionResult) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The main conversation, and its tools. Of several traces the last of the main line, which knows most."""
    if result.trajectory is None or not result.trajectory.traces:
        return [], []
    traces = tuple(with_whole_prompts(result.trajectory.traces))
    main = next((trace for trace in reversed(traces) if trace.role == "main"), traces[-1])
    return chat_messages(main.prompt_messages) + _with_ids(main), chat_tools(main)


def _with_ids(trace: Trace) -> list[dict[str, Any]]:
    """The answers, each with the ids that it was sampled after, its own, and their log-probs."""
    said = chat_messages(trace.response_messages)
    answers = [message for message in said if message["role"] == "assistant"]
    if len(answers) != len(trace.spans):  # the client put words into the model's mouth: which is which is not known
        return said
    prompt, response = trace.prompt_ids.tolist(), trace.response_ids.tolist()
    logprobs = trace.response_logprobs.tolist()
    for message, span in zip(answers, trace.spans, strict=True):
        message["input_ids"] = prompt + response[: span.start]
        message["output_ids"] = response[span.start : span.end]
        message["logprobs"] = logprobs[span.start : span.end]
    return said
