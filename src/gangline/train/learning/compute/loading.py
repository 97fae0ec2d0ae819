"""Loads the model to train onto its device and freezes the layers that are not trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.train.learning.compute.head import require_known_head
from gangline.train.learning.learner_settings import LearnerSettings

_log = logging.getLogger("gangline.learner")


def load_model(folder: Path, settings: LearnerSettings) -> PreTrainedModel:
    """The model in float32, on the device of the settings. Raises: NotFound, InvalidRequest."""
    loader = cast("Any", AutoModelForCausalLM)
    try:
        model: PreTrainedModel = loader.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise NotFound(f"{folder} does not hold a model that can be loaded: {error}") from error
    name = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cpu" and settings.dtype == "float32":
        _log.warning("learner.slow device=%s message=float32 is slow there: set learner.dtype: bfloat16", device)
    wanted = settings.gradient_checkpointing
    if device.type != "cpu" if wanted is None else wanted:
        cast("Any", model).activation_checkpointing_enable({"use_reentrant": False})
    model = cast("PreTrainedModel", cast("Any", model).to(device))
    require_known_head(model)
    return model


def freeze_all_but(model: PreTrainedModel, num_layers: int) -> None:
    """Train only the last layers. Raises: InvalidRequest."""
    layers = cast("Any", model).get_decoder().layers
    if num_layers > len(layers):
        raise InvalidRequest(f"last_layers is {num_layers}, and the model has {len(layers)} layers.")
    model.requires_grad_(False)
    for layer in layers[len(layers) - num_layers :]:
        layer.requires_grad_(True)
