"""The optimal token baseline alongside a small real model: its energies are those of the model's own probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.token_baseline import Energies, optimal_advantages
from gangline.train.learning.learner import Learner
from gangline.train.learning.learner_settings import LearnerSettings
from gangline.train.learning.samples import Sample, make_samples
from support.engines.models import write_tiny_model
from support.training.samples import group, sample

GROUPS = {"task-1": ["s0", "s1", "s2"], "task-2": ["s3", "s4"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def learner(folder: Path, name: str, overrides: dict[str, Any], **settings: Any) -> Learner:
    chosen = LearnerSettings.model_validate({"learning_rate": 1e-3, **settings})
    return Learner(folder, algorithm(name, overrides), chosen)


def samples() -> list[Sample]:
    """The second session of the first group has two traces, and tokens that are not trained on."""
    responses = {
        "s0": [[11, 12, 2]],
        "s1": [[14, 15, 16, 2], [9, 2]],
        "s2": [[11, 13, 14, 2]],
        "s3": [[7, 2]],
        "s4": [[8, 9, 10, 2]],
    }
    rewards = {"s0": 1.0, "s1": 0.5, "s2": 0.0, "s3": 1.0, "s4": 0.25}
    found = list[Sample]()
    for task, sessions in GROUPS.items():
        for one, response in ((name, response) for name in sessions for response in responses[name]):
            weights = [0.0 if token == 15 else 1.0 for token in response]
            made = sample([5, 6, len(found) + 7], response, session_id=one, weights=weights, temperature=0.8)
            rewards_T = np.array([*[0.0] * (len(response) - 1), rewards[one]])
            found.append(replace(made, task_id=task, advantages=np.zeros(len(response)), rewards=rewards_T))
    return found


def by_hand(folder: Path, given: list[Sample]) -> list[Sample]:
    """The samples with their advantages, by whole rows of probabilities."""
    model = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()
    energies, returns, labels = list[float](), list[float](), list[int]()
    names = [one for sessions in GROUPS.values() for one in sessions]
    for one in given:
        ids = torch.tensor([*one.prompt_ids.tolist(), *one.response_ids.tolist()])[None]
        with torch.no_grad():
            rows = (model(ids).logits[0] / 0.8).softmax(-1)[len(one.prompt_ids) - 1 : -1].double()
        for at in np.flatnonzero(one.weights).tolist():
            chance = float(rows[at, one.response_ids[at]])
            correction = min(chance / float(np.exp(one.behaviour_logprobs[at])), 2.0)
            energies.append((1 - 2 * chance + float(rows[at].square().sum())) * correction**2)
            assert one.rewards is not None
            returns.append(float(one.rewards[at:].sum()))
            labels.append(names.index(one.session_id))
    tokens = Energies(np.array(returns), np.array(energies), np.array(labels))
    tasks = [at for at, sessions in enumerate(GROUPS.values()) for _ in sessions]
    advantages = optimal_advantages(tokens, tasks).tolist()
    found = list[Sample]()
    for one in given:
        mine = np.zeros(len(one.response_ids))
        mine[one.weights != 0] = [advantages.pop(0) for _ in range(int((one.weights != 0).sum()))]
        found.append(replace(one, advantages=mine, rewards=None))
    return found


@pytest.mark.parametrize("settings", [{}, {"layout": "padded", "max_places": 16}, {"logits_chunk": 2}], ids=str)
def test_a_step_is_that_of_the_advantages_by_hand(folder: Path, settings: dict[str, Any]) -> None:
    plain = {"advantage.scale": "none", "loss.aggregation": "token_mean"}
    expected = learner(folder, "grpo", plain, **settings).step(by_hand(folder, samples()))
    found = learner(folder, "otb", {}, **settings).step(samples())
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert found["grad_norm"] > 0


def test_samples_have_rewards_of_tokens_and_no_advantages_yet() -> None:
    for one, reward in zip(make_samples(group(1.0, 0.0), algorithm("otb")), (1.0, 0.0), strict=True):
        assert one.rewards is not None
        assert (one.rewards.tolist(), one.advantages.any()) == ([0.0, 0.0, reward], False)


@pytest.mark.parametrize(
    "overrides",
    [
        {"advantage.baseline": "mean"},
        {"critic": {}},
        {"credit.scheme": "last"},
        {"turn_credit.returns": {}},
    ],
)
def test_settings_that_do_not_go_with_a_token_baseline_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        algorithm("otb", overrides)
    with pytest.raises(InvalidRequest, match="token_baseline"):
        algorithm("otb").require_group_advantages("prime-rl")
