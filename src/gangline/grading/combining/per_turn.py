"""Evaluator `per_turn`: a score for each of the model's turns and a reward for each trace, in addition to the
session's.

Rules score turns by the recorded conversation. A trace's reward is the session's, plus `turns_weight` times the mean
(or sum) of its turns' scores. The session's own reward remains the inner evaluator's, so sessions are compared by their
outcome. A trace whose messages cannot be matched to its turns gets no scores.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.trajectory import Trace
from gangline.grading.combining.nested import AroundOne, NestedEvaluator
from gangline.grading.combining.turns import ERROR_BEGINNINGS, Turn, is_error, turns_of


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TurnRule(_Spec):
    """A score for every turn that matches the rule."""

    when: Literal["tool_call", "no_tool_call", "tool_error", "tool_success", "repeated_call", "contains"]
    """`tool_call`: the turn calls a tool. `tool_error`: one of its tool calls failed. `tool_success`: all its tool
    calls succeeded. `repeated_call`: it repeats a tool call of an earlier turn of the trace with equal arguments.
    `contains`: its text contains `value`.
    """
    score: float
    tools: tuple[str, ...] = ()
    """Only calls of these tools; empty means all tools. Not for `no_tool_call` and `contains`."""
    value: str = ""

    def holds(self, turn: Turn, before: set[tuple[str, str]], beginnings: tuple[str, ...]) -> bool:
        """before: names and arguments of the trace's earlier calls."""
        calls = [call for call in turn.calls if not self.tools or call.name in self.tools]
        ids = {call.call_id for call in calls}
        failed = [is_error(result, beginnings) for result in turn.results if result.call_id in ids]
        match self.when:
            case "tool_call":
                return bool(calls)
            case "no_tool_call":
                return not turn.calls
            case "tool_error":
                return any(failed)
            case "tool_success":
                return bool(failed) and not any(failed)
            case "repeated_call":
                return any((call.name, call.arguments) in before for call in calls)
            case "contains":
                return self.value in turn.text


class PerTurnConfig(_Spec):
    """Configuration of evaluator `per_turn`."""

    evaluator: NestedEvaluator
    """Determines the session's reward. Its own turn scores are added to the rules' scores."""
    rules: Annotated[tuple[TurnRule, ...], Field(max_length=64)] = ()
    turns_weight: float = 1.0
    """Factor of the turns' scores in a trace's reward."""
    turns: Literal["mean", "sum"] = "mean"
    """How the scores of a trace's turns are combined."""
    error_beginnings: tuple[str, ...] = ERROR_BEGINNINGS
    """A tool result that begins with one of these is an error, as is a result marked by the client."""


class PerTurnEvaluator(AroundOne):
    """Calls one evaluator and scores turns by rules."""

    name: ClassVar[str] = "per_turn"
    Config: ClassVar[type[BaseModel]] = PerTurnConfig

    def __init__(self, config: PerTurnConfig) -> None:
        super().__init__(config.evaluator)
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: as the inner evaluator does."""
        found = await self._inner.grade(context)
        scores = dict(found.turn_scores)
        rewards: dict[str, float] = {}
        unmatched: list[str] = []
        for trace in context.trajectory.traces:
            ruled = self._scores(trace)
            if ruled is None:
                unmatched.append(trace.trace_id)
            for turn, score in (ruled or {}).items():
                scores[turn] = found.turn_scores.get(turn, 0.0) + score
            own = [scores[span.completion_id] for span in trace.spans if span.completion_id in scores]
            base = found.trace_rewards.get(trace.trace_id, found.reward)
            rewards[trace.trace_id] = base + self._config.turns_weight * self._joined(own)
        details: dict[str, Any] = {self._inner.label: {"reward": found.reward, "details": found.details}}
        if unmatched:
            details["unscored_traces"] = unmatched
        return Reward(reward=found.reward, trace_rewards=rewards, turn_scores=scores, details=details)

    def _scores(self, trace: Trace) -> dict[str, float] | None:
        """Scores by the rules; None if turns cannot be matched."""
        turns = turns_of(trace)
        if turns is None:
            return None
        before: set[tuple[str, str]] = set()
        scores: dict[str, float] = {}
        for turn in turns:
            held = [
                rule.score for rule in self._config.rules if rule.holds(turn, before, self._config.error_beginnings)
            ]
            scores[turn.completion_id] = math.fsum(held)
            before |= {(call.name, call.arguments) for call in turn.calls}
        return scores

    def _joined(self, scores: list[float]) -> float:
        total = math.fsum(scores)
        return total / len(scores) if scores and self._config.turns == "mean" else total
