"""TRL's own GRPOTrainer on groups of ours: the very ids and masks, and the loss that is ours too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.completion import Certificate
from gangline.domain.conversation import SamplingParams
from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Group, ValiditySettings
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.forward import loss_inputs, token_logprobs
from gangline.train.learning.loss import policy_loss
from gangline.train.learning.packing import pack
from gangline.train.learning.samples import Sample, make_samples
from gangline.train.trainers.trl import ServiceRollouts, one_trace_each
from support.engines.models import CONFIGS
from support.training.samples import EXACT, session, trace
from support.training.trl_training import Answers, NoEngines, connecting, make_trainer

# Of what TRL and its dependencies deprecate, and of its `rollout_func`, which it calls experimental.
pytestmark = pytest.mark.filterwarnings("ignore")

TEMPERATURE = 0.7
SAMPLED = msgspec.structs.replace(
    EXACT, logprobs="temperature_scaled", sampling=SamplingParams(temperature=TEMPERATURE)
)
AS_TRL = {"advantage.deviation": "sample", "advantage.epsilon": 1e-4}
"""How TRL scales a group's rewards."""


def sampled(**changes: Any) -> Trace:
    turns = changes.get("turns", ((10, 11, 2),))
    certificates = changes.pop("certificates", (SAMPLED,) * len(turns))
    return trace(certificates=certificates, **changes)


def two_groups() -> tuple[Group, Group]:
    """Of one turn and several, with tool output between, of unequal lengths."""
    long = sampled(turns=((20, 21, 2), (22, 2), (23, 24, 25, 2)), between=(7, 8, 9, 1), prompt_ids=_ids(1, 4, 5, 6))
    middle = sampled(turns=((30, 2), (31, 32, 33)))
    first = Group("a", (session("a0", 1.0, long), session("a1", 0.25, sampled(turns=((26, 2),)))))
    second = Group("b", (session("b0", 0.0, middle), session("b1", 0.5, sampled(turns=((34, 35, 36, 37, 2),)))))
    return first, second


def _ids(*ids: int) -> Any:
    return np.array(ids, np.int32)


@pytest.fixture
def model() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]))


def rows_of(batch: dict[str, Any]) -> dict[tuple[int, ...], dict[str, Any]]:
    """TRL's rows without padding, by their completion."""
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for index in range(len(batch["prompt_ids"])):
        there = batch["completion_mask"][index] == 1
        rows[tuple(batch["completion_ids"][index][there].tolist())] = {
            "prompt": batch["prompt_ids"][index][batch["prompt_mask"][index] == 1].tolist(),
            "mask": batch["tool_mask"][index][there].tolist(),
            "logprobs": batch["sampling_per_token_logps"][index][there].tolist(),
            "advantage": float(batch["advantages"][index]),
        }
    return rows


def check_rows(batch: dict[str, Any], samples: list[Sample]) -> None:
    rows = rows_of(batch)
    assert len(rows) == len(samples) == len(batch["prompt_ids"])
    for one in samples:
        row = rows[tuple(one.response_ids.tolist())]
        assert row["prompt"] == one.prompt_ids.tolist()
        assert row["mask"] == one.weights.tolist()
        assert row["logprobs"] == one.behaviour_logprobs.tolist()
        assert row["advantage"] == pytest.approx(one.advantages[0], abs=1e-6)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", AS_TRL, {"loss_type": "grpo"}),
    ("dapo", AS_TRL, {"loss_type": "dapo", "epsilon_high": 0.28}),
    (
        "dr_grpo",
        {"loss.fixed_length": 32},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 32},
    ),
    (
        "gspo",
        {**AS_TRL, "loss.clip_low": 0.2, "loss.clip_high": 0.2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
]


@pytest.mark.parametrize(("name", "overrides", "theirs"), CASES, ids=[case[0] for case in CASES])
def test_trl_computes_our_loss_on_our_ids(
    model: PreTrainedModel, tmp_path: Path, name: str, overrides: dict[str, Any], theirs: dict[str, Any]
) -> None:
    settings = algorithm(name, {**overrides, "loss.correction.level": "none"})
    groups = two_groups()
    samples = [one for group in groups for one in make_samples(group, settings)]
    batch = pack(samples)
    old: list[Tensor] = []
    ratios: list[float] = []

    def compare(_trainer: Any, model: Any, inputs: dict[str, Any], loss: Tensor) -> None:
        check_rows(inputs, samples)
        logprobs = token_logprobs(model, batch)
        old.append(logprobs.detach())
        ours = policy_loss(loss_inputs(batch, logprobs, old_logprobs=old[0]), settings.loss)
        ratios.append(ours.metrics["ratio_max"])
        assert float(ours.loss) == pytest.approx(float(loss), abs=1e-5)
        parameters = list(model.parameters())
        expected = torch.autograd.grad(loss, parameters, retain_graph=True)
        for one, other in zip(torch.autograd.grad(ours.loss, parameters), expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        assert any(bool((gradient.abs() > 1e-3).any()) for gradient in expected)

    weights = NoEngines()
    with ServiceRollouts(connecting(Answers(*groups), weights)) as rollouts:
        # Two updates on the same rows: in the second, the policy has moved.
        more = {"num_iterations": 2, "max_steps": 2, "temperature": TEMPERATURE, "learning_rate": 1e-4, **theirs}
        make_trainer(model, rollouts, tmp_path, watch=compare, **more).train()
    assert len(old) == 2
    assert ratios[0] == 1.0
    assert ratios[1] > 1.001
    assert weights.versions == [1]  # rows that are used twice are sampled once


def test_the_trainer_pushes_what_it_trained_before_it_asks_again(model: PreTrainedModel, tmp_path: Path) -> None:
    pushed: dict[int, dict[str, Tensor]] = {}

    class Folders(NoEngines):
        async def push(self, save: Any, version: int) -> None:
            save(tmp_path / f"v{version}")
            pushed[version] = load_file(tmp_path / f"v{version}" / "model.safetensors")

    with ServiceRollouts(connecting(Answers(*two_groups()), Folders(), first_version=7)) as rollouts:
        settings = {"temperature": TEMPERATURE, "learning_rate": 1e-3, "max_steps": 3}
        trainer = make_trainer(model, rollouts, tmp_path, **settings)
        trainer.train()
        assert list(pushed) == [7, 8, 9]
        rollouts.push(trainer)
        rollouts.push(trainer)
        assert rollouts.version == 10
    assert list(pushed) == [7, 8, 9, 10]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(pushed[10][name], model.state_dict()[name])
    for before, after in ((7, 8), (8, 9), (9, 10)):
        assert not torch.equal(pushed[before][name], pushed[after][name])


def test_an_adapters_weights_are_pushed_merged(model: PreTrainedModel, tmp_path: Path) -> None:
    from peft import LoraConfig

    pushed: list[dict[str, Tensor]] = []

    class Folders(NoEngines):
        async def push(self, save: Any, version: int) -> None:
            save(tmp_path / f"v{version}")
            pushed.append(load_file(tmp_path / f"v{version}" / "model.safetensors"))

    names = set(model.state_dict())
    with ServiceRollouts(connecting(Answers(*two_groups()), Folders())) as rollouts:
        trainer = make_trainer(
            model,
            rollouts,
            tmp_path,
            temperature=TEMPERATURE,
            learning_rate=1e-2,
            peft=LoraConfig(r=4, target_modules=["up_proj"], task_type="CAUSAL_LM"),
        )
        trainer.train()
        rollouts.push(trainer)
    before, after = pushed
    assert set(before) == set(after) == names - {"lm_head.weight"}  # tied to the embedding
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)}


def refused(model: PreTrainedModel, folder: Path, *groups: Group, **settings: Any) -> None:
    """What the user sees of it, at `train`."""
    collector = settings.pop("collector", {})
    with ServiceRollouts(connecting(Answers(*groups), NoEngines(), **collector)) as rollouts:
        make_trainer(model, rollouts, folder, **{"temperature": TEMPERATURE, **settings}).train()


def test_a_group_that_is_not_whole_ends_the_training_and_says_why(model: PreTrainedModel, tmp_path: Path) -> None:
    broken = Group("a", (session("a0", 1.0, sampled()), session("a1", None, sampled())))
    with pytest.raises(InvalidGroup, match=r"1 of 2 sessions of t0 are valid .*a1: it has no reward"):
        refused(model, tmp_path, broken)


def test_a_session_of_several_traces_is_refused_or_left_out(model: PreTrainedModel, tmp_path: Path) -> None:
    several = Group("a", (session("a0", 1.0, sampled(), sampled()), session("a1", 0.0, sampled())))
    with pytest.raises(InvalidGroup, match=r"a0 has 2 traces .* admit=one_trace_each"):
        refused(model, tmp_path, several)
    refused(model, tmp_path, several, *two_groups(), collector={"admit": one_trace_each})


def test_a_group_of_another_size_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    three = Group("a", tuple(session(f"a{index}", float(index), sampled()) for index in range(3)))
    with pytest.raises(InvalidGroup, match=r"t0 was refused .* group_sessions=2 \(it has 3 sessions\)"):
        refused(model, tmp_path, three)
    one_broken = Group("a", (*three.sessions[:2], session("a2", None, sampled())))
    shrinking = {"validity": ValiditySettings(on_invalid="shrink")}
    with pytest.raises(InvalidGroup, match=r"t0 was refused .* group_sessions=4 \(it has 2 sessions\)"):
        refused(model, tmp_path, one_broken, collector=shrinking, num_generations=4)


@pytest.mark.parametrize(("sampled_at", "told"), [(None, "1"), (0.9, "0.9")])
def test_a_temperature_that_is_not_the_sessions_is_refused(
    model: PreTrainedModel, tmp_path: Path, sampled_at: float | None, told: str
) -> None:
    certificate: Certificate = msgspec.structs.replace(SAMPLED, sampling=SamplingParams(temperature=sampled_at))
    turns = ((10, 2), (11, 2))
    warmer = sampled(turns=turns, certificates=(SAMPLED, certificate))
    group = Group("a", (session("a0", 1.0, sampled()), session("a1", 0.0, warmer)))
    with pytest.raises(InvalidGroup, match=rf"c0001 in a1/0 are of temperature {told}, and the trainer's are of 0\.7"):
        refused(model, tmp_path, group)


def test_evaluation_is_not_for_the_collector(model: PreTrainedModel, tmp_path: Path) -> None:
    with ServiceRollouts(connecting(Answers(*two_groups()), NoEngines())) as rollouts:
        trainer = make_trainer(model, rollouts, tmp_path, temperature=TEMPERATURE, per_device_eval_batch_size=4)
        with pytest.raises(InvalidRequest, match="eval_strategy='no'"):
            trainer.evaluate(trainer.train_dataset)


def test_a_mask_of_weights_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    def halves(one: Trace) -> Any:
        return one.loss_mask * 0.5

    connect = connecting(Answers(*two_groups()), NoEngines())
    with (
        ServiceRollouts(connect, mask=halves) as rollouts,
        pytest.raises(InvalidRequest, match="other than by 0 and 1"),
    ):
        make_trainer(model, rollouts, tmp_path, temperature=TEMPERATURE).train()
