"""Rewards of tokens, for a critic: the token of a trace after which each reward comes.

A session's whole reward comes after the last trained token of each of its traces, however many there are: the critic
compares a trace with its own prediction, not with other sessions. With `turn_credit.weight`, a turn's score times that
weight comes after the turn's last trained token, or after the last one before it if the turn is not trained on. Scores
before the first trained token are ignored. Scores of later traces are added at the end of earlier ones, with the
session's reward, because nothing is bootstrapped over the end of a trace.

Law: the rewards from a turn to the end of its trace sum to the turn's undiscounted return (`credit.turns`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gangline.domain.trajectory import Trace
from gangline.train.learning.masks import Weights


def token_rewards(
    traces: Sequence[Trace], weights: Sequence[Weights], reward: float, *, score_weight: float = 0.0
) -> list[NDArray[np.float64]]:
    """[T] for each trace of one session. weights: [T] of each; tokens of weight 0 have no reward. reward: shaped."""
    found = [np.zeros(len(trace.response_ids)) for trace in traces]
    later = reward
    for trace, weights_T, rewards_T in reversed(list(zip(traces, weights, found, strict=True))):
        scores = [score_weight * (span.score or 0.0) for span in trace.spans]
        trained = np.flatnonzero(weights_T)
        if len(trained):
            rewards_T[trained[-1]] += later
            for span, score in zip(trace.spans, scores, strict=True):
                before = trained[trained < span.end]
                if len(before):
                    rewards_T[before[-1]] += score
        later += sum(scores)
    return found
