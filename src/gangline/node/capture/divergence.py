"""Finds why an observed prompt does not begin with its parent's context: one cause, from ids, text and messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gangline.domain.completion import Completion, CompletionTree, DivergenceCause
from gangline.domain.conversation import Message, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import EngineError
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import Engine
from gangline.node.capture.stitch import ended_itself, has_thought

_MARKER = re.compile(r"<[|｜][^<>\s]{1,60}[|｜]>")
"""Form of the special tokens of nearly all models."""

_WINDOW = 12
"""Ids before the first difference that are decoded too, so that no character is cut."""


async def find_cause(
    engine: Engine,
    tree: CompletionTree,
    parent: Completion,
    echoed: Sequence[Message],
    context: TokenIds,
    prompt: TokenIds,
    first: int,
    *,
    user_turn_follows: bool,
) -> DivergenceCause:
    """Returns the cause of a divergence.

    echoed: the request's messages that correspond to the parent's messages and response.
    context: the parent's prompt and sampled ids. first: index of its first id that `prompt` lacks.
    """
    in_response = first >= tree.num_prompt_ids(parent)
    sampled = (*tree.messages(parent), parent.response)
    pairs = list(zip(sampled, echoed, strict=True))
    if in_response:
        pairs = pairs[-1:]
    end = len(context)
    if ended_itself(parent):  # some templates write a different end of turn than the sampled one
        if first < end - 1:
            end -= 1
        elif len(parent.sampled_ids) > 1 and _says_the_same(*pairs[-1]):
            return "end_of_turn"
    start = max(first - _WINDOW, 0)
    before, after = await _texts(engine, context[start:end], prompt[start:])
    if before and after.startswith(before):
        return "special_token_in_text" if _has_marker(pairs) else "bpe_merge"
    if in_response and parent.certificate.finish_reason in ("length", "abort"):
        return "truncated_turn"
    found = _from_messages(pairs, user_turn_follows)
    if found is None and before and "".join(after.split()).startswith("".join(before.split())):
        return "whitespace"
    return found or "unknown"


async def _texts(engine: Engine, context: TokenIds, prompt: TokenIds) -> tuple[str, str]:
    """Returns both decoded; empty if the engine cannot decode."""
    try:
        return await engine.detokenize(context.tolist()), await engine.detokenize(prompt.tolist())
    except EngineError:
        return "", ""


def _from_messages(pairs: Sequence[tuple[Message, Message]], user_turn_follows: bool) -> DivergenceCause | None:
    assistant = [(sampled, echo) for sampled, echo in pairs if sampled.role == "assistant"]
    # Some templates remove echoed thinking too, at a new user turn.
    if any(has_thought(sampled) and (user_turn_follows or not has_thought(echo)) for sampled, echo in assistant):
        return "thinking_dropped"
    if any("".join(_thoughts(sampled).split()) != "".join(_thoughts(echo).split()) for sampled, echo in assistant):
        return "history_edited"
    if any(_arguments(sampled) != _arguments(echo) or _is_reserialised(sampled) for sampled, echo in assistant):
        return "tool_call_reserialised"
    if _has_marker(pairs):
        return "special_token_in_text"
    if any(
        _text(sampled) != _text(echo)
        or _text(sampled) != _text(sampled).strip()
        or _thoughts(sampled) != _thoughts(echo)
        for sampled, echo in pairs
    ):
        return "whitespace"
    # The call is the same JSON, so the text around it (tags, line breaks) differs.
    return "tool_call_reserialised" if any(_arguments(sampled) for sampled, _ in assistant) else None


def _has_marker(pairs: Sequence[tuple[Message, Message]]) -> bool:
    return any(_MARKER.search(_part_text(part)) for sampled, _ in pairs for part in sampled.parts)


def _part_text(part: Part) -> str:
    match part:
        case Text(text) | Thinking(text):
            return text
        case ToolCall(_, _, arguments):
            return arguments
        case ToolResult(_, content):
            return "".join(piece.text for piece in content if isinstance(piece, Text))
        case _:
            return ""


def _text(message: Message) -> str:
    return "".join(_part_text(part) for part in message.parts if isinstance(part, Text))


def _thoughts(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, Thinking))


def _says_the_same(sampled: Message, echo: Message) -> bool:
    return _text(sampled) == _text(echo) and _arguments(sampled) == _arguments(echo)


def _arguments(message: Message) -> list[str]:
    return [part.arguments for part in message.parts if isinstance(part, ToolCall)]


def _is_reserialised(message: Message) -> bool:
    """Whether a template that parses arguments and writes them again (`tojson`) changes their text."""
    for arguments in _arguments(message):
        try:
            if json.dumps(json.loads(arguments), ensure_ascii=False) != arguments:
                return True
        except (ValueError, RecursionError):
            return False
    return False
