"""Sessions as traces of verifiers (v1), which its tools and prime-rl read.

Each session is one episode with one trace. Each of our rows is a separate path from a root to a leaf, so that a branch
of the trace is exactly one row: its ids, its mask, its log-probs. Ids of a prompt are stored with the first reply after
it, since it is unknown which message an id belongs to. verifiers does the same for engines without spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gangline.domain.conversation import Message
from gangline.domain.lifecycle import UNGRADED
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_json
from gangline.domain.trajectory import Trace, Trajectory
from gangline.machine.durable import replacing
from gangline.models.engines.fields import messages_fields
from gangline.rows.conversations.chat import chat_tools
from gangline.rows.shared_prefixes import with_whole_prompts

FILE_NAME = "traces.jsonl"
_VERSION = 1
_FINISH = ("stop", "length", "tool_calls")


class _Turn(NamedTuple):
    """A message of a row, and the ids from the previous turn to its last id."""

    message: Message
    sampled: bool
    start: int = 0
    """Index into the row's whole stream."""
    end: int = 0


def write_episodes(
    results: Iterable[SessionResult], path: Path, *, request_of: Callable[[str], TaskRequest | None]
) -> int:
    """Write `path`, which verifiers looks for under the name FILE_NAME, one session per line. Returns the number of
    lines.

    request_of: returns a task by its id, if known. Sessions that called no model have no line.
    """
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("wb") as file:
        for result in results:
            episode = episode_of(result, request_of(result.task_id))
            if episode is not None:
                file.write(encode_json(episode) + b"\n")
                num += 1
    return num


def episode_of(result: SessionResult, task: TaskRequest | None = None) -> dict[str, Any] | None:
    """Returns a line of the file, or None if the session has no row."""
    if result.trajectory is None or not result.trajectory.traces:
        return None
    trace = _trace(result, result.trajectory, task)
    return {
        "id": result.session_id,
        "env": {"id": "gangline"},
        "task": trace["task"],
        "traces": [trace],
        "ok": trace["ok"],
    }


def _trace(result: SessionResult, trajectory: Trajectory, task: TaskRequest | None) -> dict[str, Any]:
    replies = {completion.completion_id: completion.response for completion in result.completions}
    nodes: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for row in with_whole_prompts(trajectory.traces):
        _add_path(row, [*_turns(row, replies)], nodes, calls)
        rows.append(_row_info(row) | {"leaf": len(nodes) - 1})
    is_graded = result.outcome not in UNGRADED
    return {
        "version": _VERSION,
        "id": result.session_id,
        "task": _task(result.task_id, task),
        "agent": {
            "config": {},
            "name": "agent" if task is None else task.agent.harness,
            "trainable": any(row.untrainable is None for row in trajectory.traces),
        },
        "tools": _all_tools(trajectory.traces),
        "nodes": nodes,
        "calls": calls,
        "rewards": {"reward": None if result.reward is None else {"score": result.reward, "weight": 1.0}},
        "metrics": _numbers(result.reward_details),
        "info": {"gangline": {"outcome": result.outcome, "attempt": result.attempt, "rows": rows}},
        "is_completed": is_graded,
        "ok": is_graded and result.reward is not None,
        "stop_condition": result.outcome,
        "is_timeout": result.outcome == "agent_timeout",
        "errors": [] if result.failure is None else [_error(result)],
        "timing": _timing(result),
    }


def _task(task_id: str, task: TaskRequest | None) -> dict[str, Any]:
    data: dict[str, Any] = {"name": task_id}
    if task is not None:
        data |= {"prompt": task.instruction, "metadata": task.metadata}
    return {"type": "Task", "data": data, "key": task_id}


def _turns(row: Trace, replies: dict[str, Message]) -> Iterator[_Turn]:
    """Yields the row's messages in order. The ids of each turn are with its reply, or with a last message at the
    end."""
    prompt = len(row.prompt_ids)
    yield from (_Turn(message, sampled=False) for message in row.prompt_messages)
    spans, at = list(row.spans), 0
    for message in row.response_messages:
        expected = replies.get(spans[0].completion_id) if spans else None
        if message.role != "assistant" or not spans or (expected is not None and message != expected):
            yield _Turn(message, sampled=False)
            continue
        end = prompt + spans.pop(0).end
        yield _Turn(message, sampled=True, start=at, end=end)
        at = end
    if at < prompt + len(row.response_ids):
        yield _Turn(Message("assistant"), sampled=bool(spans), start=at, end=prompt + len(row.response_ids))


def _add_path(row: Trace, turns: Sequence[_Turn], nodes: list[dict[str, Any]], calls: list[dict[str, Any]]) -> None:
    ids = np.concatenate((row.prompt_ids, row.response_ids))
    mask = np.concatenate((np.zeros(len(row.prompt_ids), dtype=bool), np.asarray(row.loss_mask, dtype=bool)))
    logprobs = np.concatenate((np.zeros(len(row.prompt_ids)), row.response_logprobs))
    spans, parent = iter(row.spans), None
    for turn in turns:
        own = slice(turn.start, turn.end)
        for number, message in enumerate(found := _messages(turn.message), 1):
            node: dict[str, Any] = {"parent": parent, "message": message, "semantic_parents": []}
            if parent is None and row.tools:
                node["tools"] = _tools(row)
            if number == len(found):
                kept = mask[own]
                node |= {"token_ids": ids[own].tolist(), "mask": kept.tolist(), "sampled": turn.sampled}
                node["logprobs"] = logprobs[own][kept].tolist()
            parent = len(nodes)
            nodes.append(node)
        span = next(spans, None) if turn.sampled else None
        if span is not None:
            num_sampled = span.end - span.start
            usage = {"prompt_tokens": turn.end - num_sampled, "completion_tokens": num_sampled}
            calls.append(
                {"node": parent, "model": span.model or None, "usage": usage, "finish_reason": _finish(row, span)}
            )


def _finish(row: Trace, span: Any) -> str | None:
    found = next((one.finish_reason for one, own in zip(row.certificates, row.spans, strict=False) if own is span), "")
    return found if found in _FINISH else None


def _messages(message: Message) -> list[dict[str, Any]]:
    """Returns messages in verifiers' form, with flat tool calls. A message with several results becomes several
    messages."""
    found: list[dict[str, Any]] = []
    for fields in messages_fields([message]):
        one = {name: value for name, value in fields.items() if value is not None and name != "name"}
        if calls := one.get("tool_calls"):
            one["tool_calls"] = [{"id": call["id"], **call["function"]} for call in calls]
        if one["role"] == "assistant" and not isinstance(one.get("content"), str | None):
            one["content"] = "\n".join(part.get("text", "") for part in one["content"])
        elif one["role"] != "assistant":
            one.setdefault("content", "")
        found.append(one)
    return found


def _all_tools(rows: Sequence[Trace]) -> list[dict[str, Any]]:
    """Returns all tools of the rows; for equal names, the latest."""
    return list({tool["name"]: tool for row in rows for tool in _tools(row)}.values())


def _tools(row: Trace) -> list[dict[str, Any]]:
    fields = (tool["function"] for tool in chat_tools(row.tools))
    return [{name: value for name, value in field.items() if value is not None} for field in fields]


def _row_info(row: Trace) -> dict[str, Any]:
    versions = np.unique(row.response_versions[np.asarray(row.loss_mask, dtype=bool)]).tolist()
    return {
        "trace_id": row.trace_id,
        "role": row.role,
        "reward": row.reward,
        "untrainable": row.untrainable,
        "versions": versions,
        "completions": [span.completion_id for span in row.spans],
    }


def _numbers(details: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in details.items() if isinstance(value, int | float)}


def _error(result: SessionResult) -> dict[str, Any]:
    assert result.failure is not None
    return {"type": result.failure.code, "message": result.failure.message}


def _timing(result: SessionResult) -> dict[str, Any]:
    names = {"init": "setup", "run": "agent", "postrun": "scoring"}
    found: dict[str, Any] = {}
    for timing in result.timings:
        found.setdefault("start", timing.started_at)
        if timing.stage in names:
            found[names[timing.stage]] = {"start": timing.started_at, "end": timing.ended_at}
    return found
