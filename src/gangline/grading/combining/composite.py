"""Evaluator `composite`: the weighted sum of several evaluators' rewards.

All parts are evaluated in order. If one cannot determine a reward, the session has none. Source:
"Inside the Agentic RL Training Loop".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.grading.combining.nested import (
    Nested,
    NestedEvaluator,
    any_controlled,
    any_grades_clean,
    names_are_unique,
)


class Part(NestedEvaluator):
    """An evaluator and its weight."""

    weight: float = 1.0


class CompositeConfig(BaseModel):
    """Configuration of evaluator `composite`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=32), AfterValidator(names_are_unique)]
    average: bool = False
    """Divide the sum by the sum of the weights."""

    @model_validator(mode="after")
    def _can_be_averaged(self) -> CompositeConfig:
        if self.average and math.fsum(part.weight for part in self.parts) <= 0:
            raise ValueError("`average` needs weights whose sum is above 0")
        return self


class CompositeEvaluator:
    """Evaluates all parts."""

    name: ClassVar[str] = "composite"
    Config: ClassVar[type[BaseModel]] = CompositeConfig

    def __init__(self, config: CompositeConfig) -> None:
        self._parts = [Nested(part) for part in config.parts]
        weights = [part.weight for part in config.parts]
        total = math.fsum(weights) if config.average else 1.0
        self._weights = [weight / total for weight in weights]

    @property
    def is_controlled(self) -> bool:
        return any_controlled(self._parts)

    @property
    def grades_clean(self) -> bool:
        return any_grades_clean(self._parts)

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: as the parts do."""
        found = [await part.grade(context) for part in self._parts]
        traces = {trace for reward in found for trace in reward.trace_rewards}
        turns = {turn for reward in found for turn in reward.turn_scores}
        details = {
            part.label: {"reward": reward.reward, "weight": weight, "details": reward.details}
            for part, weight, reward in zip(self._parts, self._weights, found, strict=True)
        }
        return Reward(
            reward=self._sum(reward.reward for reward in found),
            trace_rewards={
                trace: self._sum(reward.trace_rewards.get(trace, reward.reward) for reward in found)
                for trace in sorted(traces)
            },
            turn_scores={
                turn: self._sum(reward.turn_scores.get(turn, 0.0) for reward in found) for turn in sorted(turns)
            },
            details={"parts": details},
        )

    def _sum(self, values: Iterable[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(self._weights, values, strict=True))
