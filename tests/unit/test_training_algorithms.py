"""Algorithms as differences; samples made with them; the command that lists them."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.training.collecting.groups import Group
from gangline.training.learning.algorithms import OVERRIDES, Algorithm, algorithm, differences
from gangline.training.learning.credit.traces import CreditScheme
from gangline.training.learning.masks import last_turns
from gangline.training.learning.samples import make_samples
from gangline.trajectories.shared_prefixes import share_prefixes
from support.training.samples import EXACT, group, session, trace


def test_the_base_differs_from_itself_in_nothing() -> None:
    assert algorithm("grpo") == Algorithm()
    assert differences(algorithm("grpo")) == {}


@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_each_algorithm_is_just_its_differences(name: str) -> None:
    settings = algorithm(name)
    changes = {setting: after for setting, (_, after) in differences(settings).items()}
    rebuilt = Algorithm()
    assert algorithm("grpo", changes) == settings
    assert differences(rebuilt, settings).keys() == changes.keys()


def test_overrides_come_on_top() -> None:
    assert algorithm("dapo", {"loss.clip_high": 0.3}).loss.clip_high == 0.3
    assert algorithm("dapo", {"loss.kl.coefficient": 0.01}).loss.kl.coefficient == 0.01


@pytest.mark.parametrize("setting", ["loss.clip", "loss.clip_high.more", "los.clip_high"])
def test_an_override_that_there_is_not_is_refused(setting: str) -> None:
    with pytest.raises(InvalidRequest, match="los"):
        algorithm("dapo", {setting: 1})


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="dual_clip does nothing"):
        algorithm("cispo", {"loss.dual_clip": 3.0})


def test_an_unknown_algorithm_is_told_its_nearest() -> None:
    with pytest.raises(UnknownPlugin, match="Did you mean 'gspo'"):
        algorithm("gsop")


def test_the_command_lists_them() -> None:
    done = CliRunner().invoke(build_app(), ["train", "algorithms", "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    assert document["algorithms"]["grpo"] == {}
    assert document["algorithms"]["dapo"]["loss.clip_high"] == {"base": 0.2, "value": 0.28}
    assert document["base"]["loss"]["clip_high"] == 0.2
    shown = CliRunner().invoke(build_app(), ["train", "algorithms"], catch_exceptions=False).stdout
    assert all(name in shown for name in OVERRIDES)


def test_samples_of_a_group() -> None:
    samples = make_samples(group(1.0, 0.0), algorithm("dr_grpo"))
    assert [one.session_id for one in samples] == ["s0", "s1"]
    assert [one.advantages.tolist() for one in samples] == [[0.5] * 3, [-0.5] * 3]
    assert samples[0].weights.tolist() == [1.0] * 3
    assert samples[0].behaviour_logprobs.tolist() == [-0.5] * 3


def test_samples_leave_out_turns_that_were_drawn_from_another_distribution() -> None:
    forced = msgspec.structs.replace(EXACT, constraint="tool_choice")
    one = session("s0", 1.0, trace(turns=[(10, 2), (11, 2)], certificates=(EXACT, forced)))
    samples = make_samples(Group("task-1", (one, session("s1", 0.0))), algorithm("grpo"))
    assert samples[0].weights.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert samples[0].behaviour_logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


def test_samples_share_a_sessions_reward_and_leave_out_what_is_untrainable() -> None:
    of_two = session("s0", 1.0, trace(), trace(untrainable="drifted", loss_mask=np.zeros(3, np.int8)), trace())
    found = Group("task-1", (of_two, session("s1", 0.0)))
    samples = make_samples(found, algorithm("dr_grpo", {"credit.scheme": "last"}), lambda one: last_turns(one, 1))
    assert [one.trace_id for one in samples] == ["s0/0", "s0/2", "s1/0"]
    assert [float(one.advantages[0]) for one in samples] == [0.0, 0.5, -0.5]


def test_an_outcome_goes_to_the_traces_that_the_evaluator_holds_responsible_if_asked() -> None:
    found = Group(
        "task-1", (session("s0", 1.0, trace(reward=1.0), trace(reward=0.2)), session("s1", 0.0, trace(reward=0.0)))
    )
    samples = make_samples(found, algorithm("dr_grpo", {"credit.scheme": "own"}))
    assert [float(one.advantages[0]) for one in samples] == pytest.approx([0.5, 0.1, -0.5])


@pytest.mark.parametrize("scheme", get_args(CreditScheme))
def test_a_session_that_succeeds_with_many_traces_is_not_punished_for_them(scheme: CreditScheme) -> None:
    """Three of three succeed, with 3, 1 and 1 traces."""
    won = trace(reward=1.0)
    found = Group("task-1", (session("s0", 1.0, won, won, won), session("s1", 1.0, won), session("s2", 1.0, won)))
    samples = make_samples(found, algorithm("grpo", {"credit.scheme": scheme}))
    assert [one.advantages.tolist() for one in samples] == [[0.0] * 3] * 5


def test_lengths_count_before_rewards_are_compared() -> None:
    found = Group(
        "task-1", (session("s0", 1.0, trace(turns=[(10,) * 4])), session("s1", 1.0, trace(turns=[(10,) * 16])))
    )
    shaping = {"shaping.length_scaling": {"target_tokens": 4, "alpha": 0.5}}
    samples = make_samples(found, algorithm("dr_grpo", shaping))
    assert [float(one.advantages[0]) for one in samples] == [0.25, -0.25]


def test_the_prompts_of_a_tree_are_written_out() -> None:
    first, second = session(
        "s0", 1.0, trace(), trace(prompt_ids=np.array([1, 4, 5, 10, 6], np.int32))
    ).trajectory.traces  # type: ignore[union-attr]
    shared = session("s0", 1.0, *share_prefixes([first, second]))
    # The helper names traces anew; what is shared is with the first.
    assert shared.trajectory is not None
    assert [len(one.prompt_ids) for one in shared.trajectory.traces] == [3, 1]
    samples = make_samples(Group("task-1", (shared, session("s1", 0.0))), algorithm("grpo"))
    assert samples[1].prompt_ids.tolist() == [1, 4, 5, 10, 6]
