"""Programs that the papers print, run as printed alongside ours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import combinations
from math import factorial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gangline.train.learning.advantages import group_advantages
from gangline.train.learning.credit.coalitions import shapley_values
from gangline.train.learning.masks import num_turns_in_epoch
from gangline.train.learning.rewards import LengthPenalty, LengthScaling, composite_reward, staged_reward
from support.service.papers import listing


def ran(name: str, **given: Any) -> dict[str, Any]:
    """What a listing defines when it runs."""
    names: dict[str, Any] = dict(given)
    exec(compile(listing(name), name, "exec"), names)
    return names


def test_advantages_are_the_printed_ones() -> None:
    printed = ran("003-advantages.txt")
    ours = group_advantages(printed["rewards"])
    assert ours.tolist() == pytest.approx(printed["advantages"], abs=2e-3)


def test_the_printed_advantages_of_the_worked_example_are_of_another_group() -> None:
    """Two of four succeed, so their advantages are 1 and -1; +1.15 and -0.58 are those of one of three."""
    table = listing("003-worked-example-advantages.txt")
    rows = re.findall(r"(\d\.\d)([+-]\d\.\d\d)$", table, re.MULTILINE)
    rewards = [float(reward) for reward, _ in rows]
    assert rewards == [1.0, 0.0, 1.0, 0.0]
    assert group_advantages(rewards).tolist() == pytest.approx([1, -1, 1, -1], abs=1e-4)
    other = np.array([1.0, 0.0, 0.0])
    of_three = (other - other.mean()) / other.std(ddof=1)
    assert [round(float(one), 2) for one in of_three[:2]] == [1.15, -0.58] == [float(value) for _, value in rows[:2]]


def test_the_worked_mask_is_one_on_the_assistants_tokens_alone() -> None:
    lines = listing("003-worked-example-mask.txt").splitlines()
    roles = re.findall(r"SYS|USER|ASST_T\d|TOOL_T\d", lines[1])
    mask = re.findall(r"[01](?=\d\d…)", lines[2])
    assert [role.startswith("ASST") for role in roles] == [digit == "1" for digit in mask]


def tokens(num_turns: int) -> list[Any]:
    return [
        SimpleNamespace(role=role, turn_index=turn, is_action=role == "assistant")
        for turn in range(num_turns)
        for role in ("assistant", "tool")
    ]


def test_masks_open_the_same_turns() -> None:
    three = tokens(3)
    assert ran("003-mask-full.txt")["full_assistant_mask"](three) == [1, 0] * 3
    assert ran("003-mask-action.txt")["action_only_mask"](three) == [1, 0] * 3
    progressive: Callable[..., list[int]] = ran("003-mask-progressive.txt")["progressive_mask"]
    for num_turns in (3, 10):
        for epoch in (0, 4):
            printed = sum(progressive(tokens(num_turns), epoch, 5, num_turns))
            assert num_turns_in_epoch(epoch, 5, num_turns) == printed


def test_rewards_are_the_printed_ones() -> None:
    binary = ran("003-reward-binary.txt")["binary_reward"]
    assert binary(SimpleNamespace(test_results={"all_passed": True})) == 1.0
    given = {"all_tests_pass": False, "passed_tests": 3, "total_tests": 4, "valid_patch": True, "turns": 5}
    composite = ran("003-reward-composite.txt", **given)["composite_reward"](None)
    parts = {"all_pass": 0.0, "partial": 0.75, "format": 1.0, "efficiency": 1 - 5 / 25}
    assert composite_reward(parts) == pytest.approx(composite)
    stages = [float(row[-3:]) for row in listing("003-reward-staged.txt").splitlines()[1:]]
    names = ("found", "changed", "compiles", "some_pass", "all_pass")
    assert [staged_reward({}), *(staged_reward({name: True}) for name in names)] == stages
    penalized = ran("003-reward-length.txt", cos=math.cos, pi=math.pi)["length_penalized_reward"]
    ours = LengthPenalty(target_tokens=2000, max_tokens=8000)
    for num_tokens in (1, 2000, 2001, 5000, 8000, 9000):
        assert ours.apply(0.8, num_tokens) == pytest.approx(penalized(0.8, num_tokens))
    lengths = {"reward": 0.5, "target_length": 2000, "actual_length": 500, "alpha": 0.5}
    scaled = ran("003-grpo-length.txt", **lengths)["adjusted_reward"]
    assert LengthScaling().apply(0.5, 500) == pytest.approx(scaled)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # the listing's own
def test_shapley_values_are_the_printed_ones() -> None:
    team = {"lead": 0.2, "coder": 0.4, "reviewer": 0.1}

    def value(coalition: frozenset[str]) -> float:
        return sum(team[name] for name in coalition) + 0.1 * (len(coalition) > 1)

    printed = ran("003-shapley.txt", combinations=combinations, factorial=factorial)["shapley_values"]
    assert shapley_values(list(team), value) == pytest.approx(printed(list(team), value))


def test_the_chain_that_a_prompt_extends_is_the_longest_that_it_begins_with() -> None:
    """As a session's tree places a call, which in addition asks for the ids that were sampled."""
    extends = ran("004-extendable-chain.txt")["_find_extendable_chain"]
    tips = [[1], [1, 2], [9], [1, 2, 3, 4]]
    assert [extends(prompt, tips) for prompt in ([1, 2, 3], [1, 2, 3, 4, 5], [9, 9], [7])] == [1, 3, 2, None]
