"""Shaping of rewards, and their credit to traces."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from gangline.train.learning.credit.traces import CreditSettings, spread_advantage
from gangline.train.learning.rewards import (
    LengthPenalty,
    LengthScaling,
    OverlongPenalty,
    RewardShaping,
    composite_reward,
    shape_reward,
    staged_reward,
)


def test_a_composite_reward_is_its_weighted_parts() -> None:
    parts = {"all_pass": 0.0, "partial": 0.5, "format": 1.0, "efficiency": 0.2}
    assert composite_reward(parts) == pytest.approx(0.1 + 0.1 + 0.02)
    with pytest.raises(ValueError, match="0 to 1"):
        composite_reward({**parts, "format": 2.0})
    with pytest.raises(ValueError, match="just these parts"):
        composite_reward({"all_pass": 1.0})


def test_a_staged_reward_is_the_highest_stage() -> None:
    assert staged_reward({"found": True, "changed": True, "compiles": False}) == 0.3
    assert staged_reward({"some_pass": True}) == 0.7
    assert staged_reward({}) == 0.0
    with pytest.raises(ValueError, match="known: found, changed"):
        staged_reward({"flew": True})


@pytest.mark.parametrize(("num_tokens", "left"), [(10, 1.0), (2000, 1.0), (5000, 0.5), (8000, 0.0), (9000, 0.0)])
def test_the_length_penalty_is_half_way_at_half_the_way(num_tokens: int, left: float) -> None:
    assert LengthPenalty(target_tokens=2000, max_tokens=8000).apply(2.0, num_tokens) == pytest.approx(2 * left)


def test_a_penalty_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValidationError, match="more than target_tokens"):
        LengthPenalty(target_tokens=5, max_tokens=5)


def test_length_scaling_gives_short_ones_more() -> None:
    scaling = LengthScaling(target_tokens=2000, alpha=0.5)
    assert [scaling.apply(1.0, num) for num in (500, 2000, 8000)] == [2.0, 1.0, 0.5]


@pytest.mark.parametrize(("num_tokens", "added"), [(0, 0.0), (12288, 0.0), (14336, -0.5), (16384, -1.0), (99999, -1.0)])
def test_overlong_shaping(num_tokens: int, added: float) -> None:
    assert OverlongPenalty().apply(1.0, num_tokens) == pytest.approx(1.0 + added)


def test_shaping_is_nothing_unless_it_is_asked_for() -> None:
    assert shape_reward(0.7, 10**6, RewardShaping()) == 0.7
    both = RewardShaping(length_scaling=LengthScaling(), overlong_penalty=OverlongPenalty(max_tokens=8000))
    assert shape_reward(1.0, 8000, both) == pytest.approx(0.5 - 1.0)


@pytest.mark.parametrize(
    ("settings", "good", "bad"),
    [
        (CreditSettings(), [0.8] * 4, [-0.8] * 4),
        (CreditSettings(scheme="divided"), [0.2] * 4, [-0.2] * 4),
        (CreditSettings(scheme="discounted", discount=0.5), [0.1, 0.2, 0.4, 0.8], [-0.1, -0.2, -0.4, -0.8]),
        (CreditSettings(scheme="last"), [0.0, 0.0, 0.0, 0.8], [0.0, 0.0, 0.0, -0.8]),
        (CreditSettings(scheme="own"), [0.2, 0.4, 0.6, 0.8], [-0.8, -0.6, -0.4, -0.2]),
    ],
    ids=lambda value: getattr(value, "scheme", ""),
)
def test_credit_over_traces(settings: CreditSettings, good: list[float], bad: list[float]) -> None:
    own = np.array([0.1, 0.2, 0.3, 0.4])
    assert spread_advantage(0.8, 4, settings, own=own, own_range=0.4).tolist() == pytest.approx(good)
    assert spread_advantage(-0.8, 4, settings, own=own, own_range=0.4).tolist() == pytest.approx(bad)


def test_traces_that_the_evaluator_found_alike_share_alike() -> None:
    own, scheme = np.array([0.3, 0.3]), CreditSettings(scheme="own")
    assert spread_advantage(-1.0, 2, scheme, own=own).tolist() == [-1.0, -1.0]
    assert spread_advantage(-1.0, 2, scheme, own=own, own_range=0.5).tolist() == [-1.0, -1.0]


def test_credit_by_own_rewards_needs_them() -> None:
    with pytest.raises(ValueError, match="is the evaluator a process one"):
        spread_advantage(0.8, 4, CreditSettings(scheme="own"))
