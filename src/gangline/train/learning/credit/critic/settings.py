"""The settings of a critic, which can be read without PyTorch."""

from __future__ import annotations

from pydantic import Field

from gangline.train.options import TrainingOptions


class CriticSettings(TrainingOptions):
    """A linear head on the policy's last hidden states, which predicts the remaining rewards of a trace at each
    token.
    """

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a reward for each trained token in between."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda. 1: the return minus the value, unbiased. Smaller: replaces later rewards by the critic's values,
    with less noise but the critic's errors.
    """
    clip: float | None = Field(default=0.5, gt=0)
    """Largest change of a value in the loss of one step, from the value before the step; None disables clipping."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Learning rate of the head. Warm-up and decay are the learner's."""
    trunk: float = Field(default=0.0, ge=0)
    """Factor of the value loss's gradient into the weights shared with the policy. 0 trains only the head: the critic
    then affects the policy only through advantages.
    """
