"""Evaluator `function`: a plain Python function on the node computes the reward.

    def reward(session: dict) -> float: ...

The function comes from the operator: an entry point of the group `gangline.rewards`, or `module:function` on the node's
list `reward_functions`. A task selects one of them by name. `session` is the transcript (`transcript.py`); the function
may be async, and may return a number, a `Reward`, or a dict with `reward`, `trace_rewards`, `turn_scores` and details.
It runs in the node's process, so limit its work on text that an agent wrote.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import CallerError, EvaluatorError
from gangline.domain.plain_reward import plain_reward
from gangline.domain.task_values import Seconds
from gangline.grading.transcript import transcript
from gangline.grading.untrusted.graded_before import GradedBefore
from gangline.settings import plugins


class FunctionConfig(BaseModel):
    """Configuration of evaluator `function`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    function: str = Field(min_length=1, max_length=300)
    """Name of an entry point of the group `gangline.rewards`, or `module:function` on the node's list."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments in addition to the session."""
    timeout_seconds: Seconds = 60
    """Time limit of the function. A thread cannot be stopped: a function that does not return keeps its thread."""

    @field_validator("function")
    @classmethod
    def _is_known(cls, function: str) -> str:
        if ":" not in function:
            try:
                plugins.load("reward", function)
            except CallerError as error:
                raise ValueError(error.message) from error
        return function


class _Failed(EvaluatorError):
    """An exception raised by the function, as opposed to an invalid return value."""


class FunctionEvaluator:
    """Calls one function with the session's transcript."""

    name: ClassVar[str] = "function"
    Config: ClassVar[type[BaseModel]] = FunctionConfig
    is_controlled: ClassVar[bool] = True

    def __init__(self, config: FunctionConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError if the function is not allowed, fails, is too slow or returns no reward."""
        before = GradedBefore(context, self._config)
        if context.is_control:
            return await self._controlled(context, before)
        data = msgspec.json.encode(transcript(context))  # the function may change its argument
        try:
            reward = await self._called(context, msgspec.json.decode(data))
        except _Failed:
            # If the agent's text is the cause, it fails again. A service that the function calls most likely failed
            # only for a moment.
            reward = await self._called(context, msgspec.json.decode(data))
        if not before:
            before.keep(data)
        return reward

    async def _controlled(self, context: EvaluationContext, before: GradedBefore) -> Reward:
        """Grade another session's input if there is one, otherwise nothing. Raises: EvaluatorError."""
        remembered = before.get()
        try:
            return await self._called(
                context, transcript(context) if remembered is None else msgspec.json.decode(remembered)
            )
        except EvaluatorError:
            before.forget()
            raise

    async def _called(self, context: EvaluationContext, session: dict[str, Any]) -> Reward:
        """Raises: EvaluatorError."""
        name, arguments, function = self._config.function, self._config.arguments, self._function(context)
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                if inspect.iscoroutinefunction(function):
                    found = await function(session, **arguments)
                else:
                    found = await asyncio.to_thread(function, session, **arguments)
        except TimeoutError as error:
            why = f"was not done in {self._config.timeout_seconds:g} s"
            raise EvaluatorError(f"the reward function {name} {why}") from error
        except EvaluatorError:
            raise
        except Exception as error:
            raise _Failed(f"the reward function {name} failed: {type(error).__name__}: {error}") from error
        return _reward(name, found)

    def _function(self, context: EvaluationContext) -> Callable[..., Any]:
        """Raises: EvaluatorError."""
        name = self._config.function
        if ":" not in name:
            return plugins.load("reward", name)
        if name not in context.functions:
            known = ", ".join(sorted(context.functions)) or "none"
            raise EvaluatorError(
                f"the reward function {name!r} is not on the node's list `reward_functions`; it has: {known}"
            )
        module, _, attribute = name.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise EvaluatorError(f"the reward function {name!r} cannot be imported: {error}") from error


def _reward(name: str, found: Any) -> Reward:
    """Raises: EvaluatorError."""
    if isinstance(found, Reward):
        return found
    fields: dict[str, Any] = {"reward": found}
    if isinstance(found, dict):
        given = dict(cast("dict[str, Any]", found))
        fields = {field: given.pop(field) for field in ("reward", "trace_rewards", "turn_scores") if field in given}
        fields["details"] = given
    try:
        return plain_reward(Reward(**fields))
    except (EvaluatorError, TypeError) as error:
        raise EvaluatorError(f"the reward function {name} returned no reward: {error}") from error
