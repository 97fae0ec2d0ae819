"""Turns of an event loop: work that takes long gives the others theirs in between."""

from __future__ import annotations

import asyncio
import time

__all__ = ["Turn"]

_MAX_HELD_S = 0.001


class Turn:
    """What one task has held the event loop for, since it began or last gave way."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether to call `give`. Costs less than a call of that in a loop over a short conversation."""
        return time.perf_counter() - self._since_s > _MAX_HELD_S

    async def give(self) -> None:
        """Let the others run where the turn is over."""
        if self.is_over:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
