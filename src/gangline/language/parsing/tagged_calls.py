"""Tool calls between `<tool_call>` and `</tool_call>`, in the formats of several model families.

- `hermes`: `{"name": ..., "arguments": {...}}` (Hermes, Qwen2.5, Qwen3)
- `qwen3_coder`: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`
- `glm`: `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...` (GLM-4.5 and later)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gangline.language.parsing.events import CallEvent, Event, Schemas, TextEvent, held_length
from gangline.language.parsing.values import arguments_text

__all__ = ["CALL", "BodyReader", "TaggedCalls", "read_glm", "read_hermes", "read_qwen3_coder"]

CALL, _CALL_END = "<tool_call>", "</tool_call>"

BodyReader = Callable[[str, Schemas], CallEvent | None]
"""The text between the tags -> the call; None when it is none."""


class TaggedCalls:
    """A call comes out whole when its tag closes: only then is it known to be one. Else it stays text, tags and all."""

    def __init__(self, read: BodyReader, schemas: Schemas, *, shows_its_end: bool = True) -> None:
        """shows_its_end: a body of this format is known to be whole without the tag."""
        self.num_broken = 0
        self._read = read
        self._shows_its_end = shows_its_end
        self._schemas = schemas
        self._held = ""
        self._body: list[str] = []
        """Body of the open call, without the withheld text. Looked at when it closes: a call may be a whole file."""
        self._in_call = False
        self._after_call = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while True:
            before, tag, rest = self._held.partition(_CALL_END if self._in_call else CALL)
            if not tag:
                return [*events, *self._release()]
            events.extend(self._close(before + tag) if self._in_call else self._text(before))
            self._held = rest
            self._in_call = not self._in_call

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._in_call:  # a model may stop right after the call
            return self._close(held)
        return self._text(held)

    def _release(self) -> list[Event]:
        """Release text that cannot be the beginning of a tag any more."""
        if self._in_call:
            cut = len(self._held) - held_length(self._held, _CALL_END)
            self._body.append(self._held[:cut])
            self._held = self._held[cut:]
            return []
        cut = len(self._held) - held_length(self._held, CALL)
        if self._after_call and not self._held[:cut].strip():
            return []
        text, self._held = self._held[:cut], self._held[cut:]
        return self._text(text)

    def _text(self, text: str) -> list[Event]:
        if not text or (self._after_call and not text.strip()):
            return []
        self._after_call = False
        return [TextEvent(text)]

    def _close(self, body: str) -> list[Event]:
        body = "".join(self._body) + body
        self._body.clear()
        is_whole = self._shows_its_end or body.endswith(_CALL_END)
        call = self._read(body.removesuffix(_CALL_END), self._schemas) if is_whole else None
        self._after_call = call is not None
        if call is None:
            self.num_broken += 1
            return [TextEvent(CALL + body)]
        return [call]


class _HermesBody(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


def read_hermes(body: str, schemas: Schemas) -> CallEvent | None:
    try:
        call = msgspec.json.decode(body.strip(), type=_HermesBody)
        msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    return CallEvent(call.name, bytes(call.arguments).decode())


def read_qwen3_coder(body: str, schemas: Schemas) -> CallEvent | None:
    head, opened, rest = body.strip().partition(">")
    name = head.removeprefix("<function=").strip()
    if not opened or not head.startswith("<function=") or not name or not rest.endswith("</function>"):
        return None
    return _call(name, _pairs(rest.removesuffix("</function>"), "<parameter=", ">", "", "</parameter>"), schemas)


def read_glm(body: str, schemas: Schemas) -> CallEvent | None:
    head, opened, rest = body.partition("<arg_key>")
    name = head.strip()
    if not name or any(char in name for char in "<>{}\n"):
        return None
    return _call(name, _pairs(opened + rest, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), schemas)


class _Malformed(Exception):
    pass


def _pairs(text: str, before_key: str, after_key: str, before_value: str, end: str) -> Iterator[tuple[str, str]]:
    """Keys and values, one after the other. Raises: _Malformed when there is anything else but white space."""
    text = text.strip()
    while text:
        key, has_key, rest = text.removeprefix(before_key).partition(after_key)
        value, has_end, left = rest.lstrip("\n").partition(end) if before_value else rest.partition(end)
        if not (text.startswith(before_key) and has_key and has_end and value.startswith(before_value)):
            raise _Malformed
        value = value.removeprefix(before_value)
        # Without a tag of its own, a value has a line break on either side that belongs to the format.
        yield key.strip(), value if before_value else value.removeprefix("\n").removesuffix("\n")
        text = left.strip()


def _call(name: str, pairs: Iterator[tuple[str, str]], schemas: Schemas) -> CallEvent | None:
    try:
        values = dict(pairs)
    except _Malformed:
        return None
    return CallEvent(name, arguments_text(values.items(), schemas.get(name)))
