"""Resampling of a step's sessions by their rewards (PF-PPO)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.resampling import ResamplingSettings, draw_weights, drawn_factors
from gangline.train.learning.samples import make_samples, resampled
from support.training.samples import group

METHODS = st.sampled_from(["power", "extremes", "best"])


@given(st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=1, max_size=20), METHODS)
def test_drawn_sessions_weigh_one_on_average_and_a_draw_can_be_repeated(scores: list[float], method: str) -> None:
    settings = ResamplingSettings.model_validate({"method": method})
    named = {f"s{at}": one for at, one in enumerate(scores)}
    factors = drawn_factors(named, settings)
    drawn = [one for one in factors.values() if one > 0]
    assert np.mean(drawn) == pytest.approx(1.0)
    assert drawn_factors(dict(reversed(named.items())), settings) == factors
    copies = np.array(list(factors.values())) * len(scores) / len(drawn)
    assert copies == pytest.approx(np.round(copies))


def test_sessions_of_large_rewards_are_drawn_more_often() -> None:
    settings = ResamplingSettings()
    totals = np.zeros(2)
    for step in range(300):
        factors = drawn_factors({f"{step}-low": 0.5, f"{step}-high": 1.0}, settings)
        totals += [factors[f"{step}-low"] > 0, factors[f"{step}-high"] > 0]
    assert draw_weights([0.5, 1.0], settings) == pytest.approx([0.25, 1.0])
    # Of two draws with chances 1/5 and 4/5: 9/25 and 24/25.
    assert totals / 300 == pytest.approx([0.36, 0.96], abs=0.1)


def test_samples_are_weighted_and_keep_their_places() -> None:
    samples = make_samples(group(1.0, 0.0, 0.0), algorithm("dr_grpo"))
    found = resampled(samples, ResamplingSettings())
    assert [one.session_id for one in found] == ["s0", "s1", "s2"]
    assert [one.weights.tolist() for one in found] == [[1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert [one.weights.tolist() for one in resampled(samples, None)] == [[1.0] * 3] * 3


def test_trainers_that_get_every_session_resample_by_themselves() -> None:
    with pytest.raises(InvalidRequest, match="resampling"):
        algorithm("grpo", {"resampling": {}}).require_group_advantages("prime-rl")
