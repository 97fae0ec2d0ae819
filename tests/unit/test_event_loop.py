"""Long work on the event loop gives others four times as long as it held it, and tasks of one share do so together."""

from __future__ import annotations

import asyncio
import time

import pytest

from gangline.machine import event_loop
from gangline.machine.event_loop import Share, Turn, to_end


@pytest.mark.parametrize(("num_shares", "pauses_s"), [(4, [0.008] * 4), (1, [0.008, 0.018, 0.028, 0.038])])
async def test_four_calls_of_one_session_have_no_more_of_the_loop_than_one(
    monkeypatch: pytest.MonkeyPatch, num_shares: int, pauses_s: list[float]
) -> None:
    now_s, paused_s = 100.0, list[float]()
    shares = [Share() for _ in range(num_shares)]

    async def sleep(duration_s: float) -> None:
        paused_s.append(round(duration_s, 6))

    async def work(number: int) -> None:
        shares[number % num_shares].join()
        await turns[number].give()

    with monkeypatch.context() as stopped:
        stopped.setattr(time, "perf_counter", lambda: now_s)
        turns = [Turn() for _ in range(4)]
        now_s += 0.002
        stopped.setattr(event_loop.asyncio, "sleep", sleep)
        await asyncio.gather(*(asyncio.create_task(work(number)) for number in range(4)))
    assert paused_s == pauses_s


async def test_short_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(_: float) -> None:
        raise AssertionError("it gave way")

    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(event_loop.asyncio, "sleep", sleep)
    await Turn().give()


async def test_work_runs_to_its_end_for_a_caller_that_is_cancelled_and_is_undone_then() -> None:
    may_end, done, undone = asyncio.Event(), list[str](), list[str]()

    async def work() -> str:
        await may_end.wait()
        done.append("made")
        return "made"

    async def undo(made: str) -> None:
        undone.append(made)

    caller = asyncio.create_task(to_end(work(), undo))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller}, timeout=0.05)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (done, undone) == (["made"], ["made"])
    assert await to_end(work(), undo) == "made"
    assert undone == ["made"], "nobody was cancelled"


async def test_work_that_fails_for_a_caller_that_is_cancelled_ends_it_as_cancelled() -> None:
    may_end = asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        raise RuntimeError("it broke")

    async def undo(_made: None) -> None:
        raise AssertionError("there is nothing to undo")

    caller = asyncio.create_task(to_end(work(), undo))
    await asyncio.sleep(0)
    caller.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(RuntimeError, match="it broke"):
        await to_end(work(), undo)
