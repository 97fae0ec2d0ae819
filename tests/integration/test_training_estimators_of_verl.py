"""Advantage estimators against verl's own functions, on random groups, in float64."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import Tensor

from gangline.train.collecting.groups import Greedy, Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.resampling import ResamplingSettings, draw_weights
from gangline.train.learning.credit.token_baseline import Energies, optimal_advantages, returns_of_traces
from gangline.train.learning.samples import Sample, make_samples, over_batch
from support.training.samples import session, trace

WIDTH, NUM_GROUPS, NUM_SAMPLES = 11, 4, 8


@pytest.fixture(scope="module")
def verl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        return importlib.import_module("verl.trainer.ppo.core_algos")


@dataclass
class Step:
    """[G, S] of sessions of one trace each."""

    parts: dict[str, NDArray[np.float64]]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @property
    def mask(self) -> Tensor:
        """[G * S, WIDTH]"""
        return torch.tensor(np.arange(WIDTH) < self.lengths.reshape(-1, 1)).double()

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(NUM_GROUPS), NUM_SAMPLES)

    def at_the_end(self, rewards: NDArray[np.float64]) -> Tensor:
        """Rewards of the last tokens, as verl has them."""
        scores = torch.zeros(rewards.size, WIDTH, dtype=torch.float64)
        scores[torch.arange(rewards.size), torch.tensor(self.lengths.reshape(-1)) - 1] = torch.tensor(
            rewards.reshape(-1)
        )
        return scores

    def groups(self) -> list[Group]:
        return [
            Group(f"task-{at}", tuple(self._session(at, number) for number in range(NUM_SAMPLES)))
            for at in range(NUM_GROUPS)
        ]

    def _session(self, at: int, number: int) -> Any:
        parts = {name: {"reward": float(values[at, number])} for name, values in self.parts.items()}
        one = trace(turns=[[7] * int(self.lengths[at, number])])
        return session(f"s{at}-{number}", float(self.rewards[at, number]), one, reward_details={"parts": parts})


def step_of(seed: int, levels: int = 3) -> Step:
    """levels: values of a part; few, so that rewards are alike in some groups."""
    random = np.random.default_rng(seed)
    shape = NUM_GROUPS, NUM_SAMPLES
    parts = {name: random.integers(0, levels, shape) / 1.0 for name in ("format", "right")}
    parts["right"][0] = 0.0
    return Step(parts, parts["format"] * parts["right"], random.integers(1, WIDTH + 1, shape))


def samples_of(given: Step, name: str, overrides: dict[str, Any]) -> list[Sample]:
    settings = algorithm(name, {"advantage.deviation": "sample", **overrides})
    return over_batch([one for group in given.groups() for one in make_samples(group, settings)], settings.advantage)


def joined(samples: list[Sample]) -> NDArray[np.float64]:
    return np.concatenate([sample.advantages for sample in samples])


@given(st.integers(0, 10**6), st.sampled_from([{}, {"format": 0.25, "right": 2.0}]))
def test_gdpo_is_as_verls(verl: Any, seed: int, weights: dict[str, float]) -> None:
    given = step_of(seed)
    mask = given.mask
    config = {"gdpo_reward_keys": list(given.parts), "gdpo_reward_weights": list(weights.values()) or None}
    ids = torch.zeros(len(mask), 1)
    theirs, _ = verl.compute_gdpo_outcome_advantage(
        given.at_the_end(given.rewards),
        mask,
        given.labels,
        config=OmegaConf.create(config),
        non_tensor_batch={name: values.reshape(-1) for name, values in given.parts.items()},
        batch={"prompts": ids, "attention_mask": torch.cat([ids + 1, mask], 1).long()},
    )
    ours = joined(samples_of(given, "gdpo", {"advantage.part_weights": weights}))
    # verl holds the parts in single precision.
    assert ours == pytest.approx(theirs[mask > 0].numpy(), abs=2e-5)


@given(st.integers(0, 10**6))
def test_gpgs_factor_is_as_verls(verl: Any, seed: int) -> None:
    given = step_of(seed)
    theirs, _ = verl.compute_gpg_outcome_advantage(given.at_the_end(given.rewards), given.mask, given.labels)
    ours = joined(samples_of(given, "gpg", {"advantage.factor": "rewarded"}))
    assert ours == pytest.approx(theirs[given.mask > 0].numpy(), abs=2e-6)


@given(st.integers(0, 10**6))
def test_remax_is_as_verls(verl: Any, seed: int) -> None:
    given = step_of(seed)
    greedy = np.random.default_rng(seed + 1).random(NUM_GROUPS)
    baselines = torch.tensor(np.repeat(greedy, NUM_SAMPLES))
    theirs, _ = verl.compute_remax_outcome_advantage(given.at_the_end(given.rewards), baselines, given.mask)
    groups = [replace(group, greedy=Greedy(float(one), 3)) for group, one in zip(given.groups(), greedy, strict=True)]
    ours = joined([one for group in groups for one in make_samples(group, algorithm("remax"))])
    assert ours == pytest.approx(theirs[given.mask > 0].numpy(), abs=1e-9)


METHODS = {"power": "pow", "extremes": "max_min", "best": "max_random"}


@given(st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=1, max_size=9), st.sampled_from(sorted(METHODS)))
def test_chances_of_resampling_are_as_verls(verl: Any, scores: list[float], method: str) -> None:
    asked = list[Tensor]()

    class Drawn(Exception):
        pass

    def multinomial(weights: Tensor, *_: Any, **__: Any) -> Tensor:
        asked.append(weights)
        raise Drawn

    data = SimpleNamespace(batch={"token_level_scores": torch.tensor(scores, dtype=torch.float64)[:, None]})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "multinomial", multinomial)
        with pytest.raises(Drawn):
            verl.compute_pf_ppo_reweight_data(data, METHODS[method], 1.5)
    ours = draw_weights(scores, ResamplingSettings.model_validate({"method": method, "power": 1.5}))
    assert ours == pytest.approx(asked[0].numpy(), abs=1e-7)


@given(st.integers(0, 10**6), st.booleans())
def test_the_optimal_token_baseline_is_as_verls(verl: Any, seed: int, is_corrected: bool) -> None:
    """By tokens that are trained on, with holes in the mask, as of tool output."""
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    mask = (noise(NUM_GROUPS * NUM_SAMPLES, WIDTH) < 0.6).double()
    mask[:, 0] = 1
    rewards = noise(len(mask), WIDTH) * mask
    logprobs, squares = -3 * noise(len(mask), WIDTH), noise(len(mask), WIDTH)
    weights = 2 * noise(len(mask), WIDTH) if is_corrected else None
    labels = np.repeat(np.arange(NUM_GROUPS), NUM_SAMPLES)
    theirs, _ = verl.compute_multi_turn_optimal_token_baseline_advantage(
        rewards, mask, labels, logprobs, squares, rollout_is_weights=weights
    )
    energies = 1 - 2 * logprobs.exp() + squares
    energies = energies if weights is None else energies * weights**2
    chosen = mask.numpy() > 0
    rows = np.broadcast_to(np.arange(len(mask))[:, None], chosen.shape)[chosen]
    tokens = Energies(returns_of_traces(rewards.numpy()[chosen], rows), energies.numpy()[chosen], rows)
    assert optimal_advantages(tokens, labels.tolist()) == pytest.approx(theirs.numpy()[chosen], abs=1e-9)
