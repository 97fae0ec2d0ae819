"""Turns of an event loop: work that takes long gives the others theirs in between."""

from __future__ import annotations

import asyncio
import time

__all__ = ["Turn"]

_MAX_HELD_S = 0.001
_PAUSE_PER_HELD_S = 4.0
"""A call of others needs the loop about ten times. Were it given back for one of these only, each would wait for a turn
of the long work; so that work takes a fifth of the loop."""


class Turn:
    """The time for which one task has held the event loop since it began or last gave way."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether to call `give`. Costs less than a call of that in a loop over a short conversation."""
        return time.perf_counter() - self._since_s > _MAX_HELD_S

    async def give(self) -> None:
        """Let the others run where the turn is over."""
        held_s = time.perf_counter() - self._since_s
        if held_s > _MAX_HELD_S:
            await asyncio.sleep(_PAUSE_PER_HELD_S * held_s)
            self._since_s = time.perf_counter()
