"""Algorithms as differences; samples made with them; the command that lists them."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.rows.shared_prefixes import share_prefixes
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import OVERRIDES, Algorithm, algorithm, differences
from gangline.train.learning.credit.traces import CreditScheme
from gangline.train.learning.masks import last_turns
from gangline.train.learning.samples import make_samples, over_batch
from support.training.samples import EXACT, group, scored, session, trace


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


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("gmpo", {"loss.dual_clip": 3.0}, "dual_clip does nothing with clipping: geometric"),
        ("gpg", {"loss.ratio_level": "sequence"}, "leave out ratio_level"),
        ("grpo", {"loss.correction.floor": 3.0}, "floor must be below cap"),
        ("grpo", {"loss.rejection": {"by": "token_k3", "most": 1.0, "least": 0.1}}, "least does nothing"),
        ("grpo", {"advantage.baseline": "none"}, "set scale"),
        ("reinforce_pp", {"dynamic_sampling": True}, "teach without a baseline"),
        ("grpo", {"turn_credit.returns": {}, "turn_credit.weight": 0.5}, "leave out weight or returns"),
        ("grpo", {"turn_credit.returns": {}, "credit.scheme": "last"}, "credit.scheme `broadcast`"),
        ("opo", {"turn_credit.returns": {}}, "of sessions, not of turns"),
        ("grpo", {"compare": "roles", "reward_kl.coefficient": 0.1}, "use loss.kl"),
        ("grpo", {"critic": {}}, "as in algorithm ppo"),
        ("ppo", {"advantage.baseline": "mean"}, "a critic is the baseline"),
        ("ppo", {"advantage.scale": "deviation"}, "set scale"),
        ("ppo", {"credit.scheme": "last"}, "leave them out"),
        ("ppo", {"compare": "roles"}, "leave them out"),
        ("ppo", {"turn_credit.returns": {}}, "turn_credit.weight makes turns' scores rewards"),
        ("ppo", {"dynamic_sampling": True}, "teach without a baseline"),
        ("ppo", {"critic.lam": 1.5}, "critic.lam"),
    ],
)
def test_combinations_without_a_sense_are_refused(name: str, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        algorithm(name, overrides)


def test_an_override_within_an_override_changes_no_other_use_of_the_algorithm() -> None:
    before = algorithm("dapo"), algorithm("ppo")
    assert algorithm("dapo", {"shaping.overlong_penalty.max_tokens": 8192}) != before[0]
    assert algorithm("ppo", {"critic.gamma": 0.99}) != before[1]
    assert (algorithm("dapo"), algorithm("ppo")) == before


def test_trainers_that_take_ready_advantages_get_none_of_a_critic() -> None:
    with pytest.raises(InvalidRequest, match="prime-rl gets ready advantages"):
        algorithm("ppo").require_group_advantages("prime-rl")
    with pytest.raises(InvalidRequest, match="one by one"):
        algorithm("reinforce_pp").require_group_advantages("TRL", one_by_one=True)
    algorithm("reinforce_pp").require_group_advantages("prime-rl")
    algorithm("grpo").require_group_advantages("TRL", one_by_one=True)


def returns(discount: float, compare: str) -> list[list[float]]:
    """Advantages of turns: of two sessions of rewards 1 and 0, with scores of turns."""
    overrides = {"turn_credit.returns": {"discount": discount, "compare": compare}}
    found = Group("task-1", (session("s0", 1.0, scored(0.5, None), scored(0.25)), session("s1", 0.0, scored(1.0))))
    samples = make_samples(found, algorithm("dr_grpo", overrides))
    turns = [[0, 5], [0], [0]]
    return [[float(one.advantages[at]) for at in mine] for one, mine in zip(samples, turns, strict=True)]


def test_returns_of_turns_are_compared_over_the_group() -> None:
    """Returns, with the session's reward after the last turn: 0.5 + (0 + 1.25 / 2) / 2, 1.25 / 2, 1.25; and 1."""
    each = np.array([0.5 + 0.3125, 0.625, 1.25, 1.0])
    assert [one for mine in returns(0.5, "group") for one in mine] == pytest.approx((each - each.mean()).tolist())


def test_returns_of_turns_are_compared_with_turns_of_the_same_number() -> None:
    """The first turns: 0.5 + 0 + 1.25, and 1. Nothing is there to compare the others with."""
    assert returns(1.0, "position") == [[pytest.approx(0.375), 0.0], [0.0], [pytest.approx(-0.375)]]


def test_a_penalty_is_subtracted_before_rewards_are_compared() -> None:
    samples = make_samples(group(1.0, 0.0, 1.0), algorithm("dr_grpo"), penalties={"s0": 0.3, "s1": -0.3})
    assert [float(one.advantages[0]) for one in samples] == pytest.approx([0.7 - 2 / 3, 0.3 - 2 / 3, 1 / 3])


def test_advantages_over_a_batch_are_of_trained_tokens_only() -> None:
    settings = algorithm("reinforce_pp")
    samples = [one for found in (group(1.0, 0.0), group(1.0, 1.0)) for one in make_samples(found, settings)]
    samples[0].weights[:2] = 0.0
    done = over_batch(samples, settings.advantage)
    trained = np.concatenate([one.advantages[one.weights != 0] for one in done])
    assert done[0].advantages[:2].tolist() == [0.0, 0.0]
    assert (trained.mean(), trained.std(ddof=1)) == (pytest.approx(0), pytest.approx(1, abs=1e-6))
    assert over_batch(samples, algorithm("grpo").advantage) == samples


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


def test_raft_takes_rewards_as_they_are() -> None:
    samples = make_samples(group(1.0, 0.0, 1.0), algorithm("raft"))
    assert [one.advantages.tolist() for one in samples] == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


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
