"""Evaluator `environment`: the rewards that the session's environments gave, step by step.

Each step's reward becomes the score of the turn that made it. At the end the grader calls the environment's hidden tool
`finish`, with the agent's last answer if the tool accepts one. A reward returned by `finish` belongs to the last turn.
An agent that took no step gets 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.environment import CallResult, EnvironmentCall, GradedEnvironment, OfferedTool
from gangline.domain.errors import EnvironmentFailed, EvaluatorError, GraderUnavailable
from gangline.grading.transcript import last_answer

_FINISH = "environment.finish.json"
_MAX_SHOWN_REWARDS = 200
_MAX_SHOWN_CHARS = 500


class FinishCall(BaseModel):
    """The grader's call at the end of the session."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tool: str = "finish"
    """Name of a hidden tool. It is not called if the server does not have it."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its arguments. `answer`, the model's last answer, is added if the tool has such an argument."""


class EnvironmentConfig(BaseModel):
    """Configuration of evaluator `environment`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    environment: str | None = None
    """Name of the environment to read; None: all of the task's environments, with their rewards summed."""
    reward: Literal["sum", "last"] = "sum"
    """The session's reward: the sum over all steps, or the last step's."""
    finish: FinishCall | None = FinishCall()
    """None: no call at the end."""


class _Finished(msgspec.Struct, frozen=True):
    """The result of calling `finish`."""

    environment: str
    reward: float | None
    text: str


class _Scored(msgspec.Struct):
    """A result with a number. Servers return a function's value as `result`."""

    reward: float | None = None
    result: float | None = None


class EnvironmentEvaluator:
    """Computes rewards from the recorded environment calls."""

    name: ClassVar[str] = "environment"
    Config: ClassVar[type[BaseModel]] = EnvironmentConfig

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EnvironmentFailed if an environment failed, for the agent or for the grader; GraderUnavailable if it
        refuses the grader's call; EvaluatorError if there is no environment to call.
        """
        calls = [call for call in context.environment_calls if self._is_asked(call.environment)]
        finished = await self._finished(context)
        last_turn = _last_turn(context)
        rewards = [(call.completion_id, call.reward) for call in calls if call.reward is not None]
        rewards += [(last_turn, end.reward) for end in finished if end.reward is not None]
        scores: dict[str, float] = {}
        for turn, reward in rewards:
            if turn is not None:
                scores[turn] = scores.get(turn, 0.0) + reward
        values = [reward for _, reward in rewards]
        total = math.fsum(values) if self._config.reward == "sum" else (values or [0.0])[-1]
        return Reward(reward=total, turn_scores=scores, details=_details(calls, finished))

    def _is_asked(self, name: str) -> bool:
        return self._config.environment in (None, name)

    async def _finished(self, context: EvaluationContext) -> list[_Finished]:
        """Results of `finish`, from the environments or from the session's first grading.

        Raises: as `evaluate`.
        """
        if (kept := context.kept.get(_FINISH)) is not None:
            return msgspec.json.decode(kept, type=list[_Finished])
        asked = {name: one for name, one in context.environments.items() if self._is_asked(name)}
        if not asked:
            raise EvaluatorError(
                "there is no environment to ask: the task has none of this name, or the session was recorded without"
                " this evaluator, and its environments are gone"
            )
        found = [await self._finish(name, one, context) for name, one in asked.items()]
        finished = [one for one in found if one is not None]
        context.artifacts[_FINISH] = msgspec.json.encode(finished)
        return finished

    async def _finish(self, name: str, one: GradedEnvironment, context: EvaluationContext) -> _Finished | None:
        if one.failure is not None:
            raise EnvironmentFailed(f"environment {name!r} failed: {one.failure}")
        call = self._config.finish
        tool = None if call is None else one.hidden_tools.get(call.tool)
        if call is None or tool is None:
            return None
        result = await one.ask(call.tool, _arguments(call, tool, context))
        if result.is_error:
            raise GraderUnavailable(f"environment {name!r}: {call.tool} failed: {result.text[:_MAX_SHOWN_CHARS]}")
        return _Finished(name, _reward_of(result), result.text[:_MAX_SHOWN_CHARS])


def _arguments(call: FinishCall, tool: OfferedTool, context: EvaluationContext) -> dict[str, Any]:
    if "answer" not in tool.parameters.get("properties", {}) or "answer" in call.arguments:
        return call.arguments
    return {**call.arguments, "answer": last_answer(context.trajectory) or ""}


def _reward_of(result: CallResult) -> float | None:
    """The step's reward. For a server without steps: its answer if that is a number, or the answer's `reward`."""
    if result.reward is not None or result.done:
        return result.reward
    try:
        found = msgspec.convert(result.structured or msgspec.json.decode(result.text), float | _Scored)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    reward = found if isinstance(found, float) else found.result if found.reward is None else found.reward
    return reward if reward is not None and math.isfinite(reward) else None


def _last_turn(context: EvaluationContext) -> str | None:
    """Completion id of the last turn in the main traces, or in all traces if there are no main ones."""
    traces = context.trajectory.traces
    main = [trace for trace in traces if trace.role == "main"] or list(traces)
    return main[-1].spans[-1].completion_id if main and main[-1].spans else None


def _details(calls: Sequence[EnvironmentCall], finished: Sequence[_Finished]) -> dict[str, Any]:
    rewards = [call.reward for call in calls if call.reward is not None]
    return {
        "num_calls": len(calls),
        "num_errors": sum(call.is_error for call in calls),
        "step_rewards": rewards[:_MAX_SHOWN_REWARDS],
        "done": any(call.done for call in calls),
        "finish": [msgspec.to_builtins(one) for one in finished],
    }
