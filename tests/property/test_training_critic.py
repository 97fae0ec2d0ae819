"""Laws of a critic: what its advantages add up to, and which token each reward comes after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.critic.settings import CriticSettings
from gangline.train.learning.credit.critic.targets import Estimate, estimate_traces, explained_variance
from gangline.train.learning.credit.tokens import token_rewards
from gangline.train.learning.packing import pack
from gangline.train.learning.samples import make_samples
from support.training.samples import scored, session, trace

numbers = st.floats(-3, 3, allow_subnormal=False).map(lambda one: round(one, 3))
traces_of_tokens = st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), min_size=1, max_size=4)
"""(reward, value) of each token of each trace."""


def estimated(traces: list[list[tuple[float, float]]], **settings: float) -> tuple[Estimate, NDArray[np.float64]]:
    """The estimate, and the rewards to come at each token."""
    rewards = [[reward for reward, _ in mine] for mine in traces]
    values = np.array([value for mine in traces for _, value in mine])
    labels = np.repeat(np.arange(len(traces)), [len(mine) for mine in traces])
    to_come = np.concatenate([np.cumsum(mine[::-1])[::-1] for mine in rewards])
    found = estimate_traces(np.concatenate(rewards), values, labels, CriticSettings.model_validate(settings))
    return found, to_come


@given(traces_of_tokens)
def test_at_lambda_1_a_return_is_the_rewards_to_come_in_its_own_trace(traces: list[list[tuple[float, float]]]) -> None:
    found, to_come = estimated(traces, gamma=1.0, lam=1.0)
    assert found.returns == pytest.approx(to_come, abs=1e-9)
    values = np.array([value for mine in traces for _, value in mine])
    assert found.advantages == pytest.approx(to_come - values, abs=1e-9)


@given(traces_of_tokens)
def test_at_lambda_0_an_advantage_is_what_the_next_token_changes(traces: list[list[tuple[float, float]]]) -> None:
    found, _ = estimated(traces, gamma=0.9, lam=0.0)
    expected = [
        reward + 0.9 * (mine[at + 1][1] if at + 1 < len(mine) else 0.0) - value
        for mine in traces
        for at, (reward, value) in enumerate(mine)
    ]
    assert found.advantages == pytest.approx(expected, abs=1e-9)


@given(traces_of_tokens, st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
def test_a_trace_is_estimated_as_if_it_were_alone(
    traces: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    alone = [estimated([mine], gamma=gamma, lam=lam)[0].advantages for mine in traces]
    assert np.array_equal(estimated(traces, gamma=gamma, lam=lam)[0].advantages, np.concatenate(alone))


@given(st.lists(numbers, min_size=1, max_size=8), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
def test_a_critic_that_knows_the_returns_leaves_no_advantage(rewards: list[float], gamma: float, lam: float) -> None:
    values = list[float]()
    for reward in reversed(rewards):
        values.append(reward + gamma * (values[-1] if values else 0.0))
    found, _ = estimated([list(zip(rewards, values[::-1], strict=True))], gamma=gamma, lam=lam)
    assert found.advantages == pytest.approx(np.zeros(len(rewards)), abs=1e-9)
    assert explained_variance(found.returns, np.array(values[::-1])) == pytest.approx(1.0) or np.ptp(values) < 1e-5


@st.composite
def sessions(draw: st.DrawFn) -> list[Trace]:
    """Traces of one to three turns, some of which have a score."""
    scores = st.lists(st.one_of(st.none(), numbers), min_size=1, max_size=3)
    return [scored(*draw(scores)) for _ in range(draw(st.integers(1, 3)))]


@given(sessions(), numbers)
def test_rewards_from_a_turn_on_are_the_turns_return(traces: list[Trace], reward: float) -> None:
    """Its score, and all later ones of the session, and the session's reward."""
    found = token_rewards(traces, [one.loss_mask.astype(np.float32) for one in traces], reward, score_weight=1.0)
    spans = [(at, span) for at, one in enumerate(traces) for span in one.spans]
    for number, (at, span) in enumerate(spans):
        to_come = sum(later.score or 0.0 for _, later in spans[number:]) + reward
        assert found[at][span.start :].sum() == pytest.approx(to_come)


@given(sessions(), numbers, st.data())
def test_rewards_are_on_trained_tokens_and_the_last_one_is_never_lost(
    traces: list[Trace], reward: float, data: st.DataObject
) -> None:
    def drawn(one: Trace) -> NDArray[np.float32]:
        size = len(one.loss_mask)
        weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=size, max_size=size))
        return (np.array(weights) * one.loss_mask).astype(np.float32)

    weights = [drawn(one) for one in traces]
    for rewards_T, weights_T in zip(token_rewards(traces, weights, reward), weights, strict=True):
        assert not rewards_T[weights_T == 0].any()
        assert rewards_T.sum() == pytest.approx(reward if weights_T.any() else 0.0)
        if weights_T.any():
            assert rewards_T[np.flatnonzero(weights_T)[-1]] == reward


def test_each_trace_of_a_session_ends_with_its_whole_reward() -> None:
    """Three of three succeed, with three traces and one: none of them is punished for its number of traces."""
    group = Group("task-1", (session("s0", 1.0, trace(), trace(), trace()), session("s1", 1.0, trace())))
    samples = make_samples(group, algorithm("ppo"))
    assert [one.rewards.tolist() for one in samples if one.rewards is not None] == [[0.0, 0.0, 1.0]] * 4
    assert not any(one.advantages.any() for one in samples)
    assert pack(samples).rewards.tolist() == [0.0, 0.0, 1.0] * 4


def test_a_score_of_a_turn_that_is_not_trained_on_comes_after_the_last_trained_token_before_it() -> None:
    one = scored(0.25, 0.5, 0.125)
    weights = one.loss_mask.astype(np.float32)
    second = one.spans[1]
    weights[second.start : second.end] = 0.0
    (found,) = token_rewards([one], [weights], 1.0, score_weight=2.0)
    assert found[one.spans[0].end - 1] == 2 * (0.25 + 0.5)
    assert found[one.spans[2].end - 1] == 2 * 0.125 + 1.0
    assert np.count_nonzero(found) == 2
