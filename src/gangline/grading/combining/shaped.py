"""Evaluator `shaped`: another evaluator's reward, changed by the session's length, turns and tool errors.

The order is `length_scaling`, `length_penalty`, `overlong_penalty`, `turns`, `tool_errors`. All use the recorded
conversation, never the agent's claims. Source: "Inside the Agentic RL Training Loop".
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.trajectory import Trajectory
from gangline.grading.combining.lengths import LengthPenalty, LengthScaling, OverlongPenalty
from gangline.grading.combining.nested import AroundOne, NestedEvaluator
from gangline.grading.combining.turns import ERROR_BEGINNINGS, is_error, num_sampled_tokens, num_turns, tool_results


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TurnBonus(_Spec):
    """Adds `weight * max(0, 1 - turns / max_turns)` to rewards above 0, so that giving up at once earns nothing."""

    max_turns: int = Field(default=25, gt=0)
    weight: float = Field(default=0.1, ge=0)


class ToolErrorPenalty(_Spec):
    """Subtracts `each` for every failed tool call, up to `at_most`."""

    each: float = Field(default=0.05, ge=0)
    at_most: float = Field(default=0.5, ge=0)
    beginnings: tuple[str, ...] = ERROR_BEGINNINGS
    """A result that begins with one of these has failed, as has a result marked by the client."""


class ShapedConfig(_Spec):
    """Configuration of evaluator `shaped`."""

    evaluator: NestedEvaluator
    """Determines the reward to shape."""
    length_scaling: LengthScaling | None = None
    length_penalty: LengthPenalty | None = None
    overlong_penalty: OverlongPenalty | None = None
    turns: TurnBonus | None = None
    tool_errors: ToolErrorPenalty | None = None

    @model_validator(mode="after")
    def _shapes(self) -> ShapedConfig:
        if self.model_fields_set <= {"evaluator"}:
            fields = ", ".join(name for name in type(self).model_fields if name != "evaluator")
            raise ValueError(f"give at least one of {fields}")
        return self


class ShapedEvaluator(AroundOne):
    """Calls one evaluator and changes its reward."""

    name: ClassVar[str] = "shaped"
    Config: ClassVar[type[BaseModel]] = ShapedConfig

    def __init__(self, config: ShapedConfig) -> None:
        super().__init__(config.evaluator)
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: as the inner evaluator does."""
        found = await self._inner.grade(context)
        facts = self._facts(context.trajectory)
        details = {self._inner.label: {"reward": found.reward, "details": found.details}, **facts}
        return Reward(
            reward=self._shape(found.reward, facts),
            trace_rewards={trace: self._shape(reward, facts) for trace, reward in found.trace_rewards.items()},
            turn_scores=found.turn_scores,
            details=details,
        )

    def _facts(self, trajectory: Trajectory) -> dict[str, Any]:
        errors = self._config.tool_errors
        facts = {"num_sampled_tokens": num_sampled_tokens(trajectory), "num_turns": num_turns(trajectory)}
        if errors is not None:
            failed = {
                result.call_id
                for trace in trajectory.traces
                for result in tool_results(trace.response_messages)
                if is_error(result, errors.beginnings)
            }
            facts["num_tool_errors"] = len(failed)
        return facts

    def _shape(self, reward: float, facts: dict[str, Any]) -> float:
        config = self._config
        for step in (config.length_scaling, config.length_penalty, config.overlong_penalty):
            if step is not None:
                reward = step.apply(reward, facts["num_sampled_tokens"])
        if config.turns is not None and reward > 0:
            reward += config.turns.weight * max(0.0, 1 - facts["num_turns"] / config.turns.max_turns)
        if config.tool_errors is not None:
            reward -= min(config.tool_errors.each * facts["num_tool_errors"], config.tool_errors.at_most)
        return reward
