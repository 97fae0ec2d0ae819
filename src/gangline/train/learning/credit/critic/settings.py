"""The settings of a critic; read without PyTorch."""

from __future__ import annotations

from pydantic import Field

from gangline.train.options import TrainingOptions

__all__ = ["CriticSettings"]


class CriticSettings(TrainingOptions):
    """A linear head on the policy's last hidden states, which predicts the rest of a trace's rewards at each token."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a reward for each trained token between."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda. 1: the return less the value, unbiased. Less: the critic's own values stand for later rewards,
    with less noise and its errors."""
    clip: float | None = Field(default=0.5, gt=0)
    """Largest change of a value in the loss of one step, from the value before the step; None clips nothing."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """The head's. Warm-up and decay are the learner's."""
    trunk: float = Field(default=0.0, ge=0)
    """Factor of the value loss's gradient in the weights that the head shares with the policy. 0 trains the head
    alone: the critic cannot change the policy but by its advantages."""
