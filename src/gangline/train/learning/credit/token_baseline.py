"""The optimal token baseline: at each token, the group's mean return there, weighted by accumulated energy.

With pi the trainer's policy before the update, of token t of a session, and G_t the rewards from t to its trace's end:

    energy_t = (1 - 2 pi(token) + sum of pi^2 over the vocabulary) * correction_t^2
    W_t = energy_1 + ... + energy_t
    A_t = G_t - sum of (G_t W_t) / sum of W_t          sums over the group's sessions that have a token t

Tokens are a session's trained tokens, its traces concatenated. The baseline is 0 where only the longest session still
has tokens, and in groups of one session. Source: verl's `tir_optimal_token_baseline`, with equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_TINY = 1e-8
"""Added to a sum of energies, as verl does."""


class Energies(NamedTuple):
    """Trained tokens, [N] each. Tokens of one session are in order."""

    returns: NDArray[np.float64]
    energies: NDArray[np.float64]
    sessions: NDArray[np.int64]
    """Each token's session."""


def returns_of_traces(rewards: NDArray[np.float64], traces: NDArray[np.int64]) -> NDArray[np.float64]:
    """[N]: the rewards from each token to the end of its trace. traces: tokens of one trace must be adjacent."""
    found = rewards.copy()
    for at in range(len(found) - 2, -1, -1):
        if traces[at] == traces[at + 1]:
            found[at] += found[at + 1]
    return found


def optimal_advantages(tokens: Energies, groups: Sequence[int]) -> NDArray[np.float64]:
    """[N]. groups: [S], each session's group."""
    labels = np.array(groups, dtype=np.int64)
    advantages = tokens.returns.copy()
    places = [np.flatnonzero(tokens.sessions == session) for session in range(len(labels))]
    for group in np.unique(labels):
        mine = [places[session] for session in np.flatnonzero(labels == group) if len(places[session])]
        if len(mine) > 1:
            _subtract(advantages, tokens, mine)
    return advantages


def _subtract(advantages: NDArray[np.float64], tokens: Energies, mine: Sequence[NDArray[np.int64]]) -> None:
    """mine: places of the tokens of each session of one group."""
    second, longest = sorted(len(places) for places in mine)[-2:]
    numerator, denominator = np.zeros(longest), np.full(longest, _TINY)
    for places in mine:
        so_far = tokens.energies[places].cumsum()
        numerator[: len(places)] += tokens.returns[places] * so_far
        denominator[: len(places)] += so_far
    baseline = numerator / denominator
    baseline[second:] = 0.0
    for places in mine:
        advantages[places] -= baseline[: len(places)]
