"""The settings of the learner (`gangline.train.learning.learner`), which can be read without PyTorch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from gangline.train.learning.packing import LayoutKind
from gangline.train.options import TrainingOptions

PUSHED_AT_ONCE = 1 << 30
"""Bytes of a file of pushed weights, unless one weight is larger."""


class LoraSettings(TrainingOptions):
    """Low-rank adapters on frozen weights, by the library `peft`. Engines receive merged weights."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' output is multiplied by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter."""


class RateDecaySettings(TrainingOptions):
    shape: Literal["linear", "cosine"]
    updates: int = Field(ge=1)
    """Updates until the smallest rate is reached, including warm-up: usually `schedule.steps` times
    `updates_per_batch`. Later updates use the smallest rate.
    """
    least: float = Field(default=0.0, ge=0, lt=1)
    """Smallest rate, as a share of `learning_rate`."""


class LearnerSettings(TrainingOptions):
    """By default, trains every weight in float32 with AdamW."""

    optimiser: Literal["adamw", "adafactor"] = "adamw"
    """PyTorch's optimisers. adamw keeps two moments per weight, 8 bytes. adafactor keeps the mean square of each row
    and column of a matrix instead, which is negligible.
    """

    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate grows to its full value."""
    decay: RateDecaySettings | None = None
    """Decay of the rate after the warm-up; None keeps it constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    """Only for `adamw`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    updates_per_batch: int = Field(default=1, ge=1)
    """Number of optimiser steps over which the sessions of a batch are split."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """The denominator of ratios: the trainer's policy at the start of the batch, or the engine's as reported."""
    lora: LoraSettings | None = None
    last_layers: int | None = Field(default=None, ge=1)
    """Train only this many of the last decoder layers; None trains every weight."""
    reference_metric: bool = True
    """Whether a step measures the KL divergence from the reference model (the initial model) over one of its batches,
    if the loss does not need it. Without `lora` this needs a frozen copy of the trained weights.
    """
    layout: LayoutKind = "tree"
    max_places: int = Field(default=4096, ge=1)
    """Tokens computed at a time; see `pack_all`."""
    logits_chunk: int = Field(default=512, ge=1)
    """Tokens whose logits exist at a time."""
    gradient_checkpointing: bool | None = None
    """Whether the backward pass recomputes each layer instead of keeping its activations, for about a third more work.
    None: enabled on a GPU, where memory limits the length of a row, and disabled on a CPU, where time does.
    """
    device: str = "auto"
    """A PyTorch device name; auto is the GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Computation dtype: bfloat16 is used for matrix products, under autocast. Weights, gradients and moments are
    float32 in both cases: a typical update of a bfloat16 weight would round to nothing.
    """
    push_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights that engines load. bfloat16 takes half the disk and time, and loses nothing where the engine
    computes in it.
    """

    @model_validator(mode="after")
    def _fits(self) -> LearnerSettings:
        if self.lora is not None and self.last_layers is not None:
            raise ValueError("lora freezes the model's own weights: leave out last_layers.")
        if self.decay is not None and self.decay.updates <= self.warmup_steps:
            raise ValueError("decay.updates must be above warmup_steps, which it includes.")
        return self

    def rate_factor(self, number: int) -> float:
        """Share of the learning rate used by update `number`, counted from 0."""
        if number < self.warmup_steps or self.decay is None:
            return min((number + 1) / (self.warmup_steps + 1), 1.0)
        done = min((number - self.warmup_steps) / (self.decay.updates - self.warmup_steps), 1.0)
        left = 1.0 - done if self.decay.shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return self.decay.least + (1.0 - self.decay.least) * left
