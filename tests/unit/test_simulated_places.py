"""The model of an engine's cache that places are simulated on, and that they win on it."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from gangline.node.backends.admission import Admission

SPEED = (0.01, 1e-3, 1e-3)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("sched_engine")


def answered(engines: Any, engine: Any, *calls: tuple[str, int, int]) -> list[int]:
    """Tokens of each call's prompt that were cached. calls: (session, tokens of the prompt, sampled), all at once."""
    asked = [engines.Call(name, "g", 32, num_prompt, num_sampled) for name, num_prompt, num_sampled in calls]
    for call in asked:
        engine.ask(call)
    while engine.is_busy:
        engine.step()
    return [call.num_cached for call in asked]


def test_a_session_finds_its_context_until_others_need_the_room(engines: Any) -> None:
    engine = engines.EngineModel(256, engines.Speed(*SPEED))
    assert answered(engines, engine, ("s0", 96, 16)) == [0]
    assert answered(engines, engine, ("s0", 128, 16)) == [112]
    assert answered(engines, engine, ("s1", 64, 16)) == [32]  # what the group shares
    assert answered(engines, engine, ("s1", 192, 16)) == [80]
    (num_cached,) = answered(engines, engine, ("s0", 160, 16))
    assert 0 < num_cached < 144  # the end of its context was evicted first


def test_calls_that_outgrow_the_cache_together_are_preempted_and_still_end(engines: Any) -> None:
    engine = engines.EngineModel(256, engines.Speed(*SPEED))
    answered(engines, engine, ("s0", 96, 64), ("s1", 96, 64))
    assert engine.num_preempted > 0
    assert not engine.is_busy


def test_sessions_with_places_end_earlier_and_all_of_them(engines: Any) -> None:
    simulation = importlib.import_module("sched_simulation")
    results: list[Any] = []
    for policy in (None, Admission()):
        work = simulation.traces(6, 8, random.Random(5), prompts=0.1, replies=0.1)
        speed = engines.Speed(step_s=0.03, prefill_s=1e-3, decode_s=0.004)
        results.append(simulation.simulate(work, [engines.EngineModel(10_000, speed)], 48, policy))
    without, places = results
    assert places.num_sessions == without.num_sessions == 48
    assert places.hit_rate > 0.85 > without.hit_rate
    assert places.seconds < 0.8 * without.seconds
