"""Credit by turns: the evaluator's scores of single turns as advantages beside the session's.

A turn's advantage is `A + weight * B`: A is its trace's share of the session's advantage, B the turn's score compared
with the scores of all turns of the group, as sessions are compared (`AdvantageSettings`): by default
`(score - mean) / (deviation + epsilon)`, over turns. Only turns with a score and a trained token are compared; others
have B = 0.

Laws: the B of a group sum to 0 over its turns, unless they are clipped. Scores that are all the same, or a weight of 0,
leave plain GRPO. A constant added to all scores changes nothing. Source: iStar (arXiv 2509.19199, 3.2), which paper 003
names; normalised within the group as GRPO's rewards are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gangline.domain.errors import InvalidGroup
from gangline.domain.trajectory import Trace, TurnSpan
from gangline.training.collecting.groups import Group, trainable_traces
from gangline.training.learning.advantages import AdvantageSettings, group_advantages
from gangline.training.options import TrainingOptions

__all__ = ["TurnCreditSettings", "mean_turn_score", "require_turn_scores", "turn_advantages"]


class TurnCreditSettings(TrainingOptions):
    weight: float = Field(default=0.0, ge=0)
    """How much a turn's score counts beside the session's reward; 0 ignores turn scores."""


def turn_advantages(traces: Sequence[Trace], settings: AdvantageSettings) -> list[NDArray[np.float64]]:
    """How much better each turn is than the turns of its group. traces: all of the group. Returns: [T] for each."""
    found = [np.zeros(len(trace.response_ids)) for trace in traces]
    scored = [(index, span, score) for index, trace in enumerate(traces) for span, score in _scored(trace)]
    compared = group_advantages([score for _, _, score in scored], settings)
    for (index, span, _), advantage in zip(scored, compared, strict=True):
        found[index][span.start : span.end] = advantage
    return found


def _scored(trace: Trace) -> Iterator[tuple[TurnSpan, float]]:
    """Turns with a score and a token to train on."""
    for span in trace.spans:
        if span.score is not None and trace.loss_mask[span.start : span.end].any():
            yield span, span.score


def _scores(groups: Iterable[Group]) -> list[float]:
    traces = (trace for group in groups for session in group.sessions for trace in trainable_traces(session))
    return [score for trace in traces for _, score in _scored(trace)]


def mean_turn_score(groups: Iterable[Group]) -> float | None:
    """Mean score of the turns that are trained on; None where none has one."""
    scores = _scores(groups)
    return float(np.mean(scores)) if scores else None


def require_turn_scores(groups: Sequence[Group], wanted_by: str) -> None:
    """Raises: InvalidGroup when no turn of the groups has a score. wanted_by: the setting that needs them."""
    if not _scores(groups):
        raise InvalidGroup(
            f"{wanted_by} needs scores of turns, and no turn of {', '.join(group.task_id for group in groups)} has "
            "one. Use an evaluator that scores turns, such as per_turn or script, or change that setting."
        )
