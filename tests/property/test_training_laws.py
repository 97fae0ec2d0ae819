"""Laws of training: what may be shuffled, packed or masked without changing anything."""

from __future__ import annotations

from random import Random
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.session import SessionResult
from gangline.training.collecting.groups import Group
from gangline.training.learning.advantages import AdvantageSettings, group_advantages
from gangline.training.learning.algorithms import Algorithm
from gangline.training.learning.credit import CreditScheme, CreditSettings
from gangline.training.learning.loss import LossInputs, policy_loss
from gangline.training.learning.loss_settings import LossSettings
from gangline.training.learning.packing import Batch, LayoutKind, pack, pack_all
from gangline.training.learning.samples import Sample, make_samples
from gangline.training.learning.shapley import shapley_values, two_level_shapley
from support.training.samples import sample, session, trace

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
    """Sessions of one to four traces, each trace with a reward of its own."""
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
    if not batch.is_causal:
        return np.flatnonzero(batch.visible[place]).tolist()
    width = batch.ids.shape[1]
    row, column = divmod(place, width)
    return [row * width + at for at in range(column + 1) if batch.visible[row, at]]


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
