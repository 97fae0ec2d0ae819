"""A critic alongside a small real model: what it learns, what it leaves alone, and what a checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.advantages import batch_advantages
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.critic.head import ValueHead
from gangline.train.learning.learner import Learner
from gangline.train.learning.learner_settings import LearnerSettings, LoraSettings
from gangline.train.learning.samples import Sample
from support.engines.models import write_tiny_model
from support.training.samples import sample

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def learner(folder: Path, name: str = "ppo", **settings: Any) -> Learner:
    overrides = settings.pop("overrides", {})
    return Learner(
        folder, algorithm(name, overrides), LearnerSettings.model_validate({"learning_rate": 1e-2, **settings})
    )


def rewarded(prompt: list[int], response: list[int], reward: float, session_id: str) -> Sample:
    one = sample(prompt, response, session_id=session_id)
    one.advantages[:] = 0.0
    return replace(one, rewards=np.array([*[0.0] * (len(response) - 1), reward]))


def samples() -> list[Sample]:
    """Two prompts, of which one ends well; the second session has two traces."""
    return [
        rewarded(PROMPT, [11, 12, 2], 1.0, "s0"),
        rewarded([9, 8, 7], [14, 15, 16, 2], 0.0, "s1"),
        rewarded([9, 9, 7], [14, 2], 0.0, "s1"),
    ]


def weights_of(trained: Learner, folder: Path) -> dict[str, torch.Tensor]:
    trained.save_weights(folder)
    return load_file(folder / "model.safetensors")


def test_the_first_step_is_that_of_the_rewards_alone(folder: Path, tmp_path: Path) -> None:
    """The critic begins at 0: advantages are the returns, whitened over the batch."""
    given = samples()
    returns = [np.full(len(one.response_ids), 1.0 if one.session_id == "s0" else 0.0) for one in given]
    whitened = batch_advantages(np.concatenate(returns), algorithm("ppo").advantage)
    parts = np.split(whitened, np.cumsum([len(one) for one in returns])[:-1])
    plain = [replace(one, advantages=part, rewards=None) for one, part in zip(given, parts, strict=True)]
    with_critic, without = learner(folder), learner(folder, "ppo_clip")
    metrics, expected = with_critic.step(given), without.step(plain)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert (metrics["explained_variance"], metrics["value_mean"]) == (0.0, 0.0)
    assert metrics["return_mean"] == pytest.approx(3 / 9)
    assert metrics["value_loss"] == pytest.approx(0.5 * 3 / 9, abs=1e-6)
    ours, theirs = weights_of(with_critic, tmp_path / "ours"), weights_of(without, tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == load_file(folder / "model.safetensors").keys(), "engines get no critic"
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


@pytest.mark.parametrize("way", [{}, {"lora": LoraSettings(rank=4)}, {"max_places": 1}, {"dtype": "bfloat16"}], ids=str)
def test_the_critic_learns_which_prompt_ends_well(folder: Path, way: dict[str, Any]) -> None:
    overrides = {"critic.learning_rate": 0.02, "critic.clip": None}
    trained = learner(folder, learning_rate=1e-6, overrides=overrides, **way)
    metrics = [trained.step(samples()) for _ in range(25)]
    assert metrics[-1]["explained_variance"] > 0.8
    assert metrics[-1]["value_loss"] < 0.1 * metrics[0]["value_loss"]
    assert metrics[-1]["value_grad_norm"] > 0


@pytest.mark.parametrize("trunk", [0.0, 1.0])
def test_the_value_loss_reaches_the_policy_only_if_told_to(folder: Path, tmp_path: Path, trunk: float) -> None:
    """Every session earns the same: the first step has no advantages. In the second the head is not 0 any more."""
    given = [replace(one, rewards=np.eye(len(one.response_ids))[-1]) for one in samples()]
    trained = learner(folder, overrides={"critic.trunk": trunk})
    assert trained.step(given)["grad_norm"] == pytest.approx(0.0, abs=1e-6)
    after = weights_of(trained, tmp_path / "one")
    before = load_file(folder / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    plain = learner(folder, overrides={"critic.trunk": 0.0})
    plain.step(given)
    norms = [one.step(given)["grad_norm"] for one in (trained, plain)]
    assert (norms[0] == pytest.approx(norms[1], rel=1e-6)) == (trunk == 0.0)


@pytest.mark.parametrize("trunk", [0.0, 0.3, 1.0])
def test_the_trunk_gets_its_share_of_the_gradient_and_the_head_all_of_it(trunk: float) -> None:
    torch.manual_seed(0)
    head, whole = ValueHead(8, trunk=trunk), ValueHead(8, trunk=1.0)
    with torch.no_grad():
        head.weight.normal_()
        whole.weight.copy_(head.weight)
    gradients, values = list[torch.Tensor](), list[torch.Tensor]()
    for one in (head, whole):
        hidden = torch.arange(40.0).reshape(5, 8).requires_grad_()
        found = one(hidden, torch.tensor([3, 1]))
        (found.square().sum() + 0.0 * hidden.sum()).backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
        values.append(found.detach())
    assert torch.equal(*values)
    assert torch.allclose(gradients[0], trunk * gradients[1])
    assert head.weight.grad is not None
    assert whole.weight.grad is not None
    assert torch.equal(head.weight.grad, whole.weight.grad)


def test_parts_of_a_batch_add_up_to_the_whole(folder: Path, tmp_path: Path) -> None:
    trained = [learner(folder, max_places=places, overrides={"critic.lam": 0.9}) for places in (4096, 1)]
    for one in trained:
        one.step(samples())
    whole, parts = (one.step(samples()) for one in trained)
    assert parts["value_loss"] == pytest.approx(whole["value_loss"], rel=1e-3)
    assert parts["explained_variance"] == pytest.approx(whole["explained_variance"], abs=1e-3)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-2)


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"lora": LoraSettings(rank=4)},
        {"updates_per_batch": 2, "old_logprobs": "engine"},
        {"optimiser": "adafactor"},
    ],
    ids=str,
)
def test_one_that_is_restored_goes_on_as_if_nothing_had_been(folder: Path, tmp_path: Path, way: dict[str, Any]) -> None:
    settings: dict[str, Any] = {**way, "warmup_steps": 5, "overrides": {"critic.learning_rate": 1e-2}}
    straight = learner(folder, **settings)
    straight.step(samples())
    straight.save_state(tmp_path / "state")
    expected = straight.step(samples())
    restored = learner(folder, **settings)
    restored.load_state(tmp_path / "state")
    assert restored.step(samples()) == expected
    assert expected["value_mean"] != 0, "the critic had learned something before"
    one, other = weights_of(straight, tmp_path / "one"), weights_of(restored, tmp_path / "other")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_with_a_critic_is_refused_without_one(folder: Path, tmp_path: Path) -> None:
    learner(folder).save_state(tmp_path)
    with pytest.raises(InvalidRequest, match="critic"):
        learner(folder, "grpo").load_state(tmp_path)
