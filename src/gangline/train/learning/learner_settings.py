"""The settings of the learner (`gangline.train.learning.learner`); read without PyTorch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from gangline.train.learning.packing import LayoutKind
from gangline.train.options import TrainingOptions

__all__ = ["LearnerSettings", "LoraSettings", "RateDecaySettings"]


class LoraSettings(TrainingOptions):
    """Low-rank adapters beside frozen weights, by the library `peft`. Engines get the merged weights."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' output is multiplied by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get one."""


class RateDecaySettings(TrainingOptions):
    shape: Literal["linear", "cosine"]
    updates: int = Field(ge=1)
    """Updates from the first one to the smallest rate, warm-up included: usually `schedule.steps` times
    `updates_per_batch`. Later ones have the smallest rate."""
    least: float = Field(default=0.0, ge=0, lt=1)
    """Smallest rate, as a share of `learning_rate`."""


class LearnerSettings(TrainingOptions):
    """Training every weight, in float32, with AdamW is the default."""

    optimiser: Literal["adamw", "adafactor"] = "adamw"
    """PyTorch's. adamw keeps two moments of each weight, 8 bytes. adafactor keeps the mean square of each row and
    column of a matrix instead: next to nothing."""

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate grows to its full value."""
    decay: RateDecaySettings | None = None
    """How the rate falls after the warm-up; None: it stays."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    """Only for `adamw`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimiser steps that the sessions of one batch are split over."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """The denominator of ratios: the trainer's policy at the start of the batch, or the engine's as reported."""
    lora: LoraSettings | None = None
    last_layers: int | None = Field(default=None, ge=1)
    """Train only so many decoder layers, the last ones; None trains every weight."""
    reference_metric: bool = True
    """Whether a step measures the KL divergence from the reference model, the model as it was at first, where the loss
    does not need it: over one batch of the step. Without `lora` it needs a frozen copy of the trained weights."""
    layout: LayoutKind = "tree"
    max_places: int = Field(default=4096, ge=1)
    """Tokens computed at a time; see `pack_all`."""
    logits_chunk: int = Field(default=512, ge=1)
    """Tokens whose logits exist at a time."""
    gradient_checkpointing: bool | None = None
    """Whether the backward pass computes each layer again instead of keeping its activations: about a third more work.
    None: on a GPU, where memory bounds the length of a row, and not on a CPU, where time does."""
    device: str = "auto"
    """As PyTorch names it; auto is the GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation: bfloat16 multiplies matrices in it, under autocast. Weights, gradients and moments are
    float32 either way: added to a bfloat16 weight, an update of a usual size rounds to nothing."""

    @model_validator(mode="after")
    def _fits(self) -> LearnerSettings:
        if self.lora is not None and self.last_layers is not None:
            raise ValueError("lora freezes the model's own weights: leave out last_layers.")
        if self.decay is not None and self.decay.updates <= self.warmup_steps:
            raise ValueError("decay.updates must be above warmup_steps, which it includes.")
        return self

    def rate_factor(self, number: int) -> float:
        """Share of the learning rate that an update has, counted from 0."""
        if number < self.warmup_steps or self.decay is None:
            return min((number + 1) / (self.warmup_steps + 1), 1.0)
        done = min((number - self.warmup_steps) / (self.decay.updates - self.warmup_steps), 1.0)
        left = 1.0 - done if self.decay.shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return self.decay.least + (1.0 - self.decay.least) * left
