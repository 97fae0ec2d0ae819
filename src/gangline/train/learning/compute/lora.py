"""Low-rank adapters, by `peft`: trained next to a model's frozen weights, and merged for engines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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


def whole_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight under its name without adapters, with the adapters merged.

    Merging in place and undoing it would change the frozen weights slightly each time.
    """
    deltas = dict(_deltas(model))
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        if "lora_" in name:
            continue
        weight = parameter.detach()
        if module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
            name = f"{module}.{last}"
            weight = weight + deltas[module].to(weight.dtype) if last == "weight" else weight
        yield name, weight.contiguous()


def _deltas(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The change that each adapter makes to its layer's weight."""
    for name, module in cast("Any", model).named_modules():
        if hasattr(module, "get_delta_weight"):
            yield name, module.get_delta_weight("default").detach()
