"""Groups: the sessions of one task, and whether they may be compared with each other.

A session is valid when it has a reward, at least one trace to train on, and we did not break: a fault of the
infrastructure is no reward of 0, it is no reward. What a trainer does with a group that is not whole is its choice,
named beforehand, and never a silently short group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from gangline.domain.errors import InvalidGroup
from gangline.domain.lifecycle import is_infrastructure_fault
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from gangline.training.options import TrainingOptions

__all__ = [
    "LOW_DEVIATION",
    "Group",
    "ValiditySettings",
    "Verdict",
    "judge_group",
    "trainable_traces",
    "why_invalid",
    "why_without_reward",
]

_log = logging.getLogger(__name__)

LOW_DEVIATION = 1e-5
"""Of a group's rewards: below it there is nothing to learn from comparing them."""


class ValiditySettings(TrainingOptions):
    on_invalid: Literal["refuse", "shrink", "resubmit"] = "refuse"
    """refuse: an error. shrink: go on with the valid sessions if there are enough. resubmit: run the task again."""
    min_valid: int = Field(default=2, ge=2)
    """Only for `shrink`: with fewer the group is dropped."""


@dataclass(frozen=True)
class Group:
    """The sessions of one task that are compared with each other, by sample index."""

    task_id: str
    sessions: tuple[SessionResult, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of the sessions that have one."""
        return tuple(session.reward for session in self.sessions if session.reward is not None)

    @property
    def deviation(self) -> float:
        """Population deviation of the rewards; 0.0 of none."""
        return float(np.std(self.rewards)) if self.rewards else 0.0

    @property
    def is_informative(self) -> bool:
        """Whether comparing the sessions teaches anything."""
        return self.deviation >= LOW_DEVIATION


@dataclass(frozen=True)
class Verdict:
    """What becomes of a group. `group` has only its valid sessions; `reasons`: session id -> why it is not valid."""

    action: Literal["keep", "drop", "resubmit"]
    group: Group
    reasons: dict[str, str]


def trainable_traces(session: SessionResult) -> list[Trace]:
    """Traces with at least one token to train on."""
    traces = () if session.trajectory is None else session.trajectory.traces
    return [trace for trace in traces if trace.untrainable is None and bool(trace.loss_mask.any())]


def why_without_reward(session: SessionResult) -> str | None:
    """Why a session says nothing of how good its policy is; None when it does."""
    failure = session.failure
    if session.outcome in ("infra_error", "cancelled"):
        return f"it ended as {session.outcome}" + ("" if failure is None else f": {failure.message}")
    if failure is not None and is_infrastructure_fault(failure) and session.reward is None:
        return f"{failure.boundary} failed: {failure.message}"
    if session.reward is None:
        return "it has no reward"
    return None


def why_invalid(session: SessionResult) -> str | None:
    """Why a session cannot be compared; None when it can."""
    why = why_without_reward(session)
    return "it has no trace to train on" if why is None and not trainable_traces(session) else why


def judge_group(
    task_id: str, sessions: Sequence[SessionResult], num_samples: int, settings: ValiditySettings | None = None
) -> Verdict:
    """Keep, drop or run again. num_samples: sessions that the task has. Warns of rewards that hardly differ.

    Raises: InvalidGroup when the group is not whole and `refuse` is set; the message names every session and why.
    """
    settings = settings or ValiditySettings()
    reasons = {session.session_id: why for session in sessions if (why := why_invalid(session)) is not None}
    valid = Group(task_id, tuple(session for session in sessions if session.session_id not in reasons))
    if len(valid.sessions) < num_samples:
        return Verdict(_action(valid, num_samples, settings, reasons), valid, reasons)
    if not valid.is_informative:
        _log.warning("group.one_reward task_id=%s deviation=%.1e", task_id, valid.deviation)
    return Verdict("keep", valid, reasons)


def _action(
    valid: Group, num_samples: int, settings: ValiditySettings, reasons: dict[str, str]
) -> Literal["keep", "drop", "resubmit"]:
    if settings.on_invalid == "shrink":
        return "keep" if len(valid.sessions) >= settings.min_valid else "drop"
    if settings.on_invalid == "resubmit":
        return "resubmit"
    why = "; ".join(f"{session_id}: {reason}" for session_id, reason in reasons.items()) or "the others have no result"
    raise InvalidGroup(
        f"{len(valid.sessions)} of {num_samples} sessions of {valid.task_id} are valid ({why}). Look at them with "
        "`gangline show`, or choose on_invalid: shrink or resubmit."
    )
