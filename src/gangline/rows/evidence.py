"""Evidence in a session's texts: one reply quoted in another conversation's beginning, a task handed over in a tool
call.

Texts are compared flat: white space folded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from gangline.domain.completion import Completion
from gangline.domain.conversation import Message, Text, ToolCall, ToolResult, message_text

__all__ = ["TASK_CHARS", "calls_of", "carries", "flat", "opening_of", "quotes", "results_of", "tasks_of"]

_QUOTE_CHARS = 40
"""A reply of so much text does not stand in another conversation's beginning by chance; a summary is longer."""

_EXCERPT_CHARS = 200
"""Likewise, for the lines of a reply: some harnesses cut the summary out of a longer reply."""

TASK_CHARS = 16
"""Likewise, of the prompt that a tool call carries and the answer that comes back, which also stand in their places."""

_COVER = 0.5
"""Part of the longer text that the shorter one must be: a harness puts words around a sub-agent's prompt, and a command
inside a classifier's is something else."""

_SCANNED_CHARS = 50_000
"""Characters scanned at the beginning, and at the end, of a long text."""


def opening_of(root: Completion) -> str:
    """The text before the first reply that a request echoes, tools' results left out."""
    texts: list[str] = []
    for message in root.new_messages:
        if message.role == "assistant":
            break
        if message.role != "tool":
            texts.append(message_text(message))
    return flat(_ends(" ".join(texts)))


def quotes(opening: str, reply: Message, said: str) -> bool:
    """`said`: the reply's text, flat."""
    if len(said) < _QUOTE_CHARS:
        return False
    if said in opening:
        return True
    lines = [line for line in map(flat, message_text(reply).splitlines()) if len(line) >= _QUOTE_CHARS]
    return sum(len(line) for line in lines if line in opening) >= _EXCERPT_CHARS


def tasks_of(root: Completion) -> list[str]:
    """A conversation's first task: each text of its user, and all of them together; clients put reminders beside it."""
    messages = [one for one in root.new_messages if one.role == "user"]
    texts = [flat(part.text) for one in messages for part in one.parts if isinstance(part, Text)]
    return list(dict.fromkeys([*texts, flat(" ".join(map(message_text, messages)))]))


def results_of(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolResult):
                yield flat(_ends("".join(piece.text for piece in part.content if isinstance(piece, Text))))


def calls_of(message: Message) -> list[ToolCall]:
    return [part for part in message.parts if isinstance(part, ToolCall)]


def carries(call: ToolCall, task: str) -> bool:
    """Whether one of a tool call's arguments is the task, or nearly all of it."""
    for value in _strings(_parsed(call.arguments)):
        short, long = sorted((flat(value), task), key=len)
        if len(short) >= max(TASK_CHARS, _COVER * len(long)) and short in long:
            return True
    return False


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _strings(value: Any) -> Iterator[str]:
    """All strings in JSON data."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += list(one.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        elif isinstance(one, list):
            waiting += one


def _ends(text: str) -> str:
    return text if len(text) <= 2 * _SCANNED_CHARS else f"{text[:_SCANNED_CHARS]}\n{text[-_SCANNED_CHARS:]}"


def flat(text: str) -> str:
    return " ".join(text.split())
