"""Credit by turns: uses the evaluator's scores of single turns as advantages in addition to the session's.

A turn's advantage is `A + weight * B`: A is its trace's share of the session's advantage. B compares the turn's score
with the scores of all turns of the group, as sessions are compared (`AdvantageSettings`): by default `(score - mean) /
(deviation + epsilon)`, over turns. Only turns with a score and a trained token are compared; others have B = 0.

Invariants: the B of a group sum to 0 over its turns, unless they are clipped. Equal scores or a weight of 0 give plain
GRPO. Adding a constant to all scores changes nothing. Source: iStar (arXiv 2509.19199, 3.2),
normalised within the group as GRPO's rewards are.

With `returns`, turns are compared instead of sessions: a turn's return is `score + discount * return of the next turn`,
over the turns of all traces of a session, and the session's reward comes after the last turn. A turn without a score
counts as 0. The turn's tokens take its advantage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from gangline.domain.errors import InvalidGroup
from gangline.domain.trajectory import Trace, TurnSpan
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.learning.advantages import AdvantageSettings, group_advantages
from gangline.train.options import TrainingOptions


class TurnReturnSettings(TrainingOptions):
    """A turn's return: its score plus the discounted scores of the session's later turns and the session's reward."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor for each turn in between."""
    compare: Literal["group", "position"] = "group"
    """Compare a turn with all turns of the group, or with turns of the same number in the other sessions."""


class TurnCreditSettings(TrainingOptions):
    """Settings of turn credit. At most one of `weight` and `returns`."""

    weight: float = Field(default=0.0, ge=0)
    """Weight of a turn's score relative to the session's reward; 0 ignores turn scores."""
    returns: TurnReturnSettings | None = None
    """Compares turns by their returns instead of sessions by their rewards; None compares sessions."""

    @model_validator(mode="after")
    def _fits(self) -> TurnCreditSettings:
        if self.weight > 0 and self.returns is not None:
            raise ValueError("returns have the scores of turns in them: leave out weight or returns")
        return self


def turn_advantages(traces: Sequence[Trace], settings: AdvantageSettings) -> list[NDArray[np.float64]]:
    """How much better each turn is than the turns of its group. traces: all traces of the group. Returns: [T] for
    each.
    """
    found = [np.zeros(len(trace.response_ids)) for trace in traces]
    scored = [(index, span, score) for index, trace in enumerate(traces) for span, score in _scored(trace)]
    compared = group_advantages([score for _, _, score in scored], settings)
    for (index, span, _), advantage in zip(scored, compared, strict=True):
        found[index][span.start : span.end] = advantage
    return found


def return_advantages(
    traces: Sequence[Sequence[Trace]], rewards: Sequence[float], credit: TurnReturnSettings, settings: AdvantageSettings
) -> list[NDArray[np.float64]]:
    """traces: per session of a group. rewards: each session's shaped reward. Returns: [T] for each trace, in order."""
    turns = [[(at, span) for at, trace in enumerate(mine) for span in trace.spans] for mine in traces]
    returns = [
        _returns([span.score or 0.0 for _, span in mine], reward, credit.discount)
        for mine, reward in zip(turns, rewards, strict=True)
    ]
    found = [[np.zeros(len(trace.response_ids)) for trace in mine] for mine in traces]
    for chosen in _compared([len(mine) for mine in turns], credit.compare):
        advantages = group_advantages([returns[session][turn] for session, turn in chosen], settings)
        for (session, turn), advantage in zip(chosen, advantages, strict=True):
            at, span = turns[session][turn]
            found[session][at][span.start : span.end] = advantage
    return [one for mine in found for one in mine]


def _returns(scores: Sequence[float], reward: float, discount: float) -> list[float]:
    """The return of each turn. The last turn gets the undiscounted reward."""
    found, later = list[float](), 0.0
    for number, score in enumerate(reversed(scores)):
        later = score + (discount * later if number else reward)
        found.append(later)
    return found[::-1]


def _compared(num_turns: Sequence[int], compare: str) -> list[list[tuple[int, int]]]:
    """Sets of (session, turn) that are compared with each other."""
    every = [(session, turn) for session, num in enumerate(num_turns) for turn in range(num)]
    if compare == "group":
        return [every]
    return [[one for one in every if one[1] == turn] for turn in range(max(num_turns, default=0))]


def _scored(trace: Trace) -> Iterator[tuple[TurnSpan, float]]:
    """Turns with a score and a token to train on."""
    for span in trace.spans:
        if span.score is not None and trace.loss_mask[span.start : span.end].any():
            yield span, span.score


def _scores(groups: Iterable[Group]) -> list[float]:
    traces = (trace for group in groups for session in group.sessions for trace in trainable_traces(session))
    return [score for trace in traces for _, score in _scored(trace)]


def mean_turn_score(groups: Iterable[Group]) -> float | None:
    """Mean score of the trained turns; None if no turn has a score."""
    scores = _scores(groups)
    return float(np.mean(scores)) if scores else None


def require_turn_scores(groups: Sequence[Group], wanted_by: str) -> None:
    """Raises: InvalidGroup if no turn of the groups has a score. wanted_by: the setting that needs them."""
    if not _scores(groups):
        raise InvalidGroup(
            f"{wanted_by} needs scores of turns, and no turn of {', '.join(group.task_id for group in groups)} has "
            "one. Use an evaluator that scores turns, such as per_turn or script, or change that setting."
        )
