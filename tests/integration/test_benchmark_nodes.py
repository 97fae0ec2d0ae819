"""The agents that benchmarks run on a real server and node: a step of them is collected, and each has its reward."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_step_of_stragglers_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    stragglers = importlib.import_module("stragglers_bench")
    monkeypatch.setattr(stragglers, "NUM_STEPS", 1)
    collected = await stragglers.collected(tmp_path, kind)
    assert collected.step_s > 0
    assert 0 < collected.tail_wait_share < 1
