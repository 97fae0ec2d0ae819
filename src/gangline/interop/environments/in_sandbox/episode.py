"""One episode as two tools: `step` for the agent, and `finish`, which the grader calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import Refused, Result, Tool

_OVER = "The episode is over. Give your final answer."
_ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}}


class Episode(ABC):
    """Base class. Subclasses start the episode in `__init__` and implement `_step`."""

    instructions: str

    def __init__(self, action: Mapping[str, Any], *, shows_rewards: bool, about: str = "Take one step.") -> None:
        """action: JSON schema of the argument `action`."""
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        self.tools: Sequence[Tool] = (
            Tool("step", f"{about} Returns what you see next.", parameters, self.step),
            Tool("finish", "End the episode and score the answer.", _ANSWER, self.finish),
        )
        self.is_over = False
        self._shows_rewards = shows_rewards

    def step(self, arguments: dict[str, Any]) -> Result:
        """Raises: Refused if the action is invalid or the episode is over."""
        if self.is_over:
            raise Refused(_OVER)
        if "action" not in arguments:
            raise Refused("the argument `action` is missing")
        result = self._step(arguments["action"])
        self.is_over = result.done
        text = result.text
        if self._shows_rewards:
            text = f"{text}\nReward: {result.reward:g}"
        return result._replace(text=over(text) if result.done else text)

    def finish(self, arguments: dict[str, Any]) -> Result:
        """Close the environment. The result has a reward if there is one in addition to the steps' rewards."""
        self.is_over = True
        return self._finish(str(arguments.get("answer") or ""))

    @abstractmethod
    def _step(self, action: Any) -> Result:
        """Raises: Refused."""

    def _finish(self, answer: str) -> Result:
        return Result("closed", done=True)


def over(text: str) -> str:
    """The observation with a note that it is the last one."""
    return f"{text}\n{_OVER}".lstrip("\n")
