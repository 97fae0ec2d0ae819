"""An evaluator's reward as plain data, which the node can send and store whatever types a grader's libraries return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError
from gangline.domain.plain import plain, plain_number, plain_text


def plain_reward(found: Any) -> Reward:
    """Raises: EvaluatorError when it is not a reward, or one of its numbers is not finite."""
    if not isinstance(found, Reward):
        raise EvaluatorError(f"the evaluator returned {_shown(found)}, not a Reward")
    details: Any = plain(found.details)
    return Reward(
        reward=_number("reward", found.reward),
        trace_rewards=_numbers("trace_rewards", found.trace_rewards),
        turn_scores=_numbers("turn_scores", found.turn_scores),
        details=cast("dict[str, Any]", details) if isinstance(details, dict) else {"details": details},
        values=_numbers("values", found.values),
    )


def _numbers(field: str, given: Any) -> dict[str, float]:
    """Raises: EvaluatorError."""
    if not isinstance(given, Mapping):
        raise EvaluatorError(f"{field} must be a dict of ids and numbers, not {_shown(given)}")
    named = cast("Mapping[object, object]", given)
    return {plain_text(str(name)): _number(f"{field}[{name!r}]", value) for name, value in named.items()}


def _number(field: str, value: object) -> float:
    """Raises: EvaluatorError."""
    number = plain_number(value)
    if number is None:
        raise EvaluatorError(f"{field} must be a finite number, not {_shown(value)}")
    return number


def _shown(value: object) -> str:
    return f"{str(plain(value))[:200]} ({type(value).__name__})"
