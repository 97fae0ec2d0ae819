"""The gate: who waits, who is let through, whose clock stands still."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import token_ids
from gangline.models.engines.contract import EngineChoice, assistant_message
from gangline.node.backends.gate import ABANDONED_S, Gate, GateMeter
from gangline.node.capture.recorder import VersionStamps


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Call:
    """One that passes the gate and stays in flight until it is let go."""

    def __init__(self, gate: Gate, meter: GateMeter | None = None) -> None:
        self.passed = asyncio.Event()
        self.let_go = asyncio.Event()
        self.task = asyncio.create_task(self._run(gate, meter))

    async def _run(self, gate: Gate, meter: GateMeter | None) -> None:
        async with gate.pass_through(meter):
            self.passed.set()
            await self.let_go.wait()

    async def end(self) -> None:
        self.let_go.set()
        await self.task


async def _turn() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_open_gate_holds_nobody() -> None:
    gate = Gate()
    call = Call(gate)
    await _turn()
    assert call.passed.is_set()
    assert (gate.state.is_paused, gate.state.num_in_flight) == (False, 1)
    await call.end()
    assert gate.state.num_in_flight == 0


async def test_a_drain_waits_for_calls_in_flight_and_holds_new_ones_until_resumed() -> None:
    gate = Gate()
    old = Call(gate)
    await _turn()
    pausing = asyncio.create_task(gate.pause("drain", 600))
    await _turn()
    new = Call(gate)
    await _turn()
    assert not pausing.done()
    assert not new.passed.is_set()
    assert (gate.state.num_waiting, gate.state.is_drained) == (1, False)
    await old.end()
    assert (await pausing).is_drained
    gate.set_version(7)
    gate.resume()
    await _turn()
    assert new.passed.is_set()
    assert gate.state.version == 7
    await new.end()


async def test_keep_leaves_calls_in_flight_alone() -> None:
    gate = Gate()
    old = Call(gate)
    await _turn()
    state = await gate.pause("keep", 600)
    assert (state.is_paused, state.mode, state.num_in_flight) == (True, "keep", 1)
    gate.resume()
    await old.end()


async def test_a_lease_that_runs_out_opens_the_gate() -> None:
    gate = Gate()
    stuck = Call(gate)
    await _turn()
    state = await gate.pause("drain", 0.01)  # the drain ends with the lease, not with the call
    assert not state.is_paused
    assert state.num_expired_leases == 1
    await stuck.end()


async def test_pausing_again_renews_the_lease() -> None:
    clock = Clock()
    gate = Gate(clock)
    await gate.pause("keep", 100)
    clock.now = 60
    assert gate.state.lease_left_s == 40
    assert (await gate.pause("keep", 100)).lease_left_s == 100
    gate.resume()
    assert gate.state.lease_left_s is None


async def test_a_waiting_call_that_is_cancelled_leaves_no_trace() -> None:
    gate, meter = Gate(), GateMeter()
    await gate.pause("keep", 600)
    call = Call(gate, meter)
    await _turn()
    call.task.cancel()
    await asyncio.wait({call.task})
    assert (gate.state.num_waiting, gate.state.num_in_flight) == (0, 0)
    gate.resume()


@pytest.mark.parametrize(("mode", "lease_s"), [("abort", 5), ("drain", 0), ("keep", -1), ("keep", float("nan"))])
async def test_a_wrong_pause_is_refused_and_the_gate_stays_open(mode: str, lease_s: float) -> None:
    gate = Gate()
    with pytest.raises(InvalidRequest):
        await gate.pause(mode, lease_s)  # type: ignore[arg-type]
    assert not gate.state.is_paused


async def test_versions_do_not_go_back() -> None:
    gate = Gate()
    gate.set_version(3)
    with pytest.raises(InvalidRequest, match="must not go back"):
        gate.set_version(2)


async def test_a_sessions_clock_stands_still_while_its_calls_wait_and_counts_them_once() -> None:
    clock = Clock()
    gate, meter, other = Gate(clock), GateMeter(clock), GateMeter(clock)
    await gate.pause("drain", 600)
    calls = [Call(gate, meter), Call(gate, meter)]
    await _turn()
    clock.now = 30
    assert (meter.held_s, other.held_s) == (30, 0)
    gate.resume()
    await _turn()
    clock.now = 50
    assert meter.held_s == 30
    for call in calls:
        await call.end()


async def test_kept_calls_are_held_too_and_drained_ones_are_not() -> None:
    clock = Clock()
    gate, meter = Gate(clock), GateMeter(clock)
    call = Call(gate, meter)
    await _turn()
    await gate.pause("keep", 600)
    clock.now = 10
    gate.resume()
    assert meter.held_s == 10
    draining = asyncio.create_task(gate.pause("drain", 600))
    await _turn()
    clock.now = 20
    assert meter.held_s == 10
    await call.end()
    await draining
    gate.resume()


async def test_a_budget_does_not_pass_while_the_session_is_held() -> None:
    gate, meter = Gate(), GateMeter()
    await gate.pause("keep", 600)
    call = Call(gate, meter)
    await _turn()
    budget = asyncio.create_task(meter.elapse(0.01))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(budget), 0.1)
    gate.resume()
    await budget
    await call.end()


def choice(num_ids: int, **fields: Any) -> EngineChoice:
    message = assistant_message("", "")
    ids = token_ids(range(num_ids))
    return EngineChoice(index=0, message=message, finish_reason="stop", sampled_ids=ids, logprobs=None, **fields)


def test_tokens_are_stamped_with_the_version_they_came_under() -> None:
    gate = Gate()
    stamps = VersionStamps(gate)
    gate.set_version(1)
    stamps.begin()
    stamps.saw(0, 2)
    stamps.saw(0, 1)
    gate.set_version(2)
    stamps.saw(0, 4)
    assert [(span.version, span.start, span.end) for span in stamps.spans(choice(7))] == [(1, 0, 3), (2, 3, 7)]


def test_a_reply_in_one_piece_has_the_version_it_was_begun_under() -> None:
    gate = Gate()
    stamps = VersionStamps(gate)
    assert stamps.spans(choice(5)) == ()
    gate.set_version(1)
    stamps.begin()
    gate.set_version(2)
    assert [(span.version, span.start, span.end) for span in stamps.spans(choice(5))] == [(1, 0, 5)]
    assert stamps.spans(choice(5, weights_known=False)) == ()


async def test_a_drain_that_takes_long_answers_how_far_it_is_and_stays_closed() -> None:
    gate = Gate()
    call = Call(gate)
    await _turn()
    state = await gate.pause("drain", 600, wait_s=0.01)
    assert (state.is_paused, state.is_drained, state.num_in_flight) == (True, False, 1)
    asking_again = asyncio.create_task(gate.pause("drain", 600, wait_s=60))
    await call.end()
    assert (await asking_again).is_drained


async def test_a_drain_that_nobody_waits_for_any_more_opens_soon_unless_it_is_asked_for_again() -> None:
    clock = Clock()
    gate = Gate(clock)
    call = Call(gate)
    await _turn()
    vanished = asyncio.create_task(gate.pause("drain", 600))
    await _turn()
    vanished.cancel()
    await asyncio.wait({vanished})
    assert (gate.state.is_paused, gate.state.lease_left_s) == (True, ABANDONED_S)
    asking_again = asyncio.create_task(gate.pause("drain", 600))
    await _turn()
    assert gate.state.lease_left_s == 600
    late = asyncio.create_task(gate.pause("drain", 400))
    await _turn()
    asking_again.cancel()  # another pause holds the gate by now
    await asyncio.wait({asking_again})
    assert gate.state.lease_left_s == 400
    await call.end()
    assert (await late).is_drained


async def test_an_abandoned_drain_never_lengthens_its_lease_nor_closes_an_open_gate() -> None:
    gate = Gate(Clock())
    call = Call(gate)
    await _turn()
    vanished = asyncio.create_task(gate.pause("drain", 5))
    await _turn()
    vanished.cancel()
    await asyncio.wait({vanished})
    assert gate.state.lease_left_s == 5
    vanished = asyncio.create_task(gate.pause("drain", 600))
    await _turn()
    gate.resume()
    vanished.cancel()
    await asyncio.wait({vanished})
    assert not gate.state.is_paused
    await call.end()


async def test_the_gate_tells_how_long_it_was_closed_and_how_long_calls_waited() -> None:
    clock = Clock()
    gate = Gate(clock)
    await gate.pause("keep", 600)
    calls = [Call(gate), Call(gate)]
    await _turn()
    clock.now = 2.0
    await gate.pause("keep", 600)
    clock.now = 3.0
    assert (gate.closed_s, gate.waited_s) == (3.0, 0.0)
    gate.resume()
    await _turn()
    clock.now = 9.0
    assert (gate.closed_s, gate.waited_s) == (3.0, 6.0)
    for call in calls:
        await call.end()
