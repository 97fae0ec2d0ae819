"""Llama 3's tool calls: a reply that is nothing but JSON, `{"name": ..., "parameters": {...}}`, several behind `;`."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from gangline.language.parsing.events import CallEvent, Event, Schemas, TextEvent

__all__ = ["LlamaJson"]

_PYTHON_TAG = "<|python_tag|>"


class LlamaJson:
    """Nothing closes a call, so a reply that begins like one is held back to its end."""

    def __init__(self, schemas: Schemas) -> None:
        self.num_broken = 0
        self._names = frozenset(schemas)
        self._held: list[str] = []
        self._state: Literal["start", "call", "text"] = "start"

    def feed(self, text: str) -> list[Event]:
        if self._state == "text":
            return [TextEvent(text)]
        self._held.append(text)
        if self._state == "start":
            begun = "".join(self._held).lstrip()
            if begun.startswith(("{", _PYTHON_TAG)):
                self._state = "call"
            elif not _PYTHON_TAG.startswith(begun):
                self._state = "text"
                return self._released()
        return []

    def finish(self) -> list[Event]:
        held = "".join(self._held).strip()
        calls = _read(held.removeprefix(_PYTHON_TAG))
        if calls:
            return list[Event](calls)
        # JSON without the tag may be the answer itself.
        self.num_broken += held.startswith(_PYTHON_TAG) or _names_one(held, self._names)
        return self._released()

    def _released(self) -> list[Event]:
        held = "".join(self._held)
        self._held.clear()
        return [TextEvent(held)] if held else []


class _Call(msgspec.Struct):
    name: str
    parameters: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()


def _read(text: str) -> list[CallEvent]:
    """Empty when any of it is no call."""
    calls: list[CallEvent] = []
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        try:
            _, end = decoder.raw_decode(rest)
            call = msgspec.json.decode(rest[:end], type=_Call)
            arguments = bytes(call.parameters) or bytes(call.arguments) or b"{}"
            msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return []
        calls.append(CallEvent(call.name, arguments.decode()))
        rest = rest[end:].strip().removeprefix(";").lstrip()
    return calls


def _names_one(text: str, names: frozenset[str]) -> bool:
    return text.lstrip().startswith("{") and any(json.dumps(name) in text for name in names)
