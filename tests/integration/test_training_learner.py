"""The learner on small real models: what it trains, what engines get of it, and what a checkpoint keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from transformers import AutoModelForCausalLM

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.train.commands.run import save_model
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.learner import Abandoned, Learner
from gangline.train.learning.learner_settings import LearnerSettings, LoraSettings
from gangline.train.learning.samples import Sample
from support.engines.models import reference_model, write_tiny_model
from support.training.samples import sample

PROMPT = [5, 6, 7, 8]
GOOD, BAD = [11, 12, 2], [14, 15, 2]


def samples(scored: float = 1.0) -> list[Sample]:
    """One response that did well, one that did not."""
    good = sample(PROMPT, GOOD, session_id="s0")
    bad = sample(PROMPT, BAD, session_id="s1")
    good.advantages[:], bad.advantages[:] = scored, -scored
    return [good, bad]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def learner(folder: Path, name: str = "grpo", **settings: Any) -> Learner:
    overrides = settings.pop("overrides", {})
    return Learner(
        folder, algorithm(name, overrides), LearnerSettings.model_validate({"learning_rate": 1e-2, **settings})
    )


def exact_logprobs(folder: Path, response: list[int]) -> np.ndarray:
    """[len(response)] after the prompt, by transformers alone."""
    ids = torch.tensor([[*PROMPT, *response]])
    with torch.inference_mode():
        logits = reference_model(folder)(input_ids=ids).logits[0].log_softmax(-1)
    return logits[len(PROMPT) - 1 : -1].gather(-1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


def logprob(folder: Path, response: list[int]) -> float:
    return float(exact_logprobs(folder, response).sum())


def margin(folder: Path) -> float:
    return logprob(folder, GOOD) - logprob(folder, BAD)


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LoraSettings(rank=4, alpha=8.0)},
    "lora-named": {"lora": LoraSettings(rank=4, targets=("q_proj", "down_proj"))},
    "last-layers": {"last_layers": 1},
    "padded": {"layout": "padded"},
    "small-batches": {"max_places": 1},
    "several-updates": {"updates_per_batch": 2},
    "engine-ratios": {"old_logprobs": "engine"},
    "adafactor": {"optimiser": "adafactor"},
    "checkpointed": {"gradient_checkpointing": True},
    "one-logit-at-a-time": {"logits_chunk": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-checkpointed": {"dtype": "bfloat16", "gradient_checkpointing": True, "layout": "padded"},
    "kl": {"overrides": {"loss.kl.coefficient": 0.1}},
    "kl-lora": {"overrides": {"loss.kl.coefficient": 0.1}, "lora": LoraSettings()},
    "cispo": {"name": "cispo"},
    "entropy": {"overrides": {"loss.entropy": 0.01}},
    "decay": {"decay": {"shape": "cosine", "updates": 20}},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_did_well_becomes_likelier_in_the_weights_that_engines_get(folder: Path, tmp_path: Path, way: str) -> None:
    trained = learner(folder, **WAYS[way])
    trained.save_weights(tmp_path / "before")
    for name, weight in load_file(tmp_path / "before" / "model.safetensors").items():
        assert torch.equal(weight, load_file(folder / "model.safetensors")[name]), f"{name} is what it was loaded as"
    metrics = [trained.step(samples()) for _ in range(3)][-1]
    trained.save_weights(tmp_path / "after")
    assert logprob(tmp_path / "after", GOOD) > logprob(folder, GOOD)
    assert margin(tmp_path / "after") > margin(folder)
    assert metrics["grad_norm"] > 0
    assert metrics["num_samples"] == 2


@pytest.mark.parametrize("penalty", [0.0, 1e-9], ids=["plain", "with a penalty"])
def test_a_session_is_averaged_over_all_of_its_traces_also_those_without_credit(folder: Path, penalty: float) -> None:
    """The penalty makes the learner compute every trace; it weighs nothing here."""
    given = [*samples(), sample(PROMPT, [16, 17, 18, 2], session_id="s0")]
    given[2].advantages[:] = 0.0
    overrides = {"loss.kl.coefficient": penalty, "loss.correction.level": "none"}
    metrics = learner(folder, overrides=overrides).step(given)
    # The first session's mean is over 3 tokens of -1 and 4 of 0.
    assert metrics["loss"] == pytest.approx((-3 / 7 + 1.0) / 2, abs=1e-6)


def test_tokens_of_an_older_policy_are_corrected_for_unless_told_otherwise(folder: Path) -> None:
    """The engine's old policy found every token of the good response four times as likely as the trainer's does now,
    and every token of the bad one four times less likely: weights 1/4, and 4, which is cut at 2."""
    given = samples()
    for one, response, factor in zip(given, (GOOD, BAD), (4.0, 0.25), strict=True):
        one.behaviour_logprobs[:] = exact_logprobs(folder, response) + np.log(factor)
    corrected = learner(folder).step(given)
    assert corrected["loss"] == pytest.approx((-0.25 + 2.0) / 2, rel=1e-4)
    as_fresh = learner(folder, overrides={"loss.correction.level": "none"}).step(given)
    assert as_fresh["loss"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("way", ["full", "lora", "last-layers"])
def test_steps_of_a_usual_size_reach_the_weights_also_when_it_computes_in_bfloat16(
    folder: Path, tmp_path: Path, way: str
) -> None:
    """Ten steps at 1e-6: added to bfloat16 weights, nearly all of them round to nothing."""
    trained = learner(folder, **WAYS[way], dtype="bfloat16", learning_rate=1e-6)
    before = {name: weight.clone() for name, weight in trainable(trained).items()}
    for _ in range(10):
        trained.step(samples())
    after = trainable(trained)
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    reached = [name for name in after if "embed_tokens" not in name]  # there, only those of a few ids have a gradient
    num_changed = sum(int((after[name] != before[name]).sum()) for name in reached)
    assert num_changed > 0.95 * sum(after[name].numel() for name in reached)
    trained.save_state(tmp_path)
    kept = torch.load(tmp_path / "optimiser.pt", weights_only=True)["optimiser"]["state"]
    moments = [moment for state in kept.values() for moment in (state["exp_avg"], state["exp_avg_sq"])]
    assert {moment.dtype for moment in moments} == {torch.float32}


def trainable(trained: Learner) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in trained._trained().items()}  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_computing_in_bfloat16_comes_near_float32(folder: Path, layout: str) -> None:
    exact = learner(folder, layout=layout).step(samples())
    near = learner(folder, layout=layout, dtype="bfloat16").step(samples())
    assert near["engine_gap_mean"] != exact["engine_gap_mean"], "it does compute in bfloat16"
    assert near["engine_gap_mean"] == pytest.approx(exact["engine_gap_mean"], rel=0.02)
    assert near["loss"] == pytest.approx(exact["loss"], abs=0.02)


def test_last_layers_leaves_all_else_as_it_was(folder: Path, tmp_path: Path) -> None:
    trained = learner(folder, last_layers=1)
    trained.step(samples())
    trained.save_weights(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".layers.2." in name for name in changed)


@pytest.mark.parametrize("num_bytes", [1 << 30, 20_000], ids=["one file", "several files"])
def test_engines_load_what_a_learner_saves(
    folder: Path, tmp_path: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gangline.serving.embedded.model import LanguageModel, load_model

    monkeypatch.setattr("gangline.train.learning.compute.lora.PUSHED_AT_ONCE", num_bytes)
    trained = learner(folder, lora=LoraSettings(rank=4))
    trained.step(samples())
    trained.save_weights(tmp_path)
    served = LanguageModel(load_model(folder))
    served.load_weights(tmp_path)
    files = [*tmp_path.glob("*.safetensors")]
    assert (len(files) > 1) == (num_bytes < 1 << 30)
    moved = {name: weight for file in files for name, weight in load_file(file).items()}
    for name, parameter in served.module.named_parameters():
        assert torch.equal(parameter, moved[name])


@pytest.mark.parametrize("way", ["full", "lora"])
def test_weights_are_pushed_a_file_at_a_time_and_in_half_where_asked(
    folder: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {} if way == "full" else {"lora": LoraSettings(rank=4)}
    whole, half = learner(folder, **settings), learner(folder, push_dtype="bfloat16", **settings)
    for one, name in ((whole, "whole"), (half, "half")):
        one.step(samples())
        if one is half:
            monkeypatch.setattr("gangline.train.learning.compute.lora.PUSHED_AT_ONCE", 20_000)
        one.save_weights(tmp_path / name)
    expected = load_file(tmp_path / "whole/model.safetensors")
    files = sorted((tmp_path / "half").glob("*.safetensors"))
    assert len(files) > 3
    parts = [load_file(file) for file in files]
    found = {name: weight for part in parts for name, weight in part.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)
    index = json.loads((tmp_path / "half/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(one, found[name]) for name, one in loaded.named_parameters())


def test_a_trained_model_has_its_own_files_of_weights_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of an earlier end of its run, nor the list of those that it began from."""
    base, target = tmp_path / "base", tmp_path / "model"
    shutil.copytree(folder, base)
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00009.safetensors"}}')
    trained = learner(folder)
    with monkeypatch.context() as patch:
        patch.setattr("gangline.train.learning.compute.lora.PUSHED_AT_ONCE", 20_000)
        save_model(trained, base, target)
    assert len([*target.glob("*.safetensors")]) > 3
    save_model(trained, base, target)
    assert {file.name for file in target.glob("*.safetensors*")} == {"model.safetensors"}
    assert (target / "config.json").exists()


def test_the_gap_to_the_engine_is_measured_before_the_update(folder: Path) -> None:
    given = samples()
    for one, response in zip(given, (GOOD, BAD), strict=True):
        one.behaviour_logprobs[:] = exact_logprobs(folder, response)
    trained = learner(folder)
    exact_metrics = trained.step(given)
    assert exact_metrics["engine_gap_max"] < 1e-4
    assert exact_metrics["engine_effective_sample_share"] > 0.9999
    assert exact_metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert trained.step(given)["engine_gap_max"] > 1e-3, "the weights moved, the samples are those of before"


@pytest.mark.parametrize("way", ["full", "lora", "last-layers"])
def test_entropy_and_divergences_are_metrics_of_every_step(folder: Path, way: str) -> None:
    given = samples()
    for one, response in zip(given, (GOOD, BAD), strict=True):
        one.behaviour_logprobs[:] = exact_logprobs(folder, response)
    trained = learner(folder, **WAYS[way])
    first = trained.step(given)
    assert 0 < first["entropy"] <= np.log(97)
    assert first["behaviour_kl"] == pytest.approx(0, abs=1e-5)
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    second = trained.step(given)
    assert second["behaviour_kl"] > 1e-4, "the weights moved away from those that sampled"
    assert second["reference_kl"] > 1e-4, "and from the model as it was at first"
    assert "reference_kl" not in learner(folder, **WAYS[way], reference_metric=False).step(given)


@pytest.mark.parametrize("way", ["full", "lora"])
def test_a_reward_is_penalised_by_the_way_gone_from_the_reference(folder: Path, tmp_path: Path, way: str) -> None:
    """The sum over a session's trained tokens, by transformers alone; the coefficient grows towards its target."""
    overrides = {"reward_kl": {"coefficient": 0.5, "target": 1e-6, "horizon": 2}}
    trained = learner(folder, overrides=overrides, **WAYS[way])
    assert trained.reward_penalties(samples()) == {"s0": pytest.approx(0, abs=1e-5), "s1": pytest.approx(0, abs=1e-5)}
    metrics = trained.step(samples())
    trained.save_state(tmp_path / "state")
    trained.save_weights(tmp_path / "now")
    coefficient = metrics["reward_kl_coefficient"]
    for one, response in (("s0", GOOD), ("s1", BAD)):
        gone = logprob(tmp_path / "now", response) - logprob(folder, response)
        assert trained.reward_penalties(samples())[one] == pytest.approx(coefficient * gone, abs=1e-4)
        trained.load_state(tmp_path / "state")
    trained.reward_penalties(samples())
    assert trained.step(samples())["reward_kl_coefficient"] != coefficient


def test_samples_of_no_advantage_count_in_the_means_and_are_not_computed(folder: Path, tmp_path: Path) -> None:
    """Half of the traces teach nothing: the others' gradient is half as large."""
    dull = [sample(PROMPT, [20, 21, 2], session_id=f"d{index}") for index in range(2)]
    for one in dull:
        one.advantages[:] = 0.0
    alone, among = learner(folder), learner(folder)
    assert among.step([*samples(), *dull])["grad_norm"] == pytest.approx(alone.step(samples())["grad_norm"] / 2)


def test_a_batch_with_nothing_to_learn_changes_nothing(folder: Path, tmp_path: Path) -> None:
    trained = learner(folder, weight_decay=0.1)
    metrics = trained.step(samples(scored=0.0))
    assert metrics["grad_norm"] == 0.0
    trained.save_weights(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_not_finite_is_refused_before_it_does_harm(folder: Path, tmp_path: Path) -> None:
    trained, given = learner(folder), samples()
    given[0].advantages[:] = np.nan
    with pytest.raises(FloatingPointError, match="learning rate"):
        trained.step(given)
    trained.save_weights(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("way", ["full", "lora", "several-updates"])
def test_one_that_is_restored_goes_on_as_if_nothing_had_been(folder: Path, tmp_path: Path, way: str) -> None:
    settings: dict[str, Any] = {**WAYS[way], "warmup_steps": 5}
    straight = learner(folder, **settings)
    straight.step(samples())
    straight.save_state(tmp_path / "state")
    straight.step(samples())
    straight.save_weights(tmp_path / "straight")
    restored = learner(folder, **settings)
    restored.load_state(tmp_path / "state")
    metrics = restored.step(samples())
    restored.save_weights(tmp_path / "restored")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "restored"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics["learning_rate"] == pytest.approx(1e-2 * 3 / 6 if way != "several-updates" else 1e-2 * 5 / 6)


def test_a_state_of_other_settings_is_refused(folder: Path, tmp_path: Path) -> None:
    learner(folder).save_state(tmp_path)
    with pytest.raises(InvalidRequest, match="other settings"):
        learner(folder, last_layers=1).load_state(tmp_path)


def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not hold a model"):
        learner(tmp_path)
    with pytest.raises(InvalidRequest, match="3 layers"):
        learner(folder, last_layers=4)
    with pytest.raises(InvalidRequest, match="lora does not fit"):
        learner(folder, lora=LoraSettings(targets=("no_such_layer",)))
    with pytest.raises(ValueError, match="leave out last_layers"):
        LearnerSettings(lora=LoraSettings(), last_layers=1)


def test_an_abandoned_step_ends_before_its_next_batch_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    trained = learner(folder)
    trained.save_weights(tmp_path / "before")
    trained.abandon()
    with pytest.raises(Abandoned):
        trained.step(samples())
    trained.save_weights(tmp_path / "after")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert all(torch.equal(before[name], after[name]) for name in before)
