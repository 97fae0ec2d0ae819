"""The verdict of an audit, as its task has it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VerdictName = Literal["sound", "unproven", "defective"]
"""`sound`: all checks passed. `unproven`: none failed, and one that matters was not made. `defective`: one failed."""
CheckStatus = Literal["passed", "failed", "not_checked"]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


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
