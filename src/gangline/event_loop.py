"""Work on one event loop: long work that gives others their turns, and calls that run together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

__all__ = ["Turn", "call_all"]

ResultT = TypeVar("ResultT")

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


async def call_all(calls: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run them together, owned: the first failure cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
