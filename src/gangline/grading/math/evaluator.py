"""Evaluator `math`: 1 if the agent's answer equals the right one mathematically, otherwise 0.

The answer is taken from the agent's text (`source`) without the model's thoughts: the last `\\boxed{...}`. Without a
box, it is the last formula or number after "answer", or else the last formula or number. With `only_boxed`, answers
outside a box do not count.

The comparison runs in a child process (`isolated.py`). An answer that exceeds its processor time or memory is wrong,
and the details give the reason. If a right answer cannot be read, there is no reward.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from gangline.domain.child_work import Limits, OverLimit
from gangline.domain.contracts import EvaluationContext, Reward
from gangline.grading.answers import AnswerSource, answer_of, without_thoughts
from gangline.grading.untrusted.isolated import in_child

if find_spec("math_verify") is None:  # only the child uses it, but fail before a session runs
    raise ModuleNotFoundError("No module named 'math_verify'", name="math_verify")

_CHILD = "gangline.grading.math.comparing"
_WALL_PER_CPU = 12
"""Wall-clock seconds per second of processor time, so that a loaded machine does not make answers wrong."""

Answer = Annotated[str, Field(min_length=1, max_length=10_000)]


class MathConfig(AnswerSource):
    """Configuration of evaluator `math`."""

    answer: Answer | Annotated[tuple[Answer, ...], Field(min_length=1, max_length=64)]
    """The right answer, or several alternatives: LaTeX (`\\frac{1}{2}`, with or without `$`), a number, a set `\\{1,
    2\\}`, an interval `[0, 1)`, an equation, a matrix.
    """
    only_boxed: bool = False
    """Only the last `\\boxed{...}` counts as an answer."""
    choices: tuple[str, ...] = ()
    """Letters of a multiple-choice task, such as A to D."""
    decimals: int = Field(default=6, ge=0, le=15)
    """Decimal places to which numbers are compared."""
    relative_tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A number is also right if it differs by at most this fraction of the right one. The same holds for sets, tuples,
    matrices and intervals of numbers.
    """
    absolute_tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The same, as an absolute difference."""
    strict: bool = True
    """Variables must have the same names, and a tuple does not equal a set. Otherwise they are matched by position."""
    sets_as_relations: bool = False
    """An inequality such as `0 < x < 1` counts as right for an interval."""
    max_chars: int = Field(default=100_000, gt=0)
    """Characters of the text to read, from its end."""
    cpu_seconds: int = Field(default=10, gt=0)
    """Processor time per answer."""
    memory_bytes: int = Field(default=1 << 30, ge=64 << 20)
    """Memory per answer."""


class MathEvaluator:
    """Compares one answer, without using a runtime."""

    name: ClassVar[str] = "math"
    Config: ClassVar[type[BaseModel]] = MathConfig

    def __init__(self, config: MathConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError if a right answer cannot be read, or the machine is too slow."""
        config = self._config
        text, missing = await answer_of(context, config)
        golds = [config.answer] if isinstance(config.answer, str) else list(config.answer)
        details: dict[str, Any] = {"source": config.source, "right": golds}
        if text is None:
            return Reward(reward=0.0, details=details | {"missing": missing})
        text = without_thoughts(text)
        read = text[-config.max_chars :]
        if len(read) < len(text):
            details["read_chars"] = f"the last {len(read)} of {len(text)}"
        try:
            found = await (context.child_work or in_child)(_CHILD, self._job(golds, read), self._limits())
        except OverLimit as error:
            return Reward(reward=0.0, details=details | {"why": f"the answer could not be compared: {error}"})
        return Reward(reward=float(found["correct"]), details=details | {"answer": found["answer"]})

    def _job(self, golds: list[str], text: str) -> dict[str, Any]:
        config = self._config
        names = ("decimals", "strict", "sets_as_relations", "relative_tolerance", "absolute_tolerance")
        return {
            "golds": golds,
            "text": text,
            "only_boxed": config.only_boxed,
            "choices": list(config.choices),
            "rules": {name: getattr(config, name) for name in names},
        }

    def _limits(self) -> Limits:
        cpu_s = self._config.cpu_seconds
        return Limits(cpu_s, self._config.memory_bytes, 60.0 + _WALL_PER_CPU * cpu_s)
