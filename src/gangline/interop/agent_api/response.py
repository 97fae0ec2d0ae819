"""Converts a session's result to a response of the Responses API, with the exact tokens of its replies; pure.

The response contains one trace, because NeMo Gym and NeMo RL turn the items of a response into one row. If the main
conversation was split into several traces, it is the last one, which has the final answer. `usage` counts the tokens
of all calls, so that omitted tokens can be detected.

An item carries tokens if it is the last of a reply that is trainable as a whole; other replies are context.

Source: NeMo Gym 0.7.0, `nemo_gym/openai_utils.py` (`TokenIDLogProbMixin`); its `remote_agent`, which would execute a
call without an output, and asks again if the last item is not an assistant message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import Document, Image, Message, Text, ToolResult
from gangline.domain.errors import HarnessError
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace, Trajectory, TurnSpan
from gangline.grading.transcript import last_answer
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.wire.dialects.responses.history import message_items

_NOT_RUN = "The agent ended before this call had a result."


def response_of(result: SessionResult, created_at: float) -> dict[str, Any]:
    """created_at: Unix time.

    Raises: HarnessError if there is no run to return: it was cancelled, or its machine or engine failed.
    """
    trajectory = result.trajectory
    outcome = result.run_outcome or result.outcome  # the caller grades the run itself
    if trajectory is None or not trajectory.traces or outcome in ("cancelled", "infra_error"):
        why = outcome if result.failure is None else f"{outcome}: {result.failure.message}"
        raise HarnessError(f"session {result.session_id} has no run to answer with ({why}).")
    trace = _chosen(tuple(with_whole_prompts(trajectory.traces)))
    items = _items(trace, trajectory)
    is_whole = outcome == "completed"
    return {
        "id": f"resp_{result.session_id}",
        "object": "response",
        "created_at": created_at,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "model": trace.spans[-1].model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": _usage(trajectory, trace),
        "metadata": _about(result, items),
    }


def _chosen(traces: Sequence[Trace]) -> Trace:
    """The last main trace with trainable tokens: a run may end with a call that was cut off."""
    main = [trace for trace in traces if trace.role == "main"] or traces
    return next((one for one in reversed(main) if one.loss_mask.any()), main[-1])


def _about(result: SessionResult, items: Sequence[dict[str, Any]]) -> dict[str, str]:
    metadata = {"session_id": result.session_id, "outcome": result.run_outcome or result.outcome}
    if result.reward is not None:
        metadata["reward"] = repr(result.reward)
    return metadata | {"replies_with_tokens": str(sum("generation_token_ids" in item for item in items))}


def _items(trace: Trace, trajectory: Trajectory) -> list[dict[str, Any]]:
    """Items from the model's first reply on. Every call has an output, and the last item is an assistant message."""
    replies = sum(message.role == "assistant" for message in trace.response_messages)
    # Assistant messages written by the client cannot be distinguished here, and images have no token ids.
    has_tokens = replies == len(trace.spans) and not any(
        map(_media, (*trace.prompt_messages, *trace.response_messages))
    )
    spans = iter(trace.spans)
    items: list[dict[str, Any]] = []
    for message in trace.response_messages:
        if message.role != "assistant":
            items += _answered(message)
            continue
        items += _unanswered(items)
        new_items = message_items(_without_media(message), f"{trace.trace_id}_{len(items)}")
        if has_tokens and new_items:
            new_items[-1] |= _tokens(trace, next(spans))
        elif has_tokens:
            next(spans)
        items += new_items
    items += _unanswered(items)
    if not items or items[-1].get("role") != "assistant":
        last = Message("assistant", (Text(last_answer(trajectory) or ""),))
        items += message_items(last, f"{trace.trace_id}_last")
    return items


def _tokens(trace: Trace, span: TurnSpan) -> dict[str, Any]:
    """Token fields of a reply; empty if any part of it is not trainable."""
    if not trace.loss_mask[span.start : span.end].all():
        return {}
    response = trace.response_ids[span.start : span.end]
    return {
        "prompt_token_ids": [*trace.prompt_ids.tolist(), *trace.response_ids[: span.start].tolist()],
        "generation_token_ids": response.tolist(),
        "generation_log_probs": trace.response_logprobs[span.start : span.end].tolist(),
    }


def _answered(message: Message) -> list[dict[str, Any]]:
    """Items for the messages that the agent program added between two replies."""
    return [
        item if "type" in item else {"type": "message", "status": "completed", **item}
        for item in message_items(_without_media(message))
    ]


def _unanswered(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Placeholder outputs for calls without one."""
    answered = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
    calls = [item["call_id"] for item in items if item.get("type") == "function_call"]
    return [
        {"type": "function_call_output", "call_id": fromkey, "output": _NOT_RUN}
        for fromkey in dict.fromkeys(calls)
        if fromkey not in answered
    ]


def _media(message: Message) -> bool:
    return any(
        isinstance(one, Image | Document)
        for part in message.parts
        for one in (part.content if isinstance(part, ToolResult) else (part,))
    )


def _without_media(message: Message) -> Message:
    """The message with each image or document replaced by a word in brackets."""
    if not _media(message):
        return message
    parts = (
        msgspec.structs.replace(part, content=tuple(map(_worded, part.content)))
        if isinstance(part, ToolResult)
        else _worded(part)
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=tuple(parts))


def _worded(part: Any) -> Any:
    return Text(f"[{type(part).__name__.lower()}]") if isinstance(part, Image | Document) else part


def _usage(trajectory: Trajectory, trace: Trace) -> dict[str, Any]:
    """Sampled tokens of all calls, and prompt tokens of the calls in the response."""
    sampled = {span.completion_id: span.end - span.start for one in trajectory.traces for span in one.spans}
    read = sum(len(trace.prompt_ids) + span.start for span in trace.spans)
    num_sampled = sum(sampled.values())
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + num_sampled,
    }
