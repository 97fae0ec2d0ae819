"""The settings of the one loss (`gangline.training.learning.loss`); read without PyTorch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gangline.training.options import TrainingOptions

__all__ = ["Aggregation", "CorrectionSettings", "KLSettings", "LossSettings"]

Aggregation = Literal["token_mean", "sequence_mean", "session_mean", "fixed_length"]
"""The average over the loss of tokens.

token_mean: all trained tokens alike. sequence_mean: each trace its mean, then all traces alike. session_mean: each
session its mean, then all sessions alike, however many traces they have; with one trace a session the same as
`sequence_mean`. fixed_length: the sum over all tokens, by the number of traces times `fixed_length`.
"""


class KLSettings(TrainingOptions):
    """Penalty for going away from the reference model."""

    coefficient: float = Field(default=0.0, ge=0)
    """0 needs no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log p - log p_ref: d, d^2 / 2, exp(-d) + d - 1."""


class CorrectionSettings(TrainingOptions):
    """Truncated importance sampling: for all that differs between the policy that sampled and the trainer's old policy,
    which is staleness, and the rounding of another engine."""

    level: Literal["none", "token", "sequence"] = "token"
    """A weight for each token, or the product of a trace's for all of them. none takes tokens of older policies for
    fresh ones."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""


class LossSettings(TrainingOptions):
    """The default is GRPO's loss."""

    ratio_level: Literal["token", "sequence"] = "token"
    """Level of the importance ratio: each token's, or the geometric mean over its trace (GSPO)."""
    clipping: Literal["surrogate", "weights"] = "surrogate"
    """surrogate: PPO's, a clipped token has no gradient. weights: the ratio is a clipped weight without gradient
    (CISPO), so every token keeps one."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped at 1 - `clip_low`."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + `clip_high`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, the ratio counts as at most this. Only with `surrogate`."""
    kl: KLSettings = KLSettings()
    correction: CorrectionSettings = CorrectionSettings()
    aggregation: Aggregation = "session_mean"
    fixed_length: int = Field(default=4096, gt=0)
    """Tokens; only for `fixed_length`."""

    @model_validator(mode="after")
    def _fits(self) -> LossSettings:
        if self.dual_clip is not None and self.clipping == "weights":
            raise ValueError("dual_clip does nothing with clipping: weights; leave it out.")
        return self
