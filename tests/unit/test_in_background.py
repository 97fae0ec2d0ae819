"""An event loop in its own thread: what is open there, what fails there, what goes on there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager

import pytest

from gangline.wire.client.background import InBackground


@asynccontextmanager
async def counter(events: list[str]) -> AsyncGenerator[asyncio.Queue[int]]:
    """Counts by itself; the group and the timeout want to be left by the task that entered them."""
    events.append("opened")
    numbers = asyncio.Queue[int](maxsize=1)

    async def count() -> None:
        number = 0
        while True:
            await numbers.put(number)
            number += 1

    try:
        async with asyncio.timeout(None), asyncio.TaskGroup() as group:
            counting = group.create_task(count())
            yield numbers
            counting.cancel()
    finally:
        events.append("closed")


def test_what_was_opened_goes_on_between_calls_and_is_closed_at_the_end() -> None:
    events = list[str]()
    with InBackground(lambda: counter(events)) as service:
        assert events == ["opened"]
        assert [service.run(lambda numbers: numbers.get()) for _ in range(3)] == [0, 1, 2]
    assert events == ["opened", "closed"]


def test_what_fails_there_is_raised_here_and_the_connection_stays() -> None:
    async def fail(_numbers: asyncio.Queue[int]) -> None:
        raise LookupError("nothing there")

    with InBackground(lambda: counter([])) as service:
        with pytest.raises(LookupError, match="nothing there"):
            service.run(fail)
        assert service.run(lambda numbers: numbers.get()) == 0


def test_what_cannot_be_opened_is_raised_on_entering() -> None:
    @asynccontextmanager
    async def refused() -> AsyncGenerator[None]:
        raise ConnectionError("refused")
        yield

    with pytest.raises(ConnectionError, match="refused"), InBackground(refused):
        pass


def test_a_connection_that_breaks_ends_the_calls_and_says_why_on_leaving() -> None:
    @asynccontextmanager
    async def broken() -> AsyncGenerator[asyncio.Event]:
        breaking = asyncio.Event()

        async def break_it() -> None:
            await breaking.wait()
            raise ConnectionError("lost")

        async with asyncio.TaskGroup() as group:
            group.create_task(break_it())
            yield breaking

    async def wait_for_ever(breaking: asyncio.Event) -> None:
        breaking.set()
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failed, InBackground(broken) as service, pytest.raises(CancelledError):
        service.run(wait_for_ever)
    assert failed.group_contains(ConnectionError, match="lost")


def test_there_are_no_calls_outside_of_the_block() -> None:
    service = InBackground(lambda: counter([]))

    def call() -> None:
        with pytest.raises(RuntimeError, match="enter it first"):
            service.run(lambda numbers: numbers.get())

    call()
    with service:
        pass
    call()
