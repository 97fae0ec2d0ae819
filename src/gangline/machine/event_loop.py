"""Work on one event loop: long work that gives others their turns, calls that run together, tasks of a session, and
work that is not left halfway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["Share", "Turn", "call_all", "is_cancelled", "is_fault", "session_task", "to_end"]

ResultT = TypeVar("ResultT")

_MAX_HELD_S = 0.001
_PAUSE_PER_HELD_S = 4.0
"""A call of others needs the loop about ten times. Were it given back for one of these only, each would wait for a turn
of the long work; so that work takes a fifth of the loop."""


class Share:
    """The part of the event loop that the long work of several tasks has together: as much as that of one."""

    def __init__(self) -> None:
        self.free_at_s = 0.0
        """When the turns that are given out are over."""

    def join(self) -> None:
        """For the rest of the calling task."""
        _share.set(self)


_share: ContextVar[Share | None] = ContextVar("share", default=None)


class Turn:
    """The time for which one task has held the event loop since it began or last gave way."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether to call `give`. Costs less than a call of that in a loop over a short conversation."""
        return time.perf_counter() - self._since_s > _MAX_HELD_S

    async def give(self) -> None:
        """Let the others run where the turn is over. Tasks of one share wait for each other's turns as well."""
        now_s = time.perf_counter()
        held_s = now_s - self._since_s
        if held_s > _MAX_HELD_S:
            share = _share.get() or Share()
            begins_at_s = max(now_s, share.free_at_s) + _PAUSE_PER_HELD_S * held_s
            share.free_at_s = begins_at_s + held_s  # the next turn will be about as long
            await asyncio.sleep(begins_at_s - now_s)
            self._since_s = time.perf_counter()


async def call_all(calls: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run them together, owned: the first failure cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def is_cancelled() -> bool:
    """Whether somebody cancels the present task. A CancelledError may also come out of the work of a plug-in."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_fault(error: BaseException) -> bool:
    """Whether an error is to be dealt with here, as a plug-in's SystemExit is: not the end of the present task, nor of
    the process."""
    return not is_cancelled() and not isinstance(error, (KeyboardInterrupt, GeneratorExit))


async def to_end(
    work: Coroutine[Any, Any, ResultT], undo: Callable[[ResultT], Awaitable[None]] | None = None
) -> ResultT:
    """Run `work` to its end, also where the caller is cancelled meanwhile: then the cancellation waits for it.

    undo: called with what it made for a caller that was cancelled.
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
    """The result. A plug-in's SystemExit would end the node from a task of its own."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
