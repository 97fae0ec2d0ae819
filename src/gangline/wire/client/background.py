"""Runs asynchronous code for a synchronous caller, on an event loop in a background thread.

with InBackground(connect) as service:
    groups = service.run(lambda connection: connection.collector.collect(2))
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class InBackground(Generic[T]):
    """Holds the value of `connect` open on the background loop until the block ends.

    A single task enters and exits it, so it may contain task groups and timeouts. Can be entered once.
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._connect = connect
        self._opened = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, T]]()
        self._ended = Future[None]()

    def __enter__(self) -> Self:
        """Raises: the errors of `connect`."""
        # A daemon thread: an interrupted caller does not wait for a connection that never comes.
        threading.Thread(target=self._live_in_thread, name="gangline-background", daemon=True).start()
        self._opened.result()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Raises: errors raised on closing."""
        loop, left, _ = self._opened.result()
        with suppress(RuntimeError):  # the loop is closed: it ended before, and its result says why
            loop.call_soon_threadsafe(left.set)
        self._ended.result()

    def run(self, call: Callable[[T], Coroutine[Any, Any, R]]) -> R:
        """Run `call(value)` on the background loop and wait for its result.

        An interrupt of the caller cancels it. Raises: its errors; RuntimeError outside of the block.
        """
        if not self._opened.done() or self._ended.done():
            raise RuntimeError("enter it first, and call within: `with ... as service:`")
        loop, _, value = self._opened.result()
        future = asyncio.run_coroutine_threadsafe(call(value), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _live_in_thread(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # every error is passed to the other thread
            if not self._opened.done():
                self._opened.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _live(self) -> None:
        left = asyncio.Event()
        async with self._connect() as value:
            self._opened.set_result((asyncio.get_running_loop(), left, value))
            await left.wait()
