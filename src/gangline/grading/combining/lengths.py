"""Transformations of a reward by the number of sampled tokens.

Sources: GRPO++; DAPO (arXiv 2503.14476), 3.4; "Inside the Agentic RL Training Loop".
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Transformation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LengthPenalty(_Transformation):
    """Reduces a reward to 0 along a cosine between `target_tokens` and `max_tokens`."""

    target_tokens: int = Field(gt=0)
    max_tokens: int = Field(gt=0)

    @model_validator(mode="after")
    def _grows(self) -> LengthPenalty:
        if self.max_tokens <= self.target_tokens:
            raise ValueError("max_tokens must be more than target_tokens.")
        return self

    def apply(self, reward: float, num_tokens: int) -> float:
        progress = (num_tokens - self.target_tokens) / (self.max_tokens - self.target_tokens)
        return reward * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


class LengthScaling(_Transformation):
    """`reward * (target_tokens / actual) ** alpha`. Source: GRPO++."""

    target_tokens: int = Field(default=2000, gt=0)
    alpha: float = Field(default=0.5, ge=0)

    def apply(self, reward: float, num_tokens: int) -> float:
        """num_tokens: 0 counts as 1."""
        return reward * (self.target_tokens / max(num_tokens, 1)) ** self.alpha


class OverlongPenalty(_Transformation):
    """Adds a penalty from 0 down to -1 over the last `margin_tokens` before `max_tokens`. Source: DAPO, soft overlong
    punishment.
    """

    max_tokens: int = Field(default=16384, gt=0)
    margin_tokens: int = Field(default=4096, gt=0)

    def apply(self, reward: float, num_tokens: int) -> float:
        over = num_tokens - (self.max_tokens - self.margin_tokens)
        return reward - min(max(over / self.margin_tokens, 0.0), 1.0)
