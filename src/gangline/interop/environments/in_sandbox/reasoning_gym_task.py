"""One question of reasoning-gym: no steps, and a final answer scored by the dataset's own scorer.

The answer is the content of the last `<answer>` in the text, or the whole text. Many scorers give partial credit to
text that merely contains the answer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .protocol import Result, Tool

_ASK = "\n\nGive your final answer between <answer> and </answer>, and nothing else there."
_ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}


class ReasoningTask:
    """Serves `finish`, which the grader calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        gym: Any = import_module("reasoning_gym")
        size = max(config["index"] + 1, config["size"] or 1)
        self._dataset = gym.create_dataset(config["dataset"], seed=config["seed"], size=size, **config["options"])
        self._entry = self._dataset[config["index"]]
        self._extract = import_module("reasoning_gym.utils").extract_answer
        self.instructions: str = self._entry["question"] + _ASK
        self.tools = (Tool("finish", "Score the answer.", _ANSWER, self.finish),)

    def finish(self, arguments: dict[str, Any]) -> Result:
        text = str(arguments.get("answer") or "")
        answer = self._extract(text)
        score = self._dataset.score_answer(text.strip() if answer is None else answer, self._entry)
        return Result("scored", float(score), done=True)


begin = ReasoningTask
