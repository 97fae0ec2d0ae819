"""Rewards of tokens, for a critic: which token of a trace each reward comes after.

A session's reward comes after the last trained token of each of its traces, whole, however many traces there are: the
critic compares a trace with its own prediction, not with other sessions. With `turn_credit.weight`, a turn's score
times that weight comes after the turn's last trained token, or the last one before it where the turn is not trained on;
a score before the first trained token is no consequence of one. Scores of later traces come at the end of an earlier
one, beside the session's reward, for nothing is bootstrapped over the end of a trace.

Law: the rewards from a turn on, to the end of its trace, sum to the turn's undiscounted return (`credit.turns`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gangline.domain.trajectory import Trace
from gangline.train.learning.masks import Weights

__all__ = ["token_rewards"]


def token_rewards(
    traces: Sequence[Trace], weights: Sequence[Weights], reward: float, *, score_weight: float = 0.0
) -> list[NDArray[np.float64]]:
    """[T] of each trace of one session. weights: [T] of each; tokens of weight 0 have no reward. reward: shaped."""
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
