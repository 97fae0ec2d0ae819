"""The record of each session of an evaluation: enough for every report, without tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gangline.domain.session import SessionResult
from gangline.rows.measured import why_not_measured


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session of an evaluation."""

    session_id: str
    task: str
    """The task's name in the evaluation, the same for every agent and engine."""
    sample: int
    outcome: str
    reward: float | None
    """None if the session is not informative about the model: an infrastructure fault, a cancelled or ungraded session,
    an agent that failed before a model call was answered.
    """
    boundary: str | None = None
    """Boundary of its failure, if any."""
    code: str | None = None
    turns: int
    """Answered model calls."""
    prompt_tokens: int
    """Sum over all calls."""
    sampled_tokens: int
    seconds: float
    """From the start of its first stage to the end of its last."""
    metadata: dict[str, Any] = {}
    """The task's metadata."""


def record_of(
    result: SessionResult, task: str, sample: int, metadata: Mapping[str, Any], *, needs_model: bool = True
) -> SessionRecord:
    """needs_model: False for an agent with `allow_no_model_call`."""
    complete = [completion for completion in result.completions if completion.status == "complete"]
    failure = result.failure
    return SessionRecord(
        session_id=result.session_id,
        task=task,
        sample=sample,
        outcome=str(result.outcome),
        reward=None if why_not_measured(result, needs_model=needs_model) is not None else result.reward,
        boundary=None if failure is None else failure.boundary,
        code=None if failure is None else failure.code,
        turns=len({one.completion_id.partition(".")[0] for one in complete}),
        prompt_tokens=sum(one.prompt_shared + len(one.prompt_suffix_ids) for one in complete),
        sampled_tokens=sum(len(one.sampled_ids) for one in complete),
        seconds=_seconds(result),
        metadata=dict(metadata),
    )


def _seconds(result: SessionResult) -> float:
    if not result.timings:
        return 0.0
    return max(timing.ended_at for timing in result.timings) - min(timing.started_at for timing in result.timings)
