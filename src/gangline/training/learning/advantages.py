"""Advantages: how much better than its group each session did.

One reward a session, however many traces it has: sessions are compared with each other before anything is spread over
traces (`gangline.training.learning.credit`). Sources: GRPO (arXiv 2402.03300, 4.1), Dr. GRPO (2503.20783, 3.2), RLOO
(2402.14740, 2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from gangline.training.options import TrainingOptions

__all__ = [
    "ONE_REWARD",
    "AdvantageSettings",
    "advantages_by_role",
    "group_advantages",
]

ONE_REWARD = 1e-8
"""Rewards nearer to each other than this are one reward."""


class AdvantageSettings(TrainingOptions):
    """The default is GRPO's."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """The subtracted baseline: the mean of the group, or of its other sessions."""
    scale: Literal["deviation", "none"] = "deviation"
    """The divisor: the standard deviation of the group, or none."""
    deviation: Literal["population", "sample"] = "population"
    """Divided by G, or by G - 1 as TRL and verl do."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the deviation."""
    clip: float | None = Field(default=None, gt=0)
    """Largest advantage, either way."""


def group_advantages(rewards: ArrayLike, settings: AdvantageSettings | None = None) -> NDArray[np.float64]:
    """Advantage of each session of one group; all zero where the group has one reward or one session.

    rewards: [S], one a session. Returns: [S]. Raises: ValueError when a reward is not finite.
    """
    settings = settings or AdvantageSettings()
    rewards_S = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_S).all():
        raise ValueError("rewards must be finite: leave sessions without a reward out of the group.")
    if len(rewards_S) < 2 or np.ptp(rewards_S) < ONE_REWARD:
        return np.zeros(len(rewards_S))
    advantages = rewards_S - _baselines(rewards_S, settings)
    if settings.scale == "deviation":
        deviation = np.std(rewards_S, ddof=0 if settings.deviation == "population" else 1)
        advantages = advantages / (deviation + settings.epsilon)
    return advantages if settings.clip is None else np.clip(advantages, -settings.clip, settings.clip)


def _baselines(rewards_S: NDArray[np.float64], settings: AdvantageSettings) -> NDArray[np.float64]:
    if settings.baseline == "mean":
        return np.full(len(rewards_S), rewards_S.mean())
    return (rewards_S.sum() - rewards_S) / (len(rewards_S) - 1)


def advantages_by_role(
    values: Sequence[Mapping[str, float]], settings: AdvantageSettings | None = None
) -> list[dict[str, float]]:
    """Each role against the same role in the group's other sessions. Source: M-GRPO.

    values: one mapping a session, role -> its share of the reward. A session may lack a role.
    """
    found: list[dict[str, float]] = [{} for _ in values]
    for role in _roles(values):
        having = [index for index, shares in enumerate(values) if role in shares]
        advantages = group_advantages([values[index][role] for index in having], settings)
        for index, advantage in zip(having, advantages, strict=True):
            found[index][role] = float(advantage)
    return found


def _roles(values: Iterable[Mapping[str, float]]) -> list[str]:
    return sorted({role for shares in values for role in shares})
