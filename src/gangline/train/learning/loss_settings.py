"""The settings of the loss (`gangline.train.learning.loss`), which can be read without PyTorch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gangline.train.options import TrainingOptions

Aggregation = Literal["token_mean", "sequence_mean", "session_mean", "fixed_length"]
"""How the losses of tokens are averaged.

token_mean: over all trained tokens. sequence_mean: over each trace, then over traces. session_mean: over each session,
then over sessions, however many traces they have; with one trace per session this equals `sequence_mean`. fixed_length:
the sum over all tokens, divided by the number of traces times `fixed_length`.
"""


class KLSettings(TrainingOptions):
    """Penalty for moving away from the reference model."""

    coefficient: float = Field(default=0.0, ge=0)
    """0 needs no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log p - log p_ref: d, d^2 / 2, exp(-d) + d - 1."""


class CorrectionSettings(TrainingOptions):
    """Importance sampling for differences between the sampling policy and the trainer's old policy: staleness, and
    rounding in another engine.
    """

    level: Literal["none", "token", "sequence"] = "token"
    """A weight per token, or the product over a trace for all of its tokens. none treats tokens of older policies as
    fresh.
    """
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: clamps weights to the bounds. mask: sets weights outside the bounds to 0, by token as IcePop does, or
    by sequence as masked importance sampling does. Tokens of weight 0 count in the loss's means.
    """
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""
    floor: float | None = Field(default=None, gt=0)
    """Smallest weight; None: no lower bound."""

    @model_validator(mode="after")
    def _is_a_range(self) -> CorrectionSettings:
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError("floor must be below cap")
        return self


class RejectionSettings(TrainingOptions):
    """Excludes tokens, or whole traces, that are too far from the policy that sampled them."""

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
    """Estimator of the divergence, with w the log of the token's weight: -w, w^2 / 2, exp(w) - w - 1. Per token, or the
    sum, mean or maximum over its trace.
    """
    most: float = Field(gt=0)
    """Largest divergence, in nats."""
    least: float | None = None
    """Smallest divergence, for k1, which can be negative; None: -`most`."""

    @model_validator(mode="after")
    def _fits(self) -> RejectionSettings:
        if self.least is not None and not self.by.endswith("k1"):
            raise ValueError(f"least does nothing with {self.by}, which is never negative; leave it out.")
        return self


class SoftSettings(TrainingOptions):
    """Steepness of the soft gate (SAPO)."""

    up: float = Field(default=1.0, gt=0)
    """If the advantage is positive."""
    down: float = Field(default=1.05, gt=0)
    """Otherwise."""


class CovarianceSettings(TrainingOptions):
    """Treats tokens whose advantage and log-prob are large together, relative to the micro-batch's means."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the trained tokens that are treated, at least one token."""
    least: float = 1.0
    """Only `covariance`: candidates have a product above this."""
    most: float = 5.0
    """Only `covariance`: candidates have a product below this."""
    penalty: float = Field(default=1.0, gt=0)
    """Only `covariance_kl`: factor of |log ratio|."""


class DistillationSettings(TrainingOptions):
    """Moves the policy towards a teacher, on the tokens that the policy sampled. To each token's advantage it adds
    log p_teacher - log p, whose gradient is that of the reverse KL divergence.
    """

    coefficient: float = Field(default=1.0, gt=0)
    """Factor of the difference, in nats."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Factor of the advantage from rewards; 0: only the teacher counts."""


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
"""surrogate: PPO's; a clipped token has no gradient. weights: the ratio is a clipped weight without gradient (CISPO),
so every token keeps a gradient. none: no ratio (GPG, REINFORCE). geometric: the geometric mean of a trace's clipped
ratios, with bounds on logarithms (GMPO). soft: a gate instead of a bound (SAPO). divergence_tv, divergence_kl: tokens
whose probability moved too far have no gradient; the bounds apply to the divergence (DPPO). covariance: like surrogate,
without some of the tokens that reduce the entropy (Clip-Cov). covariance_kl: unclipped, with a penalty on such tokens
(KL-Cov). quadratic: no ratio, but a quadratic penalty of its logarithm (DRO).
"""


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
    """Upper bound of the ratio if the advantage is negative. Only with `surrogate`."""
    divergence_cap: float = Field(default=20.0, gt=0)
    """Largest ratio, as a weight; only with `divergence_tv` and `divergence_kl`."""
    soft: SoftSettings = SoftSettings()
    """Only with `soft`."""
    covariance: CovarianceSettings = CovarianceSettings()
    """Only with `covariance` and `covariance_kl`."""
    quadratic: float = Field(default=1.0, gt=0)
    """Factor of half the square of the log ratio; only with `quadratic`."""
    entropy: float = Field(default=0.0, ge=0)
    """Bonus per nat of a token's entropy."""
    kl: KLSettings = KLSettings()
    correction: CorrectionSettings = CorrectionSettings()
    distillation: DistillationSettings | None = None
    """None needs no teacher."""
    rejection: RejectionSettings | None = None
    """None disables rejection."""
    aggregation: Aggregation = "session_mean"
    fixed_length: int = Field(default=4096, gt=0)
    """Tokens; only for `fixed_length`."""

    @property
    def moves_all_tokens(self) -> bool:
        """Whether tokens of advantage 0 have a gradient too."""
        has_penalty = self.kl.coefficient > 0 or self.entropy > 0 or self.clipping in ("covariance_kl", "quadratic")
        return has_penalty or self.distillation is not None

    @model_validator(mode="after")
    def _fits(self) -> LossSettings:
        if self.dual_clip is not None and self.clipping != "surrogate":
            raise ValueError(f"dual_clip does nothing with clipping: {self.clipping}; leave it out.")
        if self.ratio_level == "sequence" and self.clipping not in ("surrogate", "weights", "soft"):
            raise ValueError(f"clipping: {self.clipping} has no ratio of sequences; leave out ratio_level.")
        if self.distillation is not None and self.clipping == "geometric":
            raise ValueError(
                "clipping: geometric averages advantages over a trace, and a teacher judges single tokens."
            )
        return self
