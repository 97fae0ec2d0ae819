"""A session as JSON for graders: the recorded conversation, not the agent's description of it.

    {"session_id", "instruction", "outcome", "harness_exit": {"exit_code", "signal", "timed_out"}, "harness_stdout",
     "metadata", "traces": [{"trace_id", "role", "parent_trace_id", "num_turns", "turns": [completion id, ...],
                             "finish_reason", "prompt_messages", "response_messages"}]}

Messages have the format of OpenAI's chat API. `response_messages` begins with the model's first answer in the trace;
the harness's answers in between follow in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.contracts import EvaluationContext
from gangline.domain.conversation import Document, Image, Message, Text, Thinking, ToolCall, ToolResult
from gangline.domain.trajectory import Trace, Trajectory


def transcript(context: EvaluationContext) -> dict[str, Any]:
    return {
        "session_id": context.session_id,
        "instruction": context.instruction,
        "outcome": context.outcome,
        "harness_exit": msgspec.to_builtins(context.harness_exit),
        "harness_stdout": context.harness_stdout.decode(errors="replace"),
        "metadata": dict(context.metadata),
        "traces": [_trace(trace) for trace in context.trajectory.traces],
    }


def last_answer(trajectory: Trajectory) -> str | None:
    """The model's last answer in the main traces (in all traces if there is no main one): the argument of a call to the
    tool `submit`, or its text.
    """
    traces = [trace for trace in trajectory.traces if trace.role == "main"] or trajectory.traces
    for trace in reversed(traces):
        for message in reversed(trace.response_messages):
            if message.role == "assistant":
                text = "".join(part.text for part in message.parts if isinstance(part, Text))
                return _submitted(message) or text
    return None


class _Submitted(msgspec.Struct):
    answer: str = ""


def _submitted(message: Message) -> str:
    """The answer in the first readable call to `submit`; empty if there is none."""
    for part in message.parts:
        if isinstance(part, ToolCall) and part.name == "submit":
            try:
                return msgspec.json.decode(part.arguments, type=_Submitted).answer
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                continue
    return ""


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format. A message with several tool results becomes several messages."""
    return [item for message in messages for item in _chat_items(message)]


def _trace(trace: Trace) -> dict[str, Any]:
    return {
        "trace_id": trace.trace_id,
        "role": trace.role,
        "agent_roles": [span.agent_role for span in trace.spans],
        "parent_trace_id": trace.parent_trace_id,
        "num_turns": len(trace.spans),
        "turns": [span.completion_id for span in trace.spans],
        "finish_reason": trace.finish_reason,
        "prompt_messages": chat_messages(trace.prompt_messages),
        "response_messages": chat_messages(trace.response_messages),
    }


def _chat_items(message: Message) -> list[dict[str, Any]]:
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    items: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": result.call_id, "content": _content(result.content)} for result in results
    ]
    if len(results) < len(message.parts) or not results:
        items.append(_spoken(message))
    return items


def _content(pieces: Sequence[Text | Image | Document]) -> str | list[dict[str, Any]]:
    """A string if there is only text, otherwise parts in order."""
    if all(isinstance(piece, Text) for piece in pieces):
        return "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return [_content_part(piece) for piece in pieces]


def _content_part(piece: Text | Image | Document) -> dict[str, Any]:
    match piece:
        case Text():
            return {"type": "text", "text": piece.text}
        case Image():
            detail = {} if piece.detail is None else {"detail": piece.detail}
            return {"type": "image_url", "image_url": {"url": piece.url} | detail}
        case Document():
            name = {} if piece.name is None else {"filename": piece.name}
            return {"type": "file", "file": {"file_data": piece.url} | name}


def _spoken(message: Message) -> dict[str, Any]:
    item: dict[str, Any] = {"role": message.role}
    if message.name is not None:
        item["name"] = message.name
    item["content"] = _content([part for part in message.parts if isinstance(part, Text | Image | Document)])
    thinking = "".join(part.text for part in message.parts if isinstance(part, Thinking))
    if thinking:
        item["reasoning_content"] = thinking
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    if calls:
        item["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return item
