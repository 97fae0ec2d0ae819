"""What a template writes of a client's messages, said without the code under test."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gangline.domain.conversation import Message, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.models.language.tools import tool_fields
from support.templates.characters import plain_text

__all__ = ["keeps_sampled_turns", "lost_texts", "rendering", "with_ids"]

_LOOPS_OVER_CONTENT = re.compile(r"for \w+ in message\['content'\]")
"""Such a template reads lists of parts, and vLLM gives it those."""


def rendering(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition],
    kwargs: dict[str, Any],
    *,
    prompt: bool = True,
) -> str | None:
    """The prompt's text. None where the template refuses the messages."""
    plain = [fields for message in messages for fields in _plain(message)]
    if _LOOPS_OVER_CONTENT.search(template) and "is string" not in template:
        plain = [{**fields, "content": [{"type": "text", "text": fields["content"]}]} for fields in plain]
    try:
        return plain_text(template, plain, [tool_fields(tool) for tool in tools] or None, kwargs, prompt)
    except Exception:  # a template refuses in any way it likes
        return None


def _plain(message: Message) -> list[dict[str, Any]]:
    """As vLLM gives messages to a template."""
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    plain = [{"role": "tool", "tool_call_id": result.call_id, "content": _result_text(result)} for result in results]
    rest = [part for part in message.parts if not isinstance(part, ToolResult)]
    if not rest and results:
        return plain
    role = {"developer": "system", "tool": "user"}.get(message.role, message.role)
    fields: dict[str, Any] = {"role": role, "content": "\n".join(p.text for p in rest if isinstance(p, Text))}
    calls = [part for part in rest if isinstance(part, ToolCall)]
    if calls:
        fields["tool_calls"] = [
            {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in calls
        ]
    if thoughts := [part.text for part in rest if isinstance(part, Thinking)]:
        fields["reasoning"] = fields["reasoning_content"] = "".join(thoughts)
    return [*plain, fields]


def _result_text(result: ToolResult) -> str:
    text = "\n".join(piece.text for piece in result.content if isinstance(piece, Text))
    return f"Error: {text}" if result.is_error and not text.lower().startswith("error") else text


def with_ids(messages: Sequence[Message], ids: Mapping[str, str]) -> tuple[Message, ...]:
    """ids: the client's -> the engine's."""

    def known(part: Any) -> Any:
        if isinstance(part, ToolCall):
            return ToolCall(ids.get(part.call_id, part.call_id), part.name, part.arguments)
        if isinstance(part, ToolResult):
            return ToolResult(ids.get(part.call_id, part.call_id), part.content, part.is_error)
        return part

    return tuple(Message(one.role, tuple(map(known, one.parts)), one.name) for one in messages)


def lost_texts(messages: Sequence[Message], prompt: str) -> set[str]:
    """Roles of messages whose text is not in the prompt: `tool` for results."""
    lost: set[str] = set()
    for message in messages:
        for part in message.parts:
            pieces = part.content if isinstance(part, ToolResult) else (part,)
            role = "tool" if isinstance(part, ToolResult) else message.role
            for piece in pieces:
                if isinstance(piece, Text) and not _is_in(piece.text, prompt):
                    lost.add(role)
    return lost


def _is_in(text: str, prompt: str) -> bool:
    end = text.strip().rpartition("\n")[2].strip()[-25:]
    return end in prompt or json.dumps(end)[1:-1] in prompt or json.dumps(end, ensure_ascii=False)[1:-1] in prompt


def keeps_sampled_turns(pieces: Sequence[str], expected: str, opening: str) -> bool:
    """Whether the template writes all pieces of a prompt but the turns between them, which stay as they were sampled:
    a template may write a turn that has gone by otherwise, without its thought.

    opening: a generation prompt after a user's message. Each piece ends with it, or with none (behind tool results), or
    with a part; a turn that has gone by may lack it.
    """
    if len(pieces) < 2:
        return False
    *earlier, last = pieces
    first, *others = (_without_opening(piece, opening) for piece in earlier)
    if not (expected.startswith(first) and expected.endswith(last)):
        return False
    at, end = len(first), len(expected) - len(last)
    for piece in others:
        at = expected.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return at <= end


def _without_opening(piece: str, opening: str) -> str:
    """Without the end that the two have in common."""
    pairs = zip(reversed(piece), reversed(opening), strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(piece), len(opening)))
    return piece[: len(piece) - common]
