"""Messages as a fork compares them: field by field, without values that may differ between two runs.

An assistant's turn is compared by its meaning, as when a call is placed, since clients echo it in their own form.
Everything else is compared exactly, except for volatile text, values that the harness's rules tolerate, and white space
around a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from gangline.domain.conversation import Document, Image, Message, Part, Text, Thinking, ToolCall, ToolResult
from gangline.node.capture.meaning import VolatileText, calls_of, is_echo, said_by
from gangline.rows.forks.tolerance import Tolerance

Field = tuple[str, Any]
_SHOWN_CHARS = 80


class Forms(NamedTuple):
    """The rules of one session."""

    volatile: VolatileText
    tolerance: Tolerance

    def fields(self, message: Message, call_ids: list[str]) -> tuple[Field, ...]:
        """`call_ids`: ids of the tool calls before the message; the message's own are appended."""
        if message.role == "assistant":
            call_ids += [part.call_id for part in message.parts if isinstance(part, ToolCall)]
            return (("role", "assistant"), ("text", said_by(message)), ("tool calls", calls_of(message)))
        fields: list[Field] = [("role", message.role), ("name", message.name)]
        for number, part in enumerate(message.parts):
            fields += self._of_part(f"parts[{number}]", message.role, part, call_ids)
        return tuple(fields)

    def _of_part(self, at: str, role: str, part: Part, call_ids: list[str]) -> Iterator[Field]:
        match part:
            case Text():
                yield f"{at}.text", self._text(role, part.text)
            case ToolResult():
                # Clients may rename calls, so the position among the calls counts.
                yield f"{at}.call", call_ids.index(part.call_id) if part.call_id in call_ids else part.call_id
                yield f"{at}.is_error", part.is_error
                for number, piece in enumerate(part.content):
                    yield from self._of_part(f"{at}.content[{number}]", role, piece, call_ids)
            case Image() | Document() | Thinking() | ToolCall():
                yield f"{at}.{type(part).__name__.lower()}", msgspec.to_builtins(part)

    def _text(self, role: str, text: str) -> str:
        if role in ("system", "developer"):
            return self.volatile.without(text).strip()
        return self.tolerance.without(text).strip()


def echoes(message: Message, sampled: Message) -> bool:
    """Whether an assistant's turn is an echo of `sampled` by a client that cannot carry all of it."""
    says_same = said_by(message) in ("", said_by(sampled))
    return says_same and bool(calls_of(sampled)) and is_echo(calls_of(message), calls_of(sampled))


def difference(recorded: tuple[Field, ...], given: tuple[Field, ...]) -> tuple[str, str, str]:
    """Returns the first field that differs, with excerpts of its recorded and its given value around the difference."""
    theirs, own = dict(recorded), dict(given)
    name = next((name for name in (*theirs, *own) if theirs.get(name, "") != own.get(name, "")), "")
    return name, *excerpts(theirs.get(name, ""), own.get(name, ""))


def excerpts(recorded: Any, given: Any) -> tuple[str, str]:
    a, b = (value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in (recorded, given))
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, start - _SHOWN_CHARS // 4)
    return a[start : start + _SHOWN_CHARS], b[start : start + _SHOWN_CHARS]
