"""Advantages: the worked numbers, roles; Shapley values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gangline.train.learning.advantages import AdvantageSettings, advantages_by_role, group_advantages
from gangline.train.learning.credit.coalitions import monte_carlo_shapley, shapley_values, two_level_shapley

THREE_OF_EIGHT = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
DR_GRPO = AdvantageSettings(scale="none")
RLOO = AdvantageSettings(scale="none", baseline="leave_one_out")

TEAM = {
    frozenset[str](): 0.0,
    frozenset({"lead"}): 0.2,
    frozenset({"coder"}): 0.4,
    frozenset({"reviewer"}): 0.1,
    frozenset({"lead", "coder"}): 0.7,
    frozenset({"lead", "reviewer"}): 0.5,
    frozenset({"coder", "reviewer"}): 0.7,
    frozenset({"lead", "coder", "reviewer"}): 1.0,
}
"""The four values of the source, and three that its result follows from."""
ROLES = ["lead", "coder", "reviewer"]


def test_three_of_eight_succeed() -> None:
    advantages = group_advantages(THREE_OF_EIGHT)
    assert np.mean(THREE_OF_EIGHT) == 0.375
    assert np.std(THREE_OF_EIGHT) == pytest.approx(0.484, abs=5e-4)
    assert [round(float(one), 2) for one in advantages] == [1.29, -0.77, 1.29, -0.77, -0.77, 1.29, -0.77, -0.77]


def test_the_deviation_is_left_out_or_each_is_compared_with_the_others() -> None:
    assert group_advantages(THREE_OF_EIGHT, DR_GRPO).tolist() == [one - 0.375 for one in THREE_OF_EIGHT]
    assert group_advantages(THREE_OF_EIGHT, RLOO)[:2].tolist() == pytest.approx([1 - 2 / 7, 0 - 3 / 7])


def test_advantages_are_clipped() -> None:
    rewards = [1.0] + [0.0] * 99
    assert group_advantages(rewards).max() > 9
    assert group_advantages(rewards, AdvantageSettings(clip=5.0)).max() == 5.0


@pytest.mark.parametrize("rewards", [[0.3] * 5, [1.0], [], [0.1 + 0.2, 0.3]], ids=str)
@pytest.mark.parametrize("settings", [AdvantageSettings(), DR_GRPO, RLOO], ids=["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_reward_has_no_advantage(rewards: list[float], settings: AdvantageSettings) -> None:
    assert group_advantages(rewards, settings).tolist() == [0.0] * len(rewards)


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, math.nan])


def test_shapley_values_of_the_team() -> None:
    values = shapley_values(ROLES, TEAM.__getitem__)
    assert values == pytest.approx({"lead": 0.2833, "coder": 0.4833, "reviewer": 0.2333}, abs=1e-4)
    assert math.fsum(values.values()) == pytest.approx(1.0)


def test_random_orders_come_near_and_sum_exactly() -> None:
    exact = shapley_values(ROLES, TEAM.__getitem__)
    values = monte_carlo_shapley(ROLES, TEAM.__getitem__, num_orders=2000, seed=1)
    assert values == pytest.approx(exact, abs=0.01)
    assert math.fsum(values.values()) == pytest.approx(1.0)
    assert values == monte_carlo_shapley(ROLES, TEAM.__getitem__, num_orders=2000, seed=1)


def test_two_levels_split_what_the_manager_leaves() -> None:
    values = two_level_shapley("lead", ["coder", "reviewer"], TEAM.__getitem__)
    assert values["lead"] == pytest.approx(0.5 * 0.2 + 0.5 * (1.0 - 0.7))
    assert math.fsum(values.values()) == pytest.approx(1.0)
    assert values["coder"] - values["reviewer"] == pytest.approx(0.5 * (0.4 - 0.1) + 0.5 * (0.7 - 0.5))
    assert two_level_shapley("lead", ["coder"], TEAM.__getitem__) == pytest.approx(
        shapley_values(["lead", "coder"], TEAM.__getitem__)
    )


def test_too_many_players_and_one_named_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="monte_carlo_shapley"):
        shapley_values([str(number) for number in range(17)], lambda _: 0.0)
    with pytest.raises(ValueError, match="twice"):
        shapley_values(["a", "a"], lambda _: 0.0)


def test_each_role_is_compared_with_itself() -> None:
    found = advantages_by_role([{"lead": 0.3, "coder": 0.5}, {"lead": 0.1, "coder": 0.5}, {"coder": 0.2}], DR_GRPO)
    assert found[0] == pytest.approx({"lead": 0.1, "coder": 0.1})
    assert found[1] == pytest.approx({"lead": -0.1, "coder": 0.1})
    assert found[2] == pytest.approx({"coder": -0.2})
