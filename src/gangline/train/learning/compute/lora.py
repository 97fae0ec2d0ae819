"""Low-rank adapters, by `peft`: trained next to a model's frozen weights, and merged for engines."""

from __future__ import annotations

import warnings
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from gangline.domain.errors import InvalidRequest
from gangline.settings.installation import extra_command
from gangline.train.learning.learner_settings import LoraSettings


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


def own_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight under its name without adapters, as it is without them."""
    return {
        name.replace(".base_layer.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    }


def merged(model: PreTrainedModel, name: str, weight: Tensor) -> Tensor:
    """One of `own_weights` with its adapter merged.

    Merging in place and undoing it would change the frozen weights slightly each time.
    """
    module, _, last = name.rpartition(".")
    adapted = cast("Any", model.get_submodule(module))
    if last != "weight" or not hasattr(adapted, "get_delta_weight"):
        return weight
    return weight + adapted.get_delta_weight("default").detach().to(weight.dtype)
