"""The verdict of an audit, as stored in its task."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VerdictName = Literal["sound", "unproven", "defective"]
"""`sound`: all checks passed. `unproven`: none failed, but an important one was not made. `defective`: one failed."""
CheckStatus = Literal["passed", "failed", "not_checked"]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskVerdict(_Spec):
    """The verdict of `gangline vet` on a task. It applies only to the content that was audited."""

    verdict: VerdictName
    digest: str
    """Digest of the audited content: instruction, runtime, evaluator and budgets."""
    checks: dict[str, CheckStatus] = Field(default_factory=dict)
    vetted_at: str
    """UTC, ISO 8601."""
    gangline: str
    """Version of Gangline that audited it."""
