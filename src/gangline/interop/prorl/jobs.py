"""ProRL Agent's jobs: converts an instance with sampling parameters to a task, and a session's result to a job's; pure.

An instance is either one of our tasks (it has `agent` and `instruction`), or data for the template, preset or handler
named by its `data_source`: see `templates`.

Source: ProRL Agent, listings 2 and 3, 3.3.3 (messages carry ids and log-probs), 3.3.4 (errors are structured results).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.trajectory import Trace
from gangline.grading.transcript import chat_messages
from gangline.interop.polar.records import chat_tools, polar_result
from gangline.rows.shared_prefixes import with_whole_prompts

JOB_PREFIX = "job-"
"""Prefix of a job's task id. `/stop` finds jobs by it, also after a restart."""

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_ALIASES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
}


def task_id_of(job_id: str) -> str:
    return JOB_PREFIX + job_id


def task_of_instance(
    instance: Mapping[str, Any],
    sampling: Mapping[str, Any],
    job_id: str,
    task_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> tuple[TaskRequest, list[str]]:
    """The task of a job, and the names of the sampling parameters that are ignored.

    task_of: returns a task's body for an instance with a `data_source`. Raises: InvalidRequest, StoreError.

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
    own.
    """
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
    """The response of `/process`: reward, trajectory, messages with their ids, and any failure with its boundary."""
    instance = cast("dict[str, Any]", request.get("metadata", {})).get("instance", {})
    messages, tools = _messages(result)
    polar = polar_result(result, {**request, "metadata": {}}, "floats")
    return {
        "job_id": job_id,
        "instance_id": instance.get("instance_id"),
        "trajectory_id": instance.get("trajectory_id"),
        "resolved": result.reward is not None and result.reward >= 1.0,  # only in full: partial credit resolves nothing
        "reward": result.reward,
        "report": result.reward_details,
        "success": result.outcome == "completed",
        "finish": result.outcome == "completed",
        "outcome": result.outcome,
        "error": polar["error"],
        "critical_error": _critical_error(result),
        "filter": result.outcome not in ("completed", *STOPPED_BY_LIMIT),
        "messages": messages,
        "tools": tools,
        "trajectory": polar["trajectory"],
        "timing": _timing(result),
        "ignored_sampling_params": list(ignored),
    }


def _timing(result: SessionResult) -> dict[str, Any]:
    """Seconds in each stage, under the paper's names and the published server's."""
    spent = {timing.stage: timing.ended_at - timing.started_at for timing in result.timings}
    stages = {"init": spent.get("init", 0.0), "run": spent.get("run", 0.0), "eval": spent.get("postrun", 0.0)}
    return stages | {
        **{f"{name}_time": seconds for name, seconds in stages.items()},
        "others_time": spent.get("ready", 0.0),
        "counted_elapsed": sum(stages.values()),
        "timeout_triggered": result.outcome == "agent_timeout",
    }


def _critical_error(result: SessionResult) -> str | None:
    """The stage that broke: `timeout`, `cancelled`, `init`, `run`, `eval`; or None."""
    if result.outcome in ("agent_timeout", "cancelled"):
        return "timeout" if result.outcome == "agent_timeout" else "cancelled"
    if result.failure is None:
        return None
    return {"runtime": "init", "evaluator": "eval", "builder": "eval"}.get(result.failure.boundary, "run")


def _messages(result: SessionResult) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The main conversation and its tools. Of several main traces, the last, which is the most complete."""
    if result.trajectory is None or not result.trajectory.traces:
        return [], []
    traces = tuple(with_whole_prompts(result.trajectory.traces))
    main = next((trace for trace in reversed(traces) if trace.role == "main"), traces[-1])
    return _with_ids(main), chat_tools(main)


def _with_ids(trace: Trace) -> list[dict[str, Any]]:
    """Messages with `token_ids`, which join to the trace's: of the messages between two answers, the last has all the
    ids. Answers also have the ids that they were sampled after, and their log-probs.
    """
    asked, replies = chat_messages(trace.prompt_messages), chat_messages(trace.response_messages)
    num_answers = sum(message["role"] == "assistant" for message in replies)
    if num_answers != len(trace.spans):  # the client wrote some answers: they cannot be matched to spans
        return asked + replies
    prompt, response = trace.prompt_ids.tolist(), trace.response_ids.tolist()
    logprobs = trace.response_logprobs.tolist()
    for message in asked:
        message["token_ids"] = prompt if message is asked[-1] else []
    spans, end = iter(trace.spans), 0
    for message, following in zip(replies, [*replies[1:], None], strict=True):
        if message["role"] == "assistant":
            span = next(spans)
            message["input_ids"] = prompt + response[: span.start]
            message["token_ids"] = message["output_ids"] = response[span.start : span.end]
            message["logprobs"] = logprobs[span.start : span.end]
            end = span.end
            continue
        message["token_ids"] = []
        if following is None or following["role"] == "assistant":
            start = _next_start(trace, end)
            message["token_ids"], end = response[end:start], start
    return asked + replies


def _next_start(trace: Trace, end: int) -> int:
    """Start of the first answer at or after `end`; the trace's end if there is none."""
    return next((span.start for span in trace.spans if span.start >= end), len(trace.response_ids))
