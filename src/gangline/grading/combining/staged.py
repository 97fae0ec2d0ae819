"""Evaluator `staged`: a sequence of gates, each an evaluator. The reward is determined by the last gate passed.

Grading stops at the first failed gate, so cheap checks can come before expensive ones. Source:
"Inside the Agentic RL Training Loop".
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.grading.combining.nested import (
    Nested,
    NestedEvaluator,
    any_controlled,
    any_grades_clean,
    names_are_unique,
)


class Stage(NestedEvaluator):
    """An evaluator as a gate."""

    at_least: float = 1.0
    """The gate is passed if its evaluator's reward is at least this."""
    reward: float | None = None
    """Reward of a session that passes no later gate. None: the evaluator's own reward."""


class StagedConfig(BaseModel):
    """Configuration of evaluator `staged`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=32), AfterValidator(names_are_unique)]
    otherwise: FiniteFloat = 0.0
    """Reward of a session that passes no gate."""


class StagedEvaluator:
    """Evaluates one gate after another."""

    name: ClassVar[str] = "staged"
    Config: ClassVar[type[BaseModel]] = StagedConfig

    def __init__(self, config: StagedConfig) -> None:
        self._config = config
        self._stages = [Nested(stage) for stage in config.stages]

    @property
    def is_controlled(self) -> bool:
        return any_controlled(self._stages)

    @property
    def grades_clean(self) -> bool:
        return any_grades_clean(self._stages)

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: as the gates do."""
        reached = Reward(reward=self._config.otherwise)
        details: dict[str, Any] = {}
        for spec, stage in zip(self._config.stages, self._stages, strict=True):
            found = await stage.grade(context)
            passed = found.reward >= spec.at_least
            details[stage.label] = {"reward": found.reward, "passed": passed, "details": found.details}
            if passed:
                reached = found if spec.reward is None else Reward(reward=spec.reward, turn_scores=found.turn_scores)
            elif not context.is_control:  # a control asks every gate, as any may have failed
                break
        return Reward(
            reward=reached.reward,
            trace_rewards=reached.trace_rewards,
            turn_scores=reached.turn_scores,
            details={"stages": details},
        )
