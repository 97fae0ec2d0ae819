"""Evaluator `session_completed`: one value if the agent ended by itself, another if it did not."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, FiniteFloat

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import EvaluatorError
from gangline.domain.lifecycle import UNGRADED
from gangline.domain.sandbox import Sandbox


class SessionCompletedConfig(BaseModel):
    """Configuration of evaluator `session_completed`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    completed: FiniteFloat = 1.0
    """Reward for outcome `completed`."""
    otherwise: FiniteFloat = 0.0
    """Reward for all other outcomes of the agent: `agent_timeout`, `turn_limit`, `token_limit`, `agent_loop`,
    `memory_limit` and `agent_error`.
    """


class SessionCompletedEvaluator:
    """Uses only the outcome; for experiments, and for tasks that judge themselves."""

    name: ClassVar[str] = "session_completed"
    Config: ClassVar[type[BaseModel]] = SessionCompletedConfig

    def __init__(self, config: SessionCompletedConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError for an outcome that does not depend on the agent."""
        if context.outcome in UNGRADED:
            raise EvaluatorError(f"outcome {context.outcome} says nothing of the agent: the session has no reward")
        reward = self._config.completed if context.outcome == "completed" else self._config.otherwise
        return Reward(reward=reward, details={"outcome": context.outcome})

    async def tidy(self, runtime: Sandbox) -> None:
        """Does nothing: it leaves no files."""
