"""Laws of training: what may be shuffled, packed or masked without changing anything."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Group
from gangline.train.learning.advantages import AdvantageSettings, group_advantages
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.credit.coalitions import shapley_values, two_level_shapley
from gangline.train.learning.credit.traces import CreditScheme, CreditSettings
from gangline.train.learning.credit.turns import TurnCreditSettings
from gangline.train.learning.loss import LossInputs, policy_loss
from gangline.train.learning.loss_settings import LossSettings
from gangline.train.learning.packing import Batch, LayoutKind, pack, pack_all
from gangline.train.learning.samples import Sample, make_samples
from support.training.samples import sample, scored, session, trace

rewards_of_sessions = st.floats(-2, 2, allow_subnormal=False).map(lambda one: round(one, 3))
advantage_settings = st.builds(
    AdvantageSettings,
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    scale=st.sampled_from(["deviation", "none"]),
    deviation=st.sampled_from(["population", "sample"]),
    clip=st.sampled_from([None, 1.0]),
)
kinds = st.sampled_from(["padded", "packed", "tree"])


@given(st.lists(rewards_of_sessions, max_size=12), advantage_settings, st.randoms())
def test_the_order_of_sessions_does_not_matter(
    rewards: list[float], settings: AdvantageSettings, random: Random
) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    found = group_advantages(rewards, settings)
    assert group_advantages([rewards[index] for index in order], settings) == pytest.approx(found[order], abs=1e-9)


@given(st.lists(rewards_of_sessions, max_size=12), st.sampled_from(["mean", "leave_one_out"]))
def test_advantages_of_sessions_sum_to_nothing(rewards: list[float], baseline: str) -> None:
    settings = AdvantageSettings.model_validate({"baseline": baseline, "scale": "none"})
    assert group_advantages(rewards, settings).sum() == pytest.approx(0, abs=1e-9)


@st.composite
def groups(draw: st.DrawFn, rewards: st.SearchStrategy[float]) -> Group:
    """Sessions of one to four traces, each trace with its own reward."""
    sessions = list[SessionResult]()
    for number in range(draw(st.integers(1, 6))):
        own = draw(st.lists(rewards_of_sessions, min_size=1, max_size=4))
        sessions.append(session(f"s{number}", draw(rewards), *(trace(reward=one) for one in own)))
    return Group("task-1", tuple(sessions))


credit_settings = st.builds(
    CreditSettings, scheme=st.sampled_from(get_args(CreditScheme)), discount=st.sampled_from([0.1, 0.9, 1.0])
)


@given(groups(st.just(0.7)), advantage_settings, credit_settings)
def test_sessions_of_one_reward_teach_nothing_under_any_credit(
    group: Group, settings: AdvantageSettings, credit: CreditSettings
) -> None:
    for sample_ in make_samples(group, Algorithm(advantage=settings, credit=credit)):
        assert not sample_.advantages.any()


@given(groups(rewards_of_sessions), advantage_settings, credit_settings)
def test_credit_never_turns_a_session_round(group: Group, settings: AdvantageSettings, credit: CreditSettings) -> None:
    """Each trace takes from none to all of its session's advantage, and one of them takes some."""
    compared = group_advantages([one.reward or 0.0 for one in group.sessions], settings)
    taken: dict[str, list[float]] = {}
    for sample_ in make_samples(group, Algorithm(advantage=settings, credit=credit)):
        taken.setdefault(sample_.session_id, []).append(float(sample_.advantages[0]))
    for one, advantage in zip(group.sessions, compared, strict=True):
        shares = np.array(taken[one.session_id]) * np.sign(advantage)
        assert ((shares >= 0) & (shares <= abs(advantage) * (1 + 1e-12))).all()
        assert shares.any() == (advantage != 0)


@st.composite
def scored_groups(draw: st.DrawFn) -> Group:
    """Sessions of one or two traces; turns have scores or none."""
    scores = st.lists(st.one_of(st.none(), rewards_of_sessions), min_size=1, max_size=4)
    sessions = [
        session(
            f"s{number}", draw(rewards_of_sessions), *(scored(*draw(scores)) for _ in range(draw(st.integers(1, 2))))
        )
        for number in range(draw(st.integers(1, 5)))
    ]
    return Group("task-1", tuple(sessions))


def rescored(group: Group, change: Callable[[float], float]) -> Group:
    """The group with other scores for its scored turns."""

    def changed(one: SessionResult) -> SessionResult:
        assert one.trajectory is not None
        traces = (
            scored(*(None if span.score is None else change(span.score) for span in trace.spans))
            for trace in one.trajectory.traces
        )
        return session(one.session_id, one.reward, *traces)

    return Group(group.task_id, tuple(map(changed, group.sessions)))


def by_turns(group: Group, settings: AdvantageSettings, weight: float = 1.0) -> list[list[float]]:
    """Advantages of each sample's tokens."""
    credit = TurnCreditSettings(weight=weight)
    samples = make_samples(group, Algorithm(advantage=settings, turn_credit=credit))
    return [sample.advantages.tolist() for sample in samples]


def flattened(lists: list[list[float]]) -> list[float]:
    return [one for inner in lists for one in inner]


@given(scored_groups(), advantage_settings)
def test_turns_of_one_score_or_of_no_weight_leave_the_sessions_credit(
    group: Group, settings: AdvantageSettings
) -> None:
    plain = make_samples(group, Algorithm(advantage=settings))
    assert by_turns(group, settings, 0.0) == [sample.advantages.tolist() for sample in plain]
    assert by_turns(rescored(group, lambda _: 0.7), settings) == by_turns(group, settings, 0.0)


@given(scored_groups(), advantage_settings, rewards_of_sessions, st.sampled_from([0.0, 0.5, 2.0]))
def test_a_constant_on_every_score_changes_nothing(
    group: Group, settings: AdvantageSettings, constant: float, weight: float
) -> None:
    moved = by_turns(rescored(group, lambda score: score + constant), settings, weight)
    assert flattened(moved) == pytest.approx(flattened(by_turns(group, settings, weight)), abs=1e-6)


@given(scored_groups(), advantage_settings.filter(lambda one: one.clip is None))
def test_what_turns_gain_other_turns_of_the_group_lose(group: Group, settings: AdvantageSettings) -> None:
    gained = np.array(flattened(by_turns(group, settings))) - flattened(by_turns(group, settings, 0.0))
    assert gained.sum() == pytest.approx(0.0, abs=1e-6), "turns are of one length"
    nothing = [gain for gain, score in zip(gained, _score_of_each_token(group), strict=True) if score is None]
    assert nothing == pytest.approx([0.0] * len(nothing), abs=1e-9)


def _score_of_each_token(group: Group) -> list[float | None]:
    found = list[float | None]()
    for trace_ in (trace_ for one in group.sessions if one.trajectory for trace_ in one.trajectory.traces):
        scores: list[float | None] = [None] * len(trace_.response_ids)
        for span in trace_.spans:
            scores[span.start : span.end] = [span.score] * (span.end - span.start)
        found += scores
    return found


@given(scored_groups(), st.sampled_from(["mean", "leave_one_out"]))
def test_a_better_turn_gains_more(group: Group, baseline: str) -> None:
    settings = AdvantageSettings.model_validate({"baseline": baseline, "scale": "none"})
    gained = np.array(flattened(by_turns(group, settings))) - flattened(by_turns(group, settings, 0.0))
    scored_tokens = [
        (score, gain) for score, gain in zip(_score_of_each_token(group), gained, strict=True) if score is not None
    ]
    for (score, gain), (other, other_gain) in pairwise(sorted(scored_tokens)):
        assert gain <= other_gain + 1e-9 or score == pytest.approx(other)


@st.composite
def groups_of_players(draw: st.DrawFn) -> Group:
    """Sessions of traces by named roles or by nobody; some traces have their own rewards."""
    sessions = list[SessionResult]()
    for number in range(draw(st.integers(1, 5))):
        traces = [
            played(draw(st.sampled_from(["lead", "coder", None])), draw(st.one_of(st.none(), rewards_of_sessions)))
            for _ in range(draw(st.integers(1, 3)))
        ]
        sessions.append(session(f"s{number}", draw(rewards_of_sessions), *traces))
    return Group("task-1", tuple(sessions))


def played(role: str | None, reward: float | None) -> Trace:
    one = trace(reward=reward)
    return msgspec.structs.replace(
        one, spans=tuple(msgspec.structs.replace(span, agent_role=role) for span in one.spans)
    )


def by_session_and_role(group: Group, settings: AdvantageSettings) -> dict[tuple[str, str | None], float]:
    roles = {
        one.trace_id: one.spans[0].agent_role for it in group.sessions if it.trajectory for one in it.trajectory.traces
    }
    samples = make_samples(group, Algorithm(advantage=settings, compare="roles"))
    found = {(one.session_id, roles[one.trace_id]): float(one.advantages[0]) for one in samples}
    assert all((one.advantages == found[one.session_id, roles[one.trace_id]]).all() for one in samples)
    return found


@given(groups_of_players(), advantage_settings.filter(lambda one: one.clip is None))
def test_what_a_role_gains_in_one_session_it_loses_in_others(group: Group, settings: AdvantageSettings) -> None:
    found = by_session_and_role(group, settings)
    for role in {role for _, role in found}:
        assert sum(gain for (_, of), gain in found.items() if of == role) == pytest.approx(0.0, abs=1e-6)


@given(groups_of_players(), advantage_settings)
def test_a_role_does_not_depend_on_the_rewards_of_another(group: Group, settings: AdvantageSettings) -> None:
    def changed(one: SessionResult) -> SessionResult:
        assert one.trajectory is not None
        traces = (
            msgspec.structs.replace(it, reward=0.123) if it.spans[0].agent_role == "lead" else it
            for it in one.trajectory.traces
        )
        return session(one.session_id, one.reward, *traces)

    before = by_session_and_role(group, settings)
    after = by_session_and_role(Group(group.task_id, tuple(map(changed, group.sessions))), settings)
    assert {key: gain for key, gain in after.items() if key[1] != "lead"} == pytest.approx(
        {key: gain for key, gain in before.items() if key[1] != "lead"}
    )


@given(groups(rewards_of_sessions), advantage_settings)
def test_one_role_without_rewards_of_its_own_is_plain_grpo(group: Group, settings: AdvantageSettings) -> None:
    def plain(one: SessionResult) -> SessionResult:
        assert one.trajectory is not None
        return session(one.session_id, one.reward, *(played("solver", None) for _ in one.trajectory.traces))

    alone = Group(group.task_id, tuple(map(plain, group.sessions)))
    by_roles = make_samples(alone, Algorithm(advantage=settings, compare="roles"))
    by_sessions = make_samples(alone, Algorithm(advantage=settings))
    for one, other in zip(by_roles, by_sessions, strict=True):
        assert one.advantages == pytest.approx(other.advantages)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Few ids, so that prefixes are shared, by prompts with responses too."""
    ids = st.integers(1, 3)
    made = list[Sample]()
    for number in range(draw(st.integers(1, 7))):
        response = draw(st.lists(ids, max_size=6))
        weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=len(response), max_size=len(response)))
        prompt = draw(st.lists(ids, min_size=1, max_size=6))
        session_id = f"s{draw(st.integers(0, 3))}"
        made.append(sample(prompt, response, session_id=session_id, weights=weights, seed=number))
    return made


@given(sample_lists(), kinds)
def test_packing_keeps_every_sample(samples: list[Sample], kind: LayoutKind) -> None:
    batch = pack(samples, kind)
    for one, path in zip(samples, batch.paths, strict=True):
        assert batch.ids.reshape(-1)[path].tolist() == [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
        assert batch.positions.reshape(-1)[path].tolist() == list(range(len(path)))
        assert _seen_from(batch, int(path[-1])) == path.tolist()
    for at, target, number in zip(batch.sources, batch.targets, batch.traces, strict=True):
        path = batch.paths[number].tolist()
        after = path[path.index(at) + 1]
        assert batch.ids.reshape(-1)[after] == target
    assert len(batch.targets) == sum(int((one.weights != 0).sum()) for one in samples)


def _seen_from(batch: Batch, place: int) -> list[int]:
    """Places that the token at `place` attends to."""
    for start, end, prefix in batch.segments:
        if start <= place < end:
            return [*prefix.tolist(), *range(start, place + 1)]
    assert not batch.segments
    width = batch.ids.shape[1]
    return list(range(place - place % width, place + 1))


@given(sample_lists())
def test_a_tree_holds_each_prefix_once(samples: list[Sample]) -> None:
    prefixes = {
        tuple(ids[:end])
        for one in samples
        for ids in [[*one.prompt_ids.tolist(), *one.response_ids.tolist()]]
        for end in range(1, len(ids) + 1)
    }
    assert pack(samples, "tree").num_places == len(prefixes)


@given(sample_lists(), kinds, st.integers(1, 40))
def test_batches_hold_every_sample_once_and_sessions_whole(
    samples: list[Sample], kind: LayoutKind, max_places: int
) -> None:
    batches = list(pack_all(samples, kind, max_places=max_places))
    assert sorted(id(one) for batch in batches for one in batch.samples) == sorted(map(id, samples))
    sessions = [{one.session_id for one in batch.samples} for batch in batches]
    assert sum(map(len, sessions)) == len(set[str]().union(*sessions))
    assert all(
        batch.num_places <= max_places or len(found) == 1 for batch, found in zip(batches, sessions, strict=True)
    )


@given(sample_lists(), st.sampled_from(["token_mean", "sequence_mean", "session_mean"]), st.integers(0, 99))
def test_masked_tokens_never_matter(samples: list[Sample], aggregation: str, seed: int) -> None:
    settings = LossSettings.model_validate({"aggregation": aggregation})
    random = np.random.default_rng(seed)
    weights = np.concatenate([one.weights for one in samples]).astype(np.float64)
    numbers = np.repeat(np.arange(len(samples)), [len(one.response_ids) for one in samples])
    values, noise = random.normal(size=(3, len(weights))), random.normal(size=(3, len(weights)))

    def loss(logprobs: np.ndarray, behaviour: np.ndarray, advantages: np.ndarray) -> float:
        arrays = [torch.from_numpy(one) for one in (logprobs, behaviour, advantages, weights, numbers)]
        return float(policy_loss(LossInputs(*arrays), settings).loss)

    assert loss(*values) == loss(*np.where(weights == 0, noise, values))


@given(st.lists(st.floats(-1, 1), min_size=16, max_size=16))
def test_shapley_values_share_out_everything(values: list[float]) -> None:
    players = ["a", "b", "c", "d"]

    def value(coalition: frozenset[str]) -> float:
        return values[sum(1 << players.index(one) for one in coalition)]

    for found in (shapley_values(players, value), two_level_shapley("a", players[1:], value)):
        assert sum(found.values()) == pytest.approx(values[15] - values[0], abs=1e-9)
