"""Groups: the sessions of one task, and whether they may be compared with each other.

A session is valid if it has a reward, has at least one trace to train on, and did not fail through our fault: an
infrastructure fault means no reward, not a reward of 0. The treatment of an incomplete group is configured in advance;
a group is never shortened silently.

Turns whose log-probs do not belong to the distribution they were sampled from are masked here for every trainer; an
agent's side calls may be such turns. A session with only such turns is not valid. A group of such sessions is an error,
because another run would be the same.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from pydantic import Field, model_validator

from gangline.domain.errors import InvalidGroup
from gangline.domain.evidence.masks import is_masked
from gangline.domain.image_files import placed_images
from gangline.domain.session import SessionResult, is_usable
from gangline.domain.trajectory import Trace, TurnSpan
from gangline.rows.comparability import why_not_trainable
from gangline.rows.measured import why_not_measured
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.train.options import TrainingOptions

_log = logging.getLogger(__name__)

LOW_DEVIATION = 1e-5
"""Standard deviation of a group's rewards below which comparing them teaches nothing."""


class ValiditySettings(TrainingOptions):
    on_invalid: Literal["refuse", "shrink", "resubmit"] = "refuse"
    """refuse: an error. shrink: continue with the valid sessions if there are enough. resubmit: run the task again."""
    min_valid: int = Field(default=2, ge=2)
    """Only for `shrink`: groups with fewer valid sessions are dropped."""
    min_completed_fraction: float = Field(default=0.0, ge=0, le=1)
    """Only for `shrink`: the share of the task's sessions that must have completed with tokens to train on, counted as
    for `enough_sessions`; otherwise the group is dropped.
    """

    @model_validator(mode="after")
    def _has_a_use_for_its_fraction(self) -> ValiditySettings:
        if self.min_completed_fraction and self.on_invalid != "shrink":
            raise ValueError("min_completed_fraction takes groups that are not whole: set on_invalid to shrink")
        return self


@dataclass(frozen=True)
class CoalitionRewards:
    """The rewards of subsets of a task's players."""

    means: Mapping[frozenset[str], float]
    """Coalition -> mean reward of its sessions, including the empty coalition and the one of all players."""
    num_sessions: int
    """Sessions run only for these means."""


class Greedy(NamedTuple):
    """The greedy session run for a group."""

    reward: float
    num_tokens: int
    """Tokens that it sampled."""


@dataclass(frozen=True)
class Group:
    """The sessions of one task that are compared with each other, ordered by sample index."""

    task_id: str
    sessions: tuple[SessionResult, ...]
    coalitions: CoalitionRewards | None = None
    """None if coalitions are not measured, or not yet."""
    greedy: Greedy | None = None
    """None if no greedy session runs."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the sessions that have one."""
        return tuple(session.reward for session in self.sessions if session.reward is not None)

    @property
    def deviation(self) -> float:
        """Population standard deviation of the rewards; 0.0 without rewards."""
        return float(np.std(self.rewards)) if self.rewards else 0.0

    @property
    def is_informative(self) -> bool:
        """Whether the rewards differ enough to learn from."""
        return self.deviation >= LOW_DEVIATION


@dataclass(frozen=True)
class Verdict:
    """The decision on a group. `group` has only valid sessions; `reasons`: session id -> why it is not valid."""

    action: Literal["keep", "drop", "resubmit"]
    group: Group
    reasons: dict[str, str]


def trainable_traces(session: SessionResult) -> list[Trace]:
    """Traces with at least one token to train on, with full prompts and untrainable turns masked."""
    traces = () if session.trajectory is None else session.trajectory.traces
    whole = with_whole_prompts(traces) if any(one.shared_prefix is not None for one in traces) else traces
    masked = (_only_comparable(trace) for trace in whole if trace.untrainable is None)
    return [trace for trace in masked if trace.loss_mask.any()]


def require_no_images(trace: Trace) -> None:
    """For a trainer that does not receive pixels. Raises: InvalidGroup."""
    if placed_images(trace):
        raise InvalidGroup(
            f"{trace.trace_id} has images, and their pixels would be left behind here: train it where they are carried "
            "(docs/guides/vision.md), or leave such tasks out."
        )


def require_no_masks(trace: Trace) -> None:
    """For a trainer that computes log-probs over the whole vocabulary. Raises: InvalidGroup."""
    for span, certificate in zip(trace.spans, trace.certificates, strict=True):
        if is_masked(certificate) and trace.loss_mask[span.start : span.end].any():
            raise InvalidGroup(
                f"{span.completion_id} in {trace.trace_id} was drawn from a part of the vocabulary (top-k, top-p), and "
                "its sampling mask would not be replayed here: train it where masks are replayed "
                "(docs/guides/sampling-masks.md), or sample with capture.sampling.top_p.override: 1 and "
                "capture.sampling.top_k.override: -1 in the tasks."
            )


def _only_comparable(trace: Trace) -> Trace:
    left_out = [span for span, _ in _not_comparable(trace)]
    if not left_out:
        return trace
    keep = np.ones(len(trace.loss_mask), np.bool_)
    for span in left_out:
        keep[span.start : span.end] = False
    return msgspec.structs.replace(
        trace,
        loss_mask=np.where(keep, trace.loss_mask, 0).astype(trace.loss_mask.dtype),
        response_logprobs=np.where(keep, trace.response_logprobs, 0.0).astype(trace.response_logprobs.dtype),
        response_versions=np.where(keep, trace.response_versions, -1).astype(trace.response_versions.dtype),
    )


def _not_comparable(trace: Trace) -> Iterator[tuple[TurnSpan, str]]:
    """Turns with trained tokens whose log-probs cannot be used for training, and why."""
    for span, certificate in zip(trace.spans, trace.certificates, strict=True):
        if trace.loss_mask[span.start : span.end].any() and (why := why_not_trainable(certificate)) is not None:
            yield span, why


def early_ends(sessions: Iterable[SessionResult]) -> dict[str, int]:
    """Outcome other than `completed`, with the failure's code if there is one -> number of sessions."""
    found = Counter[str]()
    for session in sessions:
        if session.outcome != "completed":
            found[session.outcome if session.failure is None else f"{session.outcome} ({session.failure.code})"] += 1
    return dict(found)


def tokens_left_out(sessions: Iterable[SessionResult]) -> dict[str, int]:
    """Reason why tokens with `loss_mask = 1` must not be trained on -> number of tokens."""
    found = Counter[str]()
    for trace in (
        trace for session in sessions if session.trajectory is not None for trace in session.trajectory.traces
    ):
        for span, why in _not_comparable(trace):
            found[why] += int(np.count_nonzero(trace.loss_mask[span.start : span.end]))
    return dict(found)


def why_invalid(session: SessionResult) -> str | None:
    """Why a session cannot be compared; None if it can."""
    if session.held_out:
        return "it is held out: it measures, and is not trained on"
    if (why := why_not_measured(session)) is not None or trainable_traces(session):
        return why
    if reasons := tokens_left_out([session]):
        return f"none of its tokens can be trained on: {'; '.join(reasons)}"
    return "it has no trace to train on"


def judge_group(
    task_id: str,
    sessions: Sequence[SessionResult],
    num_samples: int,
    settings: ValiditySettings | None = None,
    *,
    enough: int | None = None,
) -> Verdict:
    """Decides whether to keep, drop or rerun a group. Logs a warning if the rewards hardly differ.

    num_samples: the task's number of sessions. enough: number of sessions that make its group whole, if not all are
    required. Raises: InvalidGroup if the group is incomplete under `refuse`, and always if its sessions only have
    tokens that cannot be trained on; the message lists every session with the reason.
    """
    settings, wanted = settings or ValiditySettings(), min(enough or num_samples, num_samples)
    reasons = {session.session_id: why for session in sessions if (why := why_invalid(session)) is not None}
    valid = Group(task_id, tuple(session for session in sessions if session.session_id not in reasons))
    if not valid.sessions and tokens_left_out(one for one in sessions if one.reward is not None):
        raise _invalid(valid, wanted, reasons, "Running the task again would give the same.")
    undone = {one.session_id: f"it ended as {one.outcome}" for one in valid.sessions if not is_usable(one)}
    if len(valid.sessions) - len(undone) < _num_completed(task_id, num_samples, settings, enough):
        return Verdict("drop", valid, reasons | undone)
    if len(valid.sessions) < wanted:
        return Verdict(_action(valid, wanted, settings, reasons), valid, reasons)
    if not valid.is_informative:
        _log.warning("group.one_reward task_id=%s deviation=%.1e", task_id, valid.deviation)
    return Verdict("keep", valid, reasons)


def _num_completed(task_id: str, num_samples: int, settings: ValiditySettings, enough: int | None) -> int:
    """Number of sessions that must have completed. Raises: InvalidGroup if the task ends with fewer."""
    least = math.ceil(num_samples * settings.min_completed_fraction - 1e-9)
    if enough is not None and enough < least:
        raise InvalidGroup(
            f"{task_id} ends with {enough} of {num_samples} sessions (enough_sessions), and min_completed_fraction "
            f"{settings.min_completed_fraction:g} asks for {least}, so every such group would be dropped: raise "
            "enough_sessions, or lower min_completed_fraction."
        )
    return least


def _action(
    valid: Group, num_samples: int, settings: ValiditySettings, reasons: dict[str, str]
) -> Literal["keep", "drop", "resubmit"]:
    if settings.on_invalid == "shrink":
        return "keep" if len(valid.sessions) >= settings.min_valid else "drop"
    if settings.on_invalid == "resubmit":
        return "resubmit"
    way_out = "Look at them with `gangline show`, or choose on_invalid: shrink or resubmit."
    raise _invalid(valid, num_samples, reasons, way_out)


def _invalid(valid: Group, num_samples: int, reasons: dict[str, str], way_out: str) -> InvalidGroup:
    why = "; ".join(f"{session_id}: {reason}" for session_id, reason in reasons.items()) or "the others have no result"
    return InvalidGroup(
        f"{len(valid.sessions)} of {num_samples} sessions of {valid.task_id} are valid ({why}). {way_out}"
    )
