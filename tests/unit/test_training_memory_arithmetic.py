"""The arithmetic of a step's memory: counted by hand, against real tensors, and as the command prints it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.domain.errors import InvalidRequest, NotFound
from gangline.train.learning.compute.memory import GIB, Shape, read_shape, run_disk, step_memory
from gangline.train.learning.forward import token_scores
from gangline.train.learning.learner_settings import LearnerSettings
from gangline.train.learning.packing import pack
from support.engines.models import CONFIGS
from support.training.memory import QWEN_7B, TensorMemory
from support.training.samples import sample

CONTEXT = 32_768
CARD_GIB = 139


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(QWEN_7B))
    return made


@pytest.fixture(scope="module")
def shape(folder: Path) -> Shape:
    return read_shape(folder)


FITTING: dict[str, tuple[dict[str, Any], bool, float]] = {
    "every weight, adamw": ({}, True, 140.4),
    "every weight, adafactor": ({"optimiser": "adafactor"}, True, 83.7),
    "every weight, adafactor, float32": ({"optimiser": "adafactor", "dtype": "float32"}, True, 91.4),
    "ten layers": ({"last_layers": 10}, True, 73.5),
    "adapters": ({"lora": {"rank": 16}}, True, 55.9),
    "adapters, every activation kept": ({"lora": {"rank": 16}}, False, 276.9),
}


@pytest.mark.parametrize("way", FITTING)
def test_a_model_of_seven_billion_at_32k(shape: Shape, way: str) -> None:
    """The table of docs/guides/training.md."""
    fields, checkpointing, expected = FITTING[way]
    settings = LearnerSettings.model_validate({"dtype": "bfloat16", **fields})
    found = step_memory(shape, settings, num_places=CONTEXT, checkpointing=checkpointing)
    assert found.total / GIB == pytest.approx(expected, abs=0.05)


def test_weights_and_moments_by_hand(shape: Shape) -> None:
    assert shape.num_parameters == 7_615_616_512
    full = step_memory(shape, LearnerSettings(), num_places=1, checkpointing=True, has_reference=True)
    assert (full.weights, full.gradients, full.moments, full.reference) == tuple(
        number * 7_615_616_512 for number in (4, 4, 8, 4)
    )
    lora = LearnerSettings.model_validate({"lora": {"rank": 16}})
    # q, o: 3584 + 3584; k, v: 3584 + 512; the MLP's three: 3584 + 18944.
    adapters = 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    found = step_memory(shape, lora, num_places=1, checkpointing=True, has_reference=True)
    assert (found.weights, found.gradients, found.reference) == (4 * (7_615_616_512 + adapters), 4 * adapters, 0)


def test_pushes_and_disk_by_hand(shape: Shape) -> None:
    embedding = 152_064 * 3584
    for fields, push in (
        ({}, 0),
        ({"push_dtype": "bfloat16"}, 2 * embedding),
        ({"lora": {"rank": 16}}, 4 * embedding + 8 * embedding),
    ):
        settings = LearnerSettings.model_validate(fields)
        assert step_memory(shape, settings, num_places=1, checkpointing=True).push == push
    half = LearnerSettings.model_validate({"push_dtype": "bfloat16", "optimiser": "adamw"})
    disk = run_disk(shape, half, keep_weights=1, keep_checkpoints=2)
    assert disk == (2 * 2 * 7_615_616_512, 3 * (4 + 8) * 7_615_616_512, 2 * 7_615_616_512)


SIZES: dict[str, dict[str, int]] = {
    "base": {"num_hidden_layers": 2, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256},
    "other": {"num_hidden_layers": 4, "hidden_size": 192, "head_dim": 48, "intermediate_size": 640},
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_activations_are_those_of_real_tensors(size: str, dtype: str, checkpointing: bool, tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    config.update({"vocab_size": 997, "tie_word_embeddings": False, **SIZES[size]})
    config.save_pretrained(tmp_path)
    model = cast("Any", AutoModelForCausalLM).from_config(copy.deepcopy(config)).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    places = 500
    batch = pack([sample([1], np.random.default_rng(0).integers(1, 997, places - 1).tolist())], "packed")
    memory = TensorMemory(model)
    with memory:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False):
            scores = token_scores(model, batch, chunk=32)
        kept = memory.live_bytes
        scores.logprobs.sum().backward()
    settings = LearnerSettings.model_validate({"dtype": dtype, "logits_chunk": 32})
    found = step_memory(read_shape(tmp_path), settings, num_places=places, checkpointing=checkpointing)
    assert kept == pytest.approx(found.activations, rel=0.12)
    expected = found.gradients + found.activations + max(found.layer, found.logits)
    assert 0.65 * expected < memory.peak_bytes < 1.02 * expected


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="mixture of experts"):
        read_shape(tmp_path)
    with pytest.raises(NotFound, match="configuration"):
        read_shape(tmp_path / "nothing")


def test_the_command_prints_the_parts(folder: Path, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "name: big\nmodel: /nowhere\ndata: {tasks: none.jsonl}\n"
        "learner: {dtype: bfloat16, max_places: 32768, lora: {rank: 16}}\n"
    )
    arguments = ["train", "memory", str(spec), "--model", str(folder)]
    done = CliRunner().invoke(build_app(), [*arguments, "--json"], catch_exceptions=False)
    assert json.loads(done.stdout)["total"] / GIB == pytest.approx(55.9, abs=0.05)
    shown = CliRunner().invoke(build_app(), [*arguments, "--places", "1000"], catch_exceptions=False).stdout
    assert "moments" in shown
    assert "activations" in shown
