"""The meaning of a message, for comparing histories: arguments as parsed JSON, normalised white space in sampled text,
without thinking, tool-call ids and volatile system text.

Volatile system text is text that a client renews in every request, such as the time of day or a billing line. It would
make every call a new conversation. It is ignored when a call is placed, and the engine receives the text of the
conversation's first call. The record keeps the client's own text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from gangline.domain.conversation import Document, Image, Message, Text, ToolCall, ToolResult

USUAL_RULES = (
    r"x-anthropic-billing-header:[^\n]*",
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
    r"(?:[Tt]oday's|[Cc]urrent) (?:[Dd]ate|[Tt]ime)[^\n]{0,120}",
    r"\d{1,2}:\d{2}(?::\d{2})?(?: ?[AaPp][Mm]\b)?",
)
"""Rules for tasks that set none: a client's billing line, dates, times."""


class VolatileText:
    """The rules of one session."""

    def __init__(self, rules: Iterable[str] | None = None) -> None:
        """`rules`: regular expressions, searched for in the text of system messages; None: the default ones."""
        self.rules = tuple(USUAL_RULES if rules is None else rules)
        self._patterns = [re.compile(rule) for rule in self.rules]

    def without(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub("", text)
        return text

    def has_more_than(self, limit: int, message: Message) -> bool:
        """Whether any single rule matches more than `limit` pieces in the original text of a system message."""
        if message.role not in ("system", "developer"):
            return False
        text = "\n".join(part.text for part in message.parts if isinstance(part, Text))
        return any(next(islice(pattern.finditer(text), limit, None), None) is not None for pattern in self._patterns)

    def found_in(self, message: Message) -> Sequence[str]:
        """Returns the volatile pieces of a system message, rule by rule; empty for other messages."""
        if message.role not in ("system", "developer"):
            return ()
        found: list[str] = []
        for text in (part.text for part in message.parts if isinstance(part, Text)):
            for pattern in self._patterns:
                found += (match.group() for match in pattern.finditer(text))
                text = pattern.sub("", text)
        return found


def normal_form(message: Message, volatile: VolatileText) -> bytes:
    """Returns equal bytes for messages with the same meaning."""
    role = "system" if message.role == "developer" else message.role
    if role == "assistant":
        return msgspec.json.encode((role, said_by(message), calls_of(message)))
    text = "\n".join(_piece(part) for part in message.parts if isinstance(part, (Text, Image, Document)))
    results = [_joined(part.content) for part in message.parts if isinstance(part, ToolResult)]
    text = volatile.without(text) if role == "system" else text
    return msgspec.json.encode((role, message.name, text.strip(), results))


def said_by(message: Message) -> str:
    """Returns an assistant's text with normalised white space."""
    return " ".join("".join(part.text for part in message.parts if isinstance(part, Text)).split())


def calls_of(message: Message) -> list[tuple[str, str]]:
    """Returns name and normalised arguments of each tool call."""
    return [(part.name, _normal_json(part.arguments)) for part in message.parts if isinstance(part, ToolCall)]


def is_echo(calls: list[tuple[str, str]], sampled: list[tuple[str, str]]) -> bool:
    """Whether `calls` equal `sampled`, allowing for dialects that carry only JSON objects as arguments."""
    return len(calls) == len(sampled) and all(
        name == own_name and (arguments == own or (arguments == "{}" and not _is_object(own)))
        for (name, arguments), (own_name, own) in zip(calls, sampled, strict=True)
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(_json.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def _joined(pieces: Iterable[Text | Image | Document]) -> str:
    return "\n".join(map(_piece, pieces)).strip()


def _piece(piece: Text | Image | Document) -> str:
    """Returns its text, or a placeholder for media."""
    return piece.text if isinstance(piece, Text) else f"\0{type(piece).__name__}\0{piece.url}"


def _normal_json(text: str) -> str:
    """Returns JSON sorted, without white space, with `1.0` as `1` (as JavaScript writes it). Only white space changes
    in text that is not valid JSON."""
    try:
        return _sorted_json.encode(_json.decode(text or "{}"))
    except (ValueError, RecursionError):
        return " ".join(text.split())


def _number(text: str) -> Any:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# Created once: the module's functions create a new one per call when given options.
_json = json.JSONDecoder(parse_float=_number)
_sorted_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
