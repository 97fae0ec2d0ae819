"""Parts of rewards, compared each by itself (GDPO), and factors over a step (GPG)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.session import SessionResult
from gangline.train.collecting.groups import Group
from gangline.train.learning.advantages import AdvantageSettings, group_advantages
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.parts import parts_differ, rewards_of_parts
from gangline.train.learning.samples import make_samples, over_batch
from support.training.samples import group, session


def with_parts(name: str, **parts: float) -> SessionResult:
    details = {"parts": {part: {"reward": reward} for part, reward in parts.items()}}
    return session(name, sum(parts.values()), reward_details=details)


EQUAL_IN_SUM = Group("task-1", (with_parts("s0", style=1.0, right=0.0), with_parts("s1", style=0.0, right=1.0)))


def test_dynamic_sampling_of_parts_keeps_a_group_of_one_sum() -> None:
    assert not EQUAL_IN_SUM.is_informative
    assert parts_differ(EQUAL_IN_SUM)
    assert not parts_differ(Group("task-1", (with_parts("s0", right=1.0), with_parts("s1", right=1.0))))


def test_parts_that_are_weighted_alike_and_opposite_cancel_out_and_weights_decide() -> None:
    even = make_samples(EQUAL_IN_SUM, algorithm("gdpo"))
    assert [float(one.advantages[0]) for one in even] == pytest.approx([0.0, 0.0])
    weighted = make_samples(EQUAL_IN_SUM, algorithm("gdpo", {"advantage.part_weights": {"style": 0.5, "right": 2.0}}))
    assert [float(one.advantages[0]) for one in weighted] == pytest.approx([-1.5, 1.5], abs=1e-4)


def test_only_named_parts_of_parts_count() -> None:
    inner = {"parts": {"near": {"reward": 0.5}}}
    one = session("s0", 1.0, reward_details={"parts": {"right": {"reward": 1.0, "details": inner}}})
    assert list(rewards_of_parts(Group("task-1", (one,)))) == ["right"]
    assert rewards_of_parts(Group("task-1", (one,)), ["right.near"])["right.near"].tolist() == [0.5]


def test_a_gate_that_was_not_asked_is_not_passed() -> None:
    def gated(name: str, stages: Mapping[str, bool]) -> SessionResult:
        found = {stage: {"reward": 1.0, "passed": passed} for stage, passed in stages.items()}
        return session(name, 0.0, reward_details={"stages": found})

    found = Group("task-1", (gated("s0", {"builds": True, "passes": True}), gated("s1", {"builds": False})))
    assert {name: values.tolist() for name, values in rewards_of_parts(found).items()} == {
        "builds": [1.0, 0.0],
        "passes": [1.0, 0.0],
    }


def test_a_reward_without_the_part_is_refused_with_the_parts_it_has() -> None:
    with pytest.raises(InvalidGroup, match="no session of task-1 has parts"):
        rewards_of_parts(group(1.0, 0.0))
    with pytest.raises(InvalidGroup, match=r"no part 'speed'.*right, style"):
        rewards_of_parts(EQUAL_IN_SUM, ["speed"])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"advantage.rewards": "parts"}, "its own deviation"),
        ({"advantage.part_weights": {"right": 1.0}}, "only for rewards `parts`"),
        ({"advantage.rewards": "parts", "advantage.scale": "batch", "reward_kl.coefficient": 0.1}, "whole rewards"),
        ({"advantage.rewards": "parts", "advantage.scale": "batch", "compare": "roles"}, "whole rewards"),
    ],
)
def test_settings_that_do_not_go_with_parts_are_refused(overrides: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        algorithm("grpo", overrides)


def test_one_part_is_grpo_before_the_step_is_whitened() -> None:
    rewards = [1.0, 0.5, 0.0]
    found = Group("task-1", tuple(with_parts(f"s{at}", right=one) for at, one in enumerate(rewards)))
    settings = algorithm("gdpo", {"advantage.scale": "none"})
    ours = [float(one.advantages[0]) for one in make_samples(found, settings)]
    assert ours == pytest.approx(group_advantages(rewards, AdvantageSettings()))


def test_gpg_makes_up_for_sessions_that_teach_nothing() -> None:
    settings = algorithm("gpg")
    samples = [
        one
        for task, rewards in enumerate([(1.0, 0.0), (1.0, 1.0)])
        for one in make_samples(
            Group(f"task-{task}", tuple(session(f"s{task}{at}", reward) for at, reward in enumerate(rewards))), settings
        )
    ]
    done = over_batch(samples, settings.advantage)
    assert [float(one.advantages[0]) for one in done] == [1.0, -1.0, 0.0, 0.0]
    assert np.allclose(over_batch(samples[2:], settings.advantage)[0].advantages, 0.0)
