"""The settings of the one loss (`gangline.train.learning.loss`); read without PyTorch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gangline.train.options import TrainingOptions

__all__ = [
    "Aggregation",
    "Clipping",
    "CorrectionSettings",
    "CovarianceSettings",
    "KLSettings",
    "LossSettings",
    "RejectionSettings",
    "SoftSettings",
]

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
    """Importance sampling for all that differs between the policy that sampled and the trainer's old policy: staleness,
    and the rounding of another engine."""

    level: Literal["none", "token", "sequence"] = "token"
    """A weight for each token, or the product of a trace's for all of them. none takes tokens of older policies for
    fresh ones."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: weights outside of the bounds are the bound. mask: they are 0, by token as IcePop does, by sequence as
    masked importance sampling does. Tokens of weight 0 count in the loss's means."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""
    floor: float | None = Field(default=None, gt=0)
    """Smallest weight; None: none."""

    @model_validator(mode="after")
    def _is_a_range(self) -> CorrectionSettings:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError("floor must be below cap")
        return self


class RejectionSettings(TrainingOptions):
    """Tokens, or whole traces, that are too far from the policy that sampled them have no part in the loss."""

    by: Literal[
        "token_k1",
        "token_k2",
        "token_k3",
        "sequence_sum_k1",
        "sequence_sum_k2",
        "sequence_sum_k3",
        "sequence_mean_k1",
        "sequence_mean_k2",
        "sequence_mean_k3",
        "sequence_max_k2",
        "sequence_max_k3",
    ]
    """Estimator of the divergence, with w the log of the token's weight: -w, w^2 / 2, exp(w) - w - 1. Of the token, or
    summed, averaged or largest over its trace."""
    most: float = Field(gt=0)
    """Largest divergence, in nats."""
    least: float | None = None
    """Smallest one, for k1, which can be negative; None: -`most`."""

    @model_validator(mode="after")
    def _fits(self) -> RejectionSettings:
        if self.least is not None and not self.by.endswith("k1"):
            raise ValueError(f"least does nothing with {self.by}, which is never negative; leave it out.")
        return self


class SoftSettings(TrainingOptions):
    """Steepness of the soft gate (SAPO)."""

    up: float = Field(default=1.0, gt=0)
    """Where the advantage is positive."""
    down: float = Field(default=1.05, gt=0)
    """Where it is not."""


class CovarianceSettings(TrainingOptions):
    """Tokens whose advantage and log-prob are large together, compared with the micro-batch's means."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the trained tokens that are treated, at least one."""
    least: float = 1.0
    """Only `covariance`: tokens of a larger product are candidates."""
    most: float = 5.0
    """Only `covariance`: tokens of a smaller product are candidates."""
    penalty: float = Field(default=1.0, gt=0)
    """Only `covariance_kl`: factor of |log ratio|."""


Clipping = Literal[
    "surrogate",
    "weights",
    "none",
    "geometric",
    "soft",
    "divergence_tv",
    "divergence_kl",
    "covariance",
    "covariance_kl",
    "quadratic",
]
"""surrogate: PPO's, a clipped token has no gradient. weights: the ratio is a clipped weight without gradient (CISPO),
so every token keeps one. none: no ratio (GPG, REINFORCE). geometric: the geometric mean of a trace's clipped ratios,
whose bounds are of logarithms (GMPO). soft: a gate instead of a bound (SAPO). divergence_tv, divergence_kl: tokens
whose probability has moved too far have no gradient; the bounds are of the divergence (DPPO). covariance: as surrogate,
without some of the tokens that drive the entropy down (Clip-Cov). covariance_kl: unclipped, with a penalty on such
tokens (KL-Cov). quadratic: no ratio, a quadratic penalty of its logarithm (DRO)."""


class LossSettings(TrainingOptions):
    """The default is GRPO's loss."""

    ratio_level: Literal["token", "sequence"] = "token"
    """Level of the importance ratio: each token's, or the geometric mean over its trace (GSPO)."""
    clipping: Clipping = "surrogate"
    """How the ratio enters the loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped at 1 - `clip_low`."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + `clip_high`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, the ratio counts as at most this. Only with `surrogate`."""
    divergence_cap: float = Field(default=20.0, gt=0)
    """Largest ratio, as a weight; only with `divergence_tv` and `divergence_kl`."""
    soft: SoftSettings = SoftSettings()
    """Only with `soft`."""
    covariance: CovarianceSettings = CovarianceSettings()
    """Only with `covariance` and `covariance_kl`."""
    quadratic: float = Field(default=1.0, gt=0)
    """Factor of half the square of the log ratio; only with `quadratic`."""
    entropy: float = Field(default=0.0, ge=0)
    """Bonus for each nat of a token's entropy."""
    kl: KLSettings = KLSettings()
    correction: CorrectionSettings = CorrectionSettings()
    rejection: RejectionSettings | None = None
    """None rejects nothing."""
    aggregation: Aggregation = "session_mean"
    fixed_length: int = Field(default=4096, gt=0)
    """Tokens; only for `fixed_length`."""

    @property
    def moves_all_tokens(self) -> bool:
        """Whether tokens of advantage 0 have a gradient too."""
        return self.kl.coefficient > 0 or self.entropy > 0 or self.clipping in ("covariance_kl", "quadratic")

    @model_validator(mode="after")
    def _fits(self) -> LossSettings:
        if self.dual_clip is not None and self.clipping != "surrogate":
            raise ValueError(f"dual_clip does nothing with clipping: {self.clipping}; leave it out.")
        if self.ratio_level == "sequence" and self.clipping not in ("surrogate", "weights", "soft"):
            raise ValueError(f"clipping: {self.clipping} has no ratio of sequences; leave out ratio_level.")
        return self
