"""A weight update by phase: what a node's gate saw of it, what the trainer reported, and the phase that took most."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from gangline.cli.terminal.views import node_state, slow_updates
from gangline.domain.errors import Conflict
from gangline.domain.views import NodeView
from gangline.domain.weight_updates import advice_on_phases, slowest_phase
from gangline.node.backends.gate import Gate
from gangline.node.backends.gate_updates import GateUpdates
from gangline.node.health.metrics import NodeMetrics, NodeNow

PROFILED = {"offload_before_refit": 227.3, "broadcast": 1.7, "load": 1.5}
"""The phases of a refit of 231 seconds, by a trainer's own profiler."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def now_of(gate: Gate) -> NodeNow:
    return NodeNow(stages={}, sizes={}, num_external=0, backends=(), gate=gate)


def heard_of(gate: Gate) -> NodeView:
    said: Any = {"node_id": "n", "url": "", "capacity": 1, "draining": False, "num_sessions": 0}
    return NodeView(**said, metrics=now_of(gate).troubles(), first_seen_at=0, last_seen_at=0, age_s=0.0)


async def refit(gate: Gate, clock: Clock, *, drain_s: float, held_s: float) -> None:
    """As a trainer does it that knows the gate alone: pause, drain, its own work, resume. One call is in flight."""
    call = gate.pass_through()
    await call.__aenter__()
    pausing = asyncio.create_task(gate.pause("drain"))
    await asyncio.sleep(0)
    clock.now += drain_s
    await call.__aexit__(None, None, None)
    assert (await pausing).is_drained
    clock.now += held_s
    gate.resume()


async def test_227_of_231_seconds_in_one_phase_are_found_whether_the_trainer_reports_or_not() -> None:
    clock = Clock()
    gate = Gate(clock)
    await refit(gate, clock, drain_s=0.5, held_s=230.5)
    (seen,) = gate.updates.last
    assert (seen.mode, seen.version, seen.has_expired) == ("drain", None, False)
    assert seen.phases == {"drain": 0.5, "held": 230.5}
    assert advice_on_phases(seen.phases) == (
        "230.5 of the 231.0 seconds of a weight update were the phase held: the trainer held the gate closed; it can "
        "report its own phases to POST /v1/gate/phases"
    )
    gate.updates.report(PROFILED)
    (seen,) = gate.updates.last
    assert seen.phases == pytest.approx({"drain": 0.5, **PROFILED, "unreported": 0.0})
    assert advice_on_phases(seen.phases) == (
        "227.3 of the 231.0 seconds of a weight update were the phase offload_before_refit: by the trainer's own report"
    )
    node = heard_of(gate)
    assert slow_updates([node]) == ["n: offload_before_refit took 227 of the 231 s of its last weight update"]
    assert node_state(node) == "up"
    assert slow_updates([heard_of(Gate())]) == []
    text = NodeMetrics().exposition(now_of(gate)).decode()
    assert 'gangline_gate_phase_seconds_total{by="gate",phase="held"} 230.5' in text
    assert 'gangline_gate_phase_seconds_total{by="gate",phase="drain"} 0.5' in text
    assert 'gangline_gate_phase_seconds_total{by="trainer",phase="offload_before_refit"} 227.3' in text
    assert "gangline_gate_updates_total 1.0" in text
    assert "gangline_gate_closed_seconds_total 231.0" in text


async def test_a_report_that_leaves_most_of_the_time_out_says_so() -> None:
    clock = Clock()
    gate = Gate(clock)
    await refit(gate, clock, drain_s=0.0, held_s=231.0)
    gate.updates.report({"broadcast": 1.7})
    assert slowest_phase(gate.updates.last[0].phases) == "unreported"


async def test_phases_that_are_reported_under_way_belong_to_the_update_under_way() -> None:
    clock = Clock()
    gate = Gate(clock)
    await refit(gate, clock, drain_s=0.0, held_s=1.0)
    await gate.pause("keep")
    gate.updates.report({"offload": 2.0, "drain": 9.0, "held": 9.0})
    gate.updates.report({"offload": 3.0, "load": 1.0})
    clock.now += 4.0
    gate.resume()
    before, seen = gate.updates.last
    assert before.reported == {}
    assert seen.reported == {"offload": 3.0, "load": 1.0}, "a second report replaces, and the gate's phases are its own"
    assert (seen.mode, seen.drain_s, seen.held_s) == ("keep", 0.0, 4.0)
    assert gate.updates.reported_s == {"offload": 3.0, "load": 1.0}


async def test_a_long_drain_and_a_lease_that_ran_out_are_seen() -> None:
    clock = Clock()
    gate = Gate(clock)
    async with gate.pass_through():
        opened = await gate.pause("drain", 0.001)
        assert not opened.is_paused
    (seen,) = gate.updates.last
    assert seen.has_expired
    async with gate.pass_through():
        await gate.pause("drain", 600, wait_s=0)
        clock.now += 60
        gate.resume()
    assert gate.updates.last[-1].phases == {"drain": 60.0, "held": 0.0}
    assert "mode keep does not wait" in (advice_on_phases(gate.updates.last[-1].phases) or "")


def test_a_report_without_an_update_is_refused() -> None:
    with pytest.raises(Conflict, match="has seen no weight update"):
        GateUpdates(Clock()).report(PROFILED)


@pytest.mark.parametrize(
    ("phases", "slowest"),
    [
        ({}, None),
        ({"load": 1.0}, None),
        ({"drain": 3.0, "load": 3.0}, None),
        ({"transfer": 30.0, "pause": 0.0, "drain": 1.0, "load": 2.0, "resume": 0.0}, "transfer"),
        ({"drain": 0.0, "held": 0.0}, None),
    ],
)
def test_only_a_phase_that_takes_most_of_a_long_update_is_told(phases: dict[str, float], slowest: str | None) -> None:
    assert slowest_phase(phases) == slowest


def test_totals_of_many_names_stay_few() -> None:
    updates = GateUpdates(Clock())
    updates.begin(is_drained=True)
    for number in range(100):
        updates.report({f"layer{number}": 1.0})
    assert sum(updates.reported_s.values()) == 100.0
    assert len(updates.reported_s) == 33
    updates.report({"layer99": 2.0, "layer0": 0.5})
    assert sum(updates.reported_s.values()) == 101.0, "a counter never goes back"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_phases_are_the_time_that_the_gate_was_closed(seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    updates = GateUpdates(clock)
    closed_s, is_closed, most = 0.0, False, dict(updates.measured_s)
    for _ in range(300):
        passed = chance.random()
        clock.now += passed
        closed_s += passed if is_closed else 0.0
        match chance.randrange(4):
            case 0:
                updates.begin(is_drained=chance.random() < 0.5)
                is_closed = True
            case 1 if is_closed:
                updates.drained()
            case 2 if is_closed:
                updates.end("drain", 1, has_expired=False)
                is_closed = False
            case 3 if is_closed or updates.last:
                updates.report({chance.choice("abc"): chance.random()})
            case _:
                pass
        now = updates.measured_s
        assert sum(now.values()) == pytest.approx(closed_s)
        assert all(now[phase] >= most[phase] - 1e-9 for phase in now)
        most = now
    assert msgspec.json.decode(msgspec.json.encode(updates.last))
    assert all(sum(one.phases.values()) >= one.drain_s + one.held_s - 1e-9 for one in updates.last)
