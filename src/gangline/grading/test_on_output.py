"""Evaluator `test_on_output`: weighted checks on the agent's output.

Missing output (no such file, no answer) fails every check. It counts as the agent's failure, so it is scored.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.patterns import checked_pattern
from gangline.grading.answers import AnswerSource, answer_of, without_thoughts
from gangline.grading.untrusted.patterns import matches
from gangline.grading.untrusted.same_value import is_same_value

_REGEX_TIMEOUT_S = 10.0
_MAX_SHOWN_CHARS = 500


class Check(BaseModel):
    """One condition on the output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["equals", "contains", "regex", "answer"]
    """`regex` matches anywhere (Python's syntax); anchor it with `\\A` and `\\Z` to match the whole. `answer` accepts
    any notation of the value: `1,234` for `1234`, `The answer is 1/2.` for `0.5`, `(B)` for `B`.
    """
    value: str
    others: tuple[str, ...] = ()
    """With `answer`: further accepted values."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    ignore_case: bool = False

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.kind == "regex":
            checked_pattern(self.value)
        if self.others and self.kind != "answer":
            raise ValueError("`others` goes with `kind: answer`")
        return self

    def holds(self, text: str) -> bool:
        """Whether a check of any kind except `regex` holds."""
        value = self.value
        if self.kind == "answer":
            answer = without_thoughts(text)
            return any(is_same_value(right, answer) for right in (value, *self.others))
        if self.ignore_case:
            value, text = value.casefold(), text.casefold()
        return text == value if self.kind == "equals" else value in text


def _not_empty(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    if not checks:
        raise ValueError("give at least one check")
    return checks


class TestOnOutputConfig(AnswerSource):
    """Configuration of evaluator `test_on_output`."""

    __test__: ClassVar[bool] = False  # not a test, whatever pytest makes of the name

    checks: Annotated[tuple[Check, ...], AfterValidator(_not_empty)]
    """The reward is the weight of the checks that hold divided by the total weight."""
    source: Literal["stdout", "file", "last_message"] = "stdout"
    """The agent's standard output, a file it left in its runtime, or the model's last answer."""
    part: Literal["all", "last_line"] = "all"
    """`last_line`: the last line that is not blank."""
    strip: bool = True
    """Remove whitespace at both ends before checking."""


class TestOnOutputEvaluator:
    """Checks one text, without using a runtime."""

    __test__: ClassVar[bool] = False
    name: ClassVar[str] = "test_on_output"
    Config: ClassVar[type[BaseModel]] = TestOnOutputConfig
    is_controlled: ClassVar[bool] = True

    def __init__(self, config: TestOnOutputConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: TaskAtFault if a regular expression times out."""
        output, missing = await answer_of(context, self._config)
        if output is None:
            return Reward(reward=0.0, details={"source": self._config.source, "missing": missing})
        text = self._relevant(output)
        passed = await self._passed(text)
        checks = self._config.checks
        total = sum(check.weight for check in checks)
        reward = sum(check.weight for check, ok in zip(checks, passed, strict=True) if ok) / total
        found = [
            {"kind": check.kind, "value": check.value, "weight": check.weight, "passed": ok}
            for check, ok in zip(checks, passed, strict=True)
        ]
        details = {"source": self._config.source, "output": text[:_MAX_SHOWN_CHARS], "checks": found}
        return Reward(reward=reward, details=details)

    def _relevant(self, output: str) -> str:
        if self._config.part == "last_line":
            lines = [line for line in output.splitlines() if line.strip()]
            output = lines[-1] if lines else ""
        return output.strip() if self._config.strip else output

    async def _passed(self, text: str) -> list[bool]:
        checks = self._config.checks
        patterns = [(check.value, check.ignore_case) for check in checks if check.kind == "regex"]
        found = iter(await matches(patterns, text, timeout_s=_REGEX_TIMEOUT_S) if patterns else ())
        return [next(found) if check.kind == "regex" else check.holds(text) for check in checks]
