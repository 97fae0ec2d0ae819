"""Shaping of a session's reward by parts, stages and length. Sources: GRPO++; DAPO, 3.4."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gangline.grading.combining.lengths import LengthPenalty, LengthScaling, OverlongPenalty
from gangline.train.options import TrainingOptions

__all__ = [
    "COMPOSITE_WEIGHTS",
    "STAGES",
    "LengthPenalty",
    "LengthScaling",
    "OverlongPenalty",
    "RewardShaping",
    "composite_reward",
    "shape_reward",
    "staged_reward",
]

COMPOSITE_WEIGHTS: Mapping[str, float] = {"all_pass": 0.6, "partial": 0.2, "format": 0.1, "efficiency": 0.1}
STAGES: Mapping[str, float] = {"found": 0.1, "changed": 0.3, "compiles": 0.5, "some_pass": 0.7, "all_pass": 1.0}


def composite_reward(parts: Mapping[str, float], weights: Mapping[str, float] = COMPOSITE_WEIGHTS) -> float:
    """Weighted sum of parts, each 0 to 1. Raises: ValueError if a part is missing, unknown or out of range."""
    if parts.keys() != weights.keys():
        raise ValueError(f"a composite reward of {sorted(weights)} needs just these parts, got {sorted(parts)}.")
    wrong = {name: part for name, part in parts.items() if not 0 <= part <= 1}
    if wrong:
        raise ValueError(f"parts of a composite reward are 0 to 1, got {wrong}.")
    return math.fsum(weights[name] * part for name, part in parts.items())


def staged_reward(reached: Mapping[str, bool], stages: Mapping[str, float] = STAGES) -> float:
    """Reward of the highest stage reached, 0.0 if no stage was. Raises: ValueError if a stage is unknown."""
    unknown = reached.keys() - stages.keys()
    if unknown:
        raise ValueError(f"unknown stages {sorted(unknown)}; known: {', '.join(stages)}.")
    return max((stages[name] for name, done in reached.items() if done), default=0.0)


class RewardShaping(TrainingOptions):
    """Transformations of a session's reward before sessions are compared, in this order; none by default."""

    length_scaling: LengthScaling | None = None
    length_penalty: LengthPenalty | None = None
    overlong_penalty: OverlongPenalty | None = None


def shape_reward(reward: float, num_tokens: int, shaping: RewardShaping) -> float:
    """num_tokens: tokens that the session sampled."""
    for step in (shaping.length_scaling, shaping.length_penalty, shaping.overlong_penalty):
        if step is not None:
            reward = step.apply(reward, num_tokens)
    return reward
