"""A parser's events, and the rules for holding text back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TextEvent:
    text: str


@dataclass(frozen=True)
class ThinkingEvent:
    text: str


@dataclass(frozen=True)
class CallEvent:
    name: str
    arguments: str
    """JSON text of an object, byte for byte as sampled if the format is JSON."""
    call_id: str | None = None
    """An id contained in the text itself, such as Kimi's `functions.look:0`."""


Event = TextEvent | ThinkingEvent | CallEvent

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its arguments."""


class CallFormat(Protocol):
    """Parses tool calls from text in arbitrary pieces."""

    num_broken: int
    """Number of calls that were started but could not be parsed; they were emitted as text."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The text held back so far. Called once, after the last text."""
        ...


def held_length(text: str, markers: str | Sequence[str]) -> int:
    """Length of the longest suffix of `text` that could still become one of `markers`."""
    known = (markers,) if isinstance(markers, str) else markers
    longest = min(len(text), max((len(marker) for marker in known), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in known):
            return length
    return 0
