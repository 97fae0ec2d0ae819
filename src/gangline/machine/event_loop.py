"""Work on one event loop: long work that gives others their turns, calls that run together, tasks of a session, and
work that is not left halfway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_MAX_HELD_S = 0.001
_PAUSE_PER_HELD_S = 4.0
"""A call of other tasks needs the loop about ten times. If the loop were yielded for only one of these, each would wait
for a turn of the long work, so that work takes a fifth of the loop.
"""


class Share:
    """A share of the event loop used jointly by the long work of several tasks: as much as one task's."""

    def __init__(self) -> None:
        self.free_at_s = 0.0
        """When all assigned turns will be over."""

    def join(self) -> None:
        """Join for the rest of the calling task."""
        _share.set(self)


_share: ContextVar[Share | None] = ContextVar("share", default=None)


class Turn:
    """Measures how long one task has held the event loop since it began or last yielded."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether to call `give`. In a loop over a short conversation this is cheaper than calling it."""
        return time.perf_counter() - self._since_s > _MAX_HELD_S

    async def give(self) -> None:
        """Let other tasks run if the turn is over. Tasks of the same share also wait for each other's turns."""
        now_s = time.perf_counter()
        held_s = now_s - self._since_s
        if held_s > _MAX_HELD_S:
            share = _share.get() or Share()
            begins_at_s = max(now_s, share.free_at_s) + _PAUSE_PER_HELD_S * held_s
            share.free_at_s = begins_at_s + held_s  # the next turn will likely take as long
            await asyncio.sleep(begins_at_s - now_s)
            self._since_s = time.perf_counter()


async def call_all(calls: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run the calls concurrently. The first failure cancels the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def is_cancelled() -> bool:
    """Whether the current task is being cancelled. A CancelledError may also come from a plug-in's code."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_fault(error: BaseException) -> bool:
    """Whether an error should be handled here, as a plug-in's SystemExit should: it does not end the current task or
    the process.
    """
    return not is_cancelled() and not isinstance(error, (KeyboardInterrupt, GeneratorExit))


async def to_end(
    work: Coroutine[Any, Any, ResultT], undo: Callable[[ResultT], Awaitable[None]] | None = None
) -> ResultT:
    """Run `work` to its end, even if the caller is cancelled meanwhile: then the cancellation waits for it.

    undo: called with the result if the caller was cancelled.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None and undo is not None:
            await undo(task.result())
        raise


def session_task(session_id: str, work_name: str, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """Start a task of a session under a name by which a look at hung sessions finds it."""
    return asyncio.create_task(_contained(work), name=f"session.{session_id} {work_name}")


async def _contained(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result. A plug-in's SystemExit would end the node from its own task."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
