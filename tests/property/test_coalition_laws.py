"""Laws of credit by coalitions, for any rewards of coalitions and each way of counting."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.train.collecting.groups import CoalitionRewards, Group
from gangline.train.collecting.side_rollouts.coalitions import CoalitionSettings
from gangline.train.learning.advantages import advantages_by_role, group_advantages
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.credit.coalitions import asked_coalitions, group_shapley, player_factors
from gangline.train.learning.samples import make_samples
from support.training.samples import session
from support.training.team import turn_of

PLAYERS = ("a", "b", "c", "d")
EVERY = [frozenset[str](some) for size in range(5) for some in combinations(PLAYERS, size)]

means = st.fixed_dictionaries({one: st.floats(-1, 1, allow_subnormal=False) for one in EVERY})
settings_of = st.builds(
    CoalitionSettings,
    players=st.just(PLAYERS),
    method=st.sampled_from(["exact", "monte_carlo"]),
    permutations=st.integers(1, 5),
    weight=st.floats(0, 1),
) | st.builds(
    CoalitionSettings,
    players=st.just(PLAYERS),
    method=st.just("two_level"),
    manager=st.sampled_from(PLAYERS),
    weight=st.floats(0, 1),
)
exact = CoalitionSettings(players=PLAYERS)


def measured(rewards: Mapping[frozenset[str], float], settings: CoalitionSettings, task_id: str = "t") -> Group:
    """A group that knows nothing but the coalitions that were asked for."""
    asked = [*asked_coalitions(task_id, settings), frozenset[str](), settings.everybody]
    return Group(task_id, (), CoalitionRewards({one: rewards[one] for one in asked}, 0))


@given(means, settings_of, st.text(max_size=4))
def test_what_all_gain_over_nobody_is_shared_out(
    rewards: Mapping[frozenset[str], float], settings: CoalitionSettings, task_id: str
) -> None:
    values = group_shapley(measured(rewards, settings, task_id), settings)
    assert sum(values.values()) == pytest.approx(rewards[settings.everybody] - rewards[frozenset()], abs=1e-9)
    assert len(asked_coalitions(task_id, settings)) <= settings.most_coalitions


@given(means, settings_of)
def test_factors_share_out_the_advantage_and_turn_no_sign(
    rewards: Mapping[frozenset[str], float], settings: CoalitionSettings
) -> None:
    factors = player_factors(measured(rewards, settings), settings)
    assert sum(factors.values()) == pytest.approx(len(PLAYERS))
    assert min(factors.values()) >= -1e-12
    if settings.weight == 0:
        assert set(factors.values()) == {1.0}


@given(means, settings_of, st.sampled_from(PLAYERS))
def test_a_player_that_changes_nothing_has_no_value_and_no_advantage(
    rewards: Mapping[frozenset[str], float], settings: CoalitionSettings, null: str
) -> None:
    without = {one: rewards[one - {null}] for one in EVERY}
    group = measured(without, settings)
    assert group_shapley(group, settings)[null] == pytest.approx(0, abs=1e-12)
    if any(abs(value) > 1e-6 for value in group_shapley(group, settings).values()):
        full = settings.model_copy(update={"weight": 1.0})
        assert player_factors(group, full)[null] == pytest.approx(0, abs=1e-5)


@given(means)
def test_players_that_can_be_exchanged_have_the_same_factor(rewards: Mapping[frozenset[str], float]) -> None:
    exchange = {"a": "b", "b": "a"}
    alike = {one: rewards[one] + rewards[frozenset(exchange.get(who, who) for who in one)] for one in EVERY}
    group = measured(alike, exact)
    values, factors = group_shapley(group, exact), player_factors(group, exact)
    assert values["a"] == pytest.approx(values["b"], abs=1e-9)
    assert factors["a"] == pytest.approx(factors["b"], abs=1e-3)


@given(means, st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=6))
def test_without_weight_it_is_the_algorithm(rewards: Mapping[frozenset[str], float], of_sessions: list[float]) -> None:
    turns = [turn_of(player) for player in PLAYERS]
    sessions = tuple(session(f"s{index}", reward, *turns) for index, reward in enumerate(of_sessions))
    group = Group("t", sessions, CoalitionRewards(rewards, 0))
    factors = player_factors(group, exact.model_copy(update={"weight": 0.0}))
    for one, plain in zip(
        make_samples(group, Algorithm(), factors=factors), make_samples(group, Algorithm()), strict=True
    ):
        assert (one.advantages == plain.advantages).all()


@given(means, st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=6))
def test_compared_within_a_group_shapley_values_are_only_the_sessions_rewards(
    rewards: Mapping[frozenset[str], float], of_sessions: list[float]
) -> None:
    """The reason for factors: the coalitions' rewards cancel out of `(phi - mean) / deviation`."""
    values = [group_shapley(measured({**rewards, exact.everybody: reward}, exact), exact) for reward in of_sessions]
    plain = group_advantages(of_sessions)
    for player in PLAYERS:
        found = np.array([one[player] for one in advantages_by_role(values)])
        assert found == pytest.approx(plain, abs=1e-4)
