"""Advantages: how much better each session did than its group.

Each session has one reward, however many traces it has: sessions are compared before credit is spread over traces
(`gangline.train.learning.credit`). Sources: GRPO (arXiv 2402.03300, 4.1), Dr. GRPO (2503.20783, 3.2), RLOO (2402.14740,
2.2), OPO (2505.23585), pass@k (2503.19595), REINFORCE++ (2501.03262), GDPO (2601.05242), GPG (2504.02546).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from gangline.train.options import TrainingOptions

ONE_REWARD = 1e-8
"""Rewards that differ by less than this count as equal."""

_TINY = 1e-8
"""Added to a variance, as verl does."""


class AdvantageSettings(TrainingOptions):
    """The default is GRPO's."""

    baseline: Literal["mean", "leave_one_out", "length_weighted", "second_best", "greedy", "none"] = "mean"
    """The subtracted baseline: the group's mean, the mean of its other sessions, or the mean weighted by sampled tokens
    (OPO). second_best: only the best session has an advantage, over the second best (pass@k). greedy: the reward of an
    extra greedy session per task (ReMax). none: unchanged rewards. With `greedy` and `none`, groups whose rewards are
    all equal still teach something.
    """
    scale: Literal["deviation", "batch", "none"] = "deviation"
    """The divisor: the standard deviation of the group's rewards, or none. batch: subtracts the mean over all trained
    tokens of the step and divides by their standard deviation (REINFORCE++).
    """
    deviation: Literal["population", "sample"] = "population"
    """Divides by G, or by G - 1 as TRL and verl do."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the deviation."""
    clip: float | None = Field(default=None, gt=0)
    """Largest absolute advantage."""
    rewards: Literal["whole", "parts"] = "whole"
    """parts: each part of the sessions' rewards (evaluators `composite`, `staged`) is compared separately and divided
    by its own deviation, and the advantages are added (GDPO).
    """
    part_weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Only for `parts`: name of a part -> factor of its advantages. Empty: all parts, each 1."""
    factor: Literal["none", "judged", "rewarded"] = "none"
    """Multiplies advantages by the step's number of sessions over the number that teach. judged: sessions with an
    advantage (GPG). rewarded: sessions whose reward is not 0, as verl counts them.
    """

    @property
    def is_of_step(self) -> bool:
        """Whether a session's advantage depends on all groups of a step."""
        return self.scale == "batch" or self.factor != "none"

    @model_validator(mode="after")
    def _fits(self) -> AdvantageSettings:
        if self.baseline in ("none", "greedy") and self.scale == "deviation":
            raise ValueError(
                "rewards without a baseline of the group are not divided by the deviation of their group: set scale"
            )
        if self.rewards == "parts" and (self.scale == "deviation" or self.baseline not in ("mean", "leave_one_out")):
            raise ValueError(
                "rewards `parts` divides each part by its own deviation: alongside it baseline is mean or "
                "leave_one_out, "
                "and scale batch or none"
            )
        if self.part_weights and self.rewards != "parts":
            raise ValueError("part_weights is only for rewards `parts`")
        return self


def group_advantages(
    rewards: ArrayLike,
    settings: AdvantageSettings | None = None,
    *,
    lengths: ArrayLike | None = None,
    greedy: float | None = None,
) -> NDArray[np.float64]:
    """Advantage of each session of one group. All zero if the rewards are all equal or there is one session, unless
    there is no baseline.

    rewards: [S], one per session. lengths: [S] sampled tokens; None: all equal. greedy: the reward for the baseline
    `greedy`. Returns: [S]. Raises: ValueError if a reward is not finite, or if the baseline needs a greedy reward and
    there is none.
    """
    settings = settings or AdvantageSettings()
    rewards_S = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_S).all():
        raise ValueError("rewards must be finite: leave sessions without a reward out of the group.")
    if settings.baseline == "none":
        return rewards_S
    if settings.baseline == "greedy":
        if greedy is None:
            raise ValueError("baseline greedy needs the reward of a greedy session.")
        return rewards_S - greedy if settings.scale == "batch" else _clipped(rewards_S - greedy, settings)
    if len(rewards_S) < 2 or np.ptp(rewards_S) < ONE_REWARD:
        return np.zeros(len(rewards_S))
    lengths_S = np.ones(len(rewards_S)) if lengths is None else np.asarray(lengths, dtype=np.float64)
    advantages = _over_baseline(rewards_S, lengths_S, settings)
    if settings.scale == "deviation":
        deviation = np.std(rewards_S, ddof=0 if settings.deviation == "population" else 1)
        advantages = advantages / (deviation + settings.epsilon)
    return advantages if settings.scale == "batch" else _clipped(advantages, settings)


def part_advantages(parts: Mapping[str, ArrayLike], settings: AdvantageSettings) -> NDArray[np.float64]:
    """Advantage of each session of one group, from the parts of its reward. parts: name -> [S]. Returns: [S]."""
    each = settings.model_copy(update={"scale": "deviation", "clip": None})
    found = [settings.part_weights.get(name, 1.0) * group_advantages(values, each) for name, values in parts.items()]
    total = np.sum(found, axis=0)
    return total if settings.scale == "batch" else _clipped(total, settings)


def batch_advantages(advantages: NDArray[np.float64], settings: AdvantageSettings) -> NDArray[np.float64]:
    """A critic's advantages [N] of all trained tokens of a step: whitened under `scale: batch`, and clipped."""
    return whitened(advantages, settings) if settings.scale == "batch" else _clipped(advantages, settings)


def whitened(advantages: NDArray[np.float64], settings: AdvantageSettings) -> NDArray[np.float64]:
    """Advantages [N] of all trained tokens of a step under `scale: batch`: minus their mean, divided by their
    deviation.
    """
    if len(advantages) < 2:
        return np.zeros(len(advantages))
    scaled = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + _TINY)
    return _clipped(scaled, settings)


def _clipped(advantages: NDArray[np.float64], settings: AdvantageSettings) -> NDArray[np.float64]:
    return advantages if settings.clip is None else np.clip(advantages, -settings.clip, settings.clip)


def _over_baseline(
    rewards_S: NDArray[np.float64], lengths_S: NDArray[np.float64], settings: AdvantageSettings
) -> NDArray[np.float64]:
    match settings.baseline:
        case "leave_one_out":
            return rewards_S - (rewards_S.sum() - rewards_S) / (len(rewards_S) - 1)
        case "length_weighted":
            return rewards_S - (lengths_S @ rewards_S) / lengths_S.sum()
        case "second_best":
            found = np.zeros(len(rewards_S))
            second, best = np.sort(rewards_S)[-2:]
            found[np.argmax(rewards_S)] = best - second
            return found
        case _:
            return rewards_S - rewards_S.mean()


def advantages_by_role(
    values: Sequence[Mapping[str, float]], settings: AdvantageSettings | None = None
) -> list[dict[str, float]]:
    """Compares each role with the same role in the group's other sessions. Source: M-GRPO.

    values: one mapping per session, role -> its share of the reward. A session may lack a role.
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
