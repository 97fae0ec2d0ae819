"""Masks over turn spans."""

from __future__ import annotations

import numpy as np
import pytest

from gangline.train.learning.masks import (
    ThinkingIds,
    action_only,
    all_sampled,
    last_turns,
    num_turns_in_epoch,
    outcome_weighted,
    selected_turns,
)
from support.training.samples import trace

THINK = ThinkingIds(begin=(50,), end=(51, 52))
TURNS = ((10, 2), (11, 12, 2), (13, 2))
SPANS = [[1, 1], [0, 0], [1, 1, 1], [0, 0], [1, 1]]


def flat(*turns: list[int]) -> list[float]:
    return [float(one) for turn in turns for one in turn]


def test_all_sampled_is_the_loss_mask() -> None:
    assert all_sampled(trace(turns=TURNS)).tolist() == flat(*SPANS)


@pytest.mark.parametrize(
    ("turn", "kept"),
    [
        ((50, 9, 51, 52, 10, 2), [0, 0, 0, 0, 1, 1]),
        ((9, 51, 52, 10, 2), [0, 0, 0, 1, 1]),  # the template began the thinking
        ((10, 50, 9, 51, 52, 11, 50, 9), [1, 0, 0, 0, 0, 1, 0, 0]),
        ((10, 51, 2), [1, 1, 1]),  # half an end mark is none
        ((50, 51), [0, 0]),
        ((10, 2), [1, 1]),
        ((9, 51, 52), [0, 0, 0]),
    ],
    ids=str,
)
def test_actions_are_what_is_not_thought(turn: tuple[int, ...], kept: list[int]) -> None:
    assert action_only(trace(turns=[turn]), THINK).tolist() == flat(kept)
    assert action_only(trace(turns=[(10, 2), turn]), THINK).tolist() == flat([1, 1], [0, 0], kept)


def test_only_the_last_turns() -> None:
    assert last_turns(trace(turns=TURNS), 1).tolist() == flat([0, 0], [0, 0], [0, 0, 0], [0, 0], [1, 1])
    assert last_turns(trace(turns=TURNS), 2).tolist() == flat([0, 0], *SPANS[1:])
    assert last_turns(trace(turns=TURNS), 9).tolist() == flat(*SPANS)


def test_the_number_of_last_turns_grows_with_the_epoch() -> None:
    assert [num_turns_in_epoch(epoch, 3, 5) for epoch in range(3)] == [1, 3, 5]
    assert num_turns_in_epoch(0, 1, 5) == 1
    assert [num_turns_in_epoch(epoch, 10, 4) for epoch in range(10)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_only_turns_that_score_enough() -> None:
    scores = {"c0000": 0.4, "c0001": 0.9, "c0002": 0.5}
    kept = selected_turns(trace(turns=TURNS), scores, threshold=0.5)
    assert kept.tolist() == flat([0, 0], *SPANS[1:])
    with pytest.raises(ValueError, match="c0002"):
        selected_turns(trace(turns=TURNS), {"c0000": 1.0, "c0001": 1.0}, threshold=0.5)


@pytest.mark.parametrize(("reward", "weight"), [(0.0, 0.1), (0.5, 1.05), (1.0, 2.0), (7.0, 2.0), (-1.0, 0.1)])
def test_the_outcome_weighs(reward: float, weight: float) -> None:
    weights = outcome_weighted(trace(turns=TURNS), reward)
    assert weights == pytest.approx(np.array(flat(*SPANS)) * weight)


def test_no_mask_opens_what_may_not_be_trained_on() -> None:
    shut = trace(turns=TURNS, loss_mask=np.zeros(11, np.int8))
    masks = [
        action_only(shut, THINK),
        last_turns(shut, 2),
        selected_turns(shut, dict.fromkeys(("c0000", "c0001", "c0002"), 1.0), threshold=0.5),
        outcome_weighted(shut, 1.0),
    ]
    assert all(not mask.any() for mask in masks)
