"""Llama 3's tool calls: a reply that is nothing but JSON, `{"name": ..., "parameters": {...}}`, several behind `;`."""

from __future__ import annotations

import json
from typing import Literal

from gangline.models.language.parsing.events import Event, Schemas, TextEvent
from gangline.models.language.parsing.json_calls import whole_objects

__all__ = ["LlamaJson"]

_PYTHON_TAG = "<|python_tag|>"


class LlamaJson:
    """Nothing closes a call, so a reply that begins like one is held back to its end."""

    def __init__(self, schemas: Schemas) -> None:
        self.num_broken = 0
        self._schemas = schemas
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
        calls = whole_objects(held.removeprefix(_PYTHON_TAG), self._schemas)
        if calls:
            return list[Event](calls)
        # JSON without the tag may be the answer itself.
        self.num_broken += held.startswith(_PYTHON_TAG) or _names_one(held, self._schemas)
        return self._released()

    def _released(self) -> list[Event]:
        held = "".join(self._held)
        self._held.clear()
        return [TextEvent(held)] if held else []


def _names_one(text: str, names: Schemas) -> bool:
    return text.lstrip().startswith("{") and any(json.dumps(name) in text for name in names)
