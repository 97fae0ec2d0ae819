"""Low-rank adapters, by `peft`: trained next to a model's frozen weights, and merged where it is saved for engines."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from transformers import PreTrainedModel

from gangline.domain.errors import InvalidRequest
from gangline.settings.installation import extra_command
from gangline.train.learning.learner_settings import PUSHED_AT_ONCE, LoraSettings


def with_adapters(model: PreTrainedModel, lora: LoraSettings) -> PreTrainedModel:
    """The model with adapters added to its layers. Raises: InvalidRequest if no layer fits or peft is not installed."""
    try:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - seconds, and only for adapters
    except ImportError as error:
        raise InvalidRequest(f"lora needs the library peft: {extra_command('training')}") from error
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=cast("Any", lora.alpha), target_modules=targets, lora_dropout=0.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
            return cast("PreTrainedModel", get_peft_model(model, config))
    except ValueError as error:
        raise InvalidRequest(f"lora does not fit this model: {error}") from error


def save_merged(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Save a model as engines load it, with merged adapters, in place of an earlier one. Copies of one file's weights
    are in memory at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        earlier.unlink()
    own, config = _own_weights(model), copy.deepcopy(model.config)
    config.dtype = dtype
    plan = split_torch_state_dict_into_shards(own, max_shard_size=PUSHED_AT_ONCE)
    for file, names in plan.filename_to_tensors.items():
        part = {name: _merged(model, name, own[name]).to(dtype).contiguous() for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
        del part  # before the next one is made
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


def _own_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight under its name without adapters, as it is without them."""
    return {
        name.replace(".base_layer.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    }


def _merged(model: PreTrainedModel, name: str, weight: Tensor) -> Tensor:
    """One of `_own_weights` with its adapter merged.

    Merging in place and undoing it would change the frozen weights slightly each time.
    """
    module, _, last = name.rpartition(".")
    adapted = cast("Any", model.get_submodule(module))
    if last != "weight" or not hasattr(adapted, "get_delta_weight"):
        return weight
    return weight + adapted.get_delta_weight("default").detach().to(weight.dtype)
