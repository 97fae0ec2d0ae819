"""A KL penalty in the reward, with a fixed or an adaptive coefficient. Can be read without PyTorch.

Before sessions are compared, a session's reward is reduced by `coefficient` times the sum of log(pi / pi_ref) over its
trained tokens (k1). Source of the adaptive coefficient: Ziegler et al., arXiv 1909.08593, 2.2; equal to verl's
controller.
"""

from __future__ import annotations

from pydantic import Field

from gangline.train.options import TrainingOptions

_MOST_ERROR = 0.2


class RewardKLSettings(TrainingOptions):
    coefficient: float = Field(default=0.0, ge=0)
    """The initial coefficient; 0 disables the penalty and needs no reference model."""
    target: float | None = Field(default=None, gt=0)
    """Target divergence per token, in nats, to which the coefficient adapts; None keeps it constant."""
    horizon: int = Field(default=10_000, ge=1)
    """Rows over which the coefficient changes by at most a fifth. Only with `target`."""


def adapted(coefficient: float, divergence: float, num_rows: int, settings: RewardKLSettings) -> float:
    """The next step's coefficient. divergence: mean over the rows' mean divergence per token."""
    if settings.target is None:
        return coefficient
    error = min(max(divergence / settings.target - 1, -_MOST_ERROR), _MOST_ERROR)
    return coefficient * (1 + error * num_rows / settings.horizon)
