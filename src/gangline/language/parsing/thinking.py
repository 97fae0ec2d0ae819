"""Thinking between `<think>` and `</think>`, at the beginning of a reply."""

from __future__ import annotations

from typing import Literal

from gangline.language.parsing.events import Event, TextEvent, ThinkingEvent, held_length

__all__ = ["THINK", "ThinkTags"]

THINK, _THINK_END = "<think>", "</think>"


class ThinkTags:
    """Splits the block off; one that never closes is thinking to its end. Any tag later on is text."""

    def __init__(self, *, opened: bool = False, always: bool = False) -> None:
        """
        opened: the prompt has opened the block already.
        always: the reply begins inside the block, whether it opens one or not.
        """
        self._state: Literal["start", "inside", "after"] = "inside" if opened and not always else "start"
        self._otherwise: Literal["inside", "after"] = "inside" if always else "after"
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        text, self._held = self._held + text, ""
        if self._state == "start":
            begun = text.lstrip()
            if not begun.startswith(THINK) and THINK.startswith(begun):
                self._held = text
                return []
            self._state = "inside" if begun.startswith(THINK) else self._otherwise
            text = begun[len(THINK) :] if begun.startswith(THINK) else text
        if self._state == "after":
            return [TextEvent(text)] if text else []
        return self._inside(text)

    def _inside(self, text: str) -> list[Event]:
        thought, closed, after = text.partition(_THINK_END)
        if closed:
            self._state = "after"
        else:
            cut = len(text) - held_length(text, _THINK_END)
            thought, self._held = text[:cut], text[cut:]
        events: list[Event] = [ThinkingEvent(thought)] if thought else []
        return [*events, TextEvent(after)] if after else events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if not held:
            return []
        inside = self._state == "inside" or (self._state == "start" and self._otherwise == "inside")
        return [ThinkingEvent(held) if inside else TextEvent(held)]
