"""The audit of a task, as far as the task itself has it: its reference solution before, its verdict after."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["CheckStatus", "SolutionSpec", "TaskVerdict", "VerdictName"]

VerdictName = Literal["sound", "unproven", "defective"]
"""`sound`: all checks passed. `unproven`: none failed, and one that matters was not made. `defective`: one failed."""
CheckStatus = Literal["passed", "failed", "not_checked"]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SolutionSpec(_Spec):
    """A task's reference solution, for `gangline vet`. No session of the task sees it."""

    command: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Solves the task in the working folder; a string goes to `sh -c`."""
    files: dict[str, str] = Field(default_factory=dict)
    """Path in the working folder -> content of the finished file."""
    patch: str | None = None
    """A patch for `git apply` in the working folder."""
    answer: str | None = None
    """The text that an agent would answer."""
    reward: float = 1.0
    """Reward that it earns: the top of the task's range."""
    floor: float = 0.0
    """Reward of an agent that does nothing, at most."""

    @model_validator(mode="after")
    def _is_one(self) -> SolutionSpec:
        given = [self.command is not None, bool(self.files), self.patch is not None, self.answer is not None]
        if sum(given) != 1:
            raise ValueError("give one of command, files, patch and answer")
        if self.floor >= self.reward:
            raise ValueError("floor must be below reward")
        return self


class TaskVerdict(_Spec):
    """The verdict of `gangline vet` on a task. It holds for the content that it was made of, and no other."""

    verdict: VerdictName
    digest: str
    """Digest of the audited content: instruction, runtime, evaluator and budgets."""
    checks: dict[str, CheckStatus] = Field(default_factory=dict)
    vetted_at: str
    """UTC, ISO 8601."""
    gangline: str
    """Version that audited it."""
