"""Advantages: how much better than its group each trace did.

All traces of a session weigh one together: a session's value is the mean of its traces' rewards, and mean, deviation
and leave-one-out baselines are taken over sessions. Where every session has one trace this is the usual group
advantage. Sources: GRPO (arXiv 2402.03300, 4.1), Dr. GRPO (2503.20783, 3.2), RLOO (2402.14740, 2.2).
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
    "session_values",
]

ONE_REWARD = 1e-8
"""Rewards nearer to each other than this are one reward."""


class AdvantageSettings(TrainingOptions):
    """The default is GRPO's."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted: the mean of the group, or of its other sessions."""
    scale: Literal["deviation", "none"] = "deviation"
    """What is divided by: the deviation of the group, or nothing."""
    deviation: Literal["population", "sample"] = "population"
    """Divided by G, or by G - 1 as TRL and verl do."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the deviation."""
    clip: float | None = Field(default=None, gt=0)
    """Largest advantage, either way."""


def session_values(rewards: NDArray[np.float64], sessions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean reward of each session's traces, in the order of the session numbers.

    rewards: [N] of traces. sessions: [N], which session each trace is of, 0 to S - 1. Returns: [S].
    """
    counts = np.bincount(sessions)
    return np.bincount(sessions, weights=rewards) / counts


def group_advantages(
    rewards: ArrayLike, settings: AdvantageSettings | None = None, *, sessions: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Advantage of each trace of one group; all zero where the group has one reward or one session.

    rewards: [N]. sessions: [N], any labels; None where each trace is a session of its own. Returns: [N].
    Raises: ValueError when a reward is not finite or the shapes differ.
    """
    settings = settings or AdvantageSettings()
    rewards_N = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_N).all():
        raise ValueError("rewards must be finite: leave sessions without a reward out of the group.")
    numbers_N = _numbered(sessions, len(rewards_N))
    values_S = session_values(rewards_N, numbers_N)
    if len(values_S) < 2 or np.ptp(rewards_N) < ONE_REWARD:
        return np.zeros(len(rewards_N))
    advantages = rewards_N - _baselines(values_S, settings)[numbers_N]
    if settings.scale == "deviation":
        deviation = np.std(values_S, ddof=0 if settings.deviation == "population" else 1)
        # Sessions of one value whose traces differ: there is a direction, but no scale to divide by.
        advantages = advantages / (deviation + settings.epsilon if deviation >= ONE_REWARD else 1.0)
    return advantages if settings.clip is None else np.clip(advantages, -settings.clip, settings.clip)


def _numbered(sessions: ArrayLike | None, num: int) -> NDArray[np.int64]:
    if sessions is None:
        return np.arange(num)
    labels = np.asarray(sessions)
    if labels.shape != (num,):
        raise ValueError(f"{num} rewards need {num} session labels, got an array of shape {labels.shape}.")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _baselines(values_S: NDArray[np.float64], settings: AdvantageSettings) -> NDArray[np.float64]:
    if settings.baseline == "mean":
        return np.full(len(values_S), values_S.mean())
    return (values_S.sum() - values_S) / (len(values_S) - 1)


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
