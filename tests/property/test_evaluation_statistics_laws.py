"""Laws of an evaluation's statistics: exact where they can be enumerated, unbiased, blind to differences of tasks."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest
from gangline.tasks.evals.statistics import difference_of, estimate_of, pass_at_k, pass_hat_k

counts = st.integers(1, 8).flatmap(
    lambda num: st.tuples(st.just(num), st.integers(0, num), st.integers(1, num)),
)
rewards = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 6))


@given(counts)
def test_both_are_shares_of_the_choices_of_k_samples(drawn: tuple[int, int, int]) -> None:
    num_samples, num_passed, k = drawn
    passed = [number < num_passed for number in range(num_samples)]
    choices = list(combinations(passed, k))
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert pass_hat_k(num_samples, num_passed, k) == pytest.approx(sum(map(all, choices)) / len(choices))


@given(counts)
def test_one_sample_is_the_mean_and_more_samples_help_the_one_and_hurt_the_other(drawn: tuple[int, int, int]) -> None:
    num_samples, num_passed, k = drawn
    assert pass_at_k(num_samples, num_passed, 1) == pytest.approx(num_passed / num_samples)
    assert pass_hat_k(num_samples, num_passed, 1) == pytest.approx(num_passed / num_samples)
    assert pass_at_k(num_samples, num_passed, k) >= pass_at_k(num_samples, num_passed, 1) - 1e-12
    assert pass_hat_k(num_samples, num_passed, k) <= pass_hat_k(num_samples, num_passed, 1) + 1e-12


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (0, 0, 1)])
def test_too_few_samples_are_refused(num_samples: int, num_passed: int, k: int) -> None:
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(InvalidRequest, match="samples"):
            estimator(num_samples, num_passed, k)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_pass_at_k_is_unbiased(chance: float) -> None:
    """Its expectation over all outcomes of n samples is the chance that one of k passes."""
    num_samples, k = 6, 3
    expected = sum(
        math.comb(num_samples, passed)
        * chance**passed
        * (1 - chance) ** (num_samples - passed)
        * pass_at_k(num_samples, passed, k)
        for passed in range(num_samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k)


@given(st.lists(rewards, min_size=1, max_size=12))
def test_an_estimate_is_the_mean_over_tasks_with_its_error(values: list[float]) -> None:
    found = estimate_of(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    if len(set(values)) == 1:
        assert found.standard_error is None
    else:
        assert found.standard_error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)


def test_nothing_has_no_estimate() -> None:
    assert estimate_of([]) is None
    assert difference_of({"a": 1.0}, {"b": 1.0}) is None


@given(st.dictionaries(st.text(min_size=1, max_size=3), rewards, min_size=1, max_size=8), rewards)
def test_a_constant_gain_has_no_error_however_much_tasks_differ(before: dict[str, float], gain: float) -> None:
    found = difference_of(before, {task: value + gain for task, value in before.items()})
    assert found is not None
    assert found.mean == pytest.approx(gain, abs=1e-6)
    assert (found.low, found.high) == (pytest.approx(gain, abs=1e-6), pytest.approx(gain, abs=1e-6))
    assert found.standard_error is None or found.standard_error < 1e-6


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.tuples(rewards, rewards), min_size=1, max_size=8),
)
def test_the_other_way_round_everything_is_reversed(pairs: dict[str, tuple[float, float]]) -> None:
    one, other = ({task: pair[side] for task, pair in pairs.items()} for side in (0, 1))
    there, back = difference_of(one, other), difference_of(other, one)
    assert there is not None
    assert back is not None
    assert there.mean == pytest.approx(-back.mean)
    assert set(there.better) == set(back.worse)
    assert there.low <= there.mean + 1e-9
    assert there.high >= there.mean - 1e-9


def test_a_planted_difference_is_visible_and_none_is_not() -> None:
    chance = np.random.default_rng(0)
    tasks = {str(number): float(chance.uniform()) for number in range(100)}

    def noisy(gain: float) -> dict[str, float]:
        return {task: value + gain + float(chance.normal(0, 0.1)) for task, value in tasks.items()}

    found = difference_of(noisy(0.0), noisy(0.1))
    assert found is not None
    assert found.is_visible
    assert found.mean == pytest.approx(0.1, abs=0.05)
    false_alarms = 0
    for _ in range(40):
        none = difference_of(noisy(0.0), noisy(0.0))
        assert none is not None
        false_alarms += none.is_visible
    assert false_alarms <= 6, "one in twenty is expected at 95 %"
