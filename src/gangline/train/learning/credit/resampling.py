"""Resampling of a step's sessions by their rewards. Source: PF-PPO (arXiv 2409.06957), as verl does it.

As many sessions are drawn as there are, with replacement. A session drawn k times has weight k: its tokens' weights are
multiplied, so nothing is computed twice. The factors of the drawn sessions have mean 1, so under `session_mean` the
loss equals the loss of k copies. The draw is derived from the sessions' ids, so a resumed step draws the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from gangline.train.options import TrainingOptions

_TINY = 1e-8
"""Keeps every chance above 0."""


class ResamplingSettings(TrainingOptions):
    method: Literal["power", "extremes", "best"] = "power"
    """How the chance of a session is computed. power: the absolute value of its reward to the power `power`. extremes:
    only the largest and the smallest rewards. best: the largest reward is four times as likely as any other.
    """
    power: float = Field(default=2.0, gt=0)
    """Only for `power`."""


def draw_weights(scores: ArrayLike, settings: ResamplingSettings) -> NDArray[np.float64]:
    """Relative chances [S] of sessions with these rewards [S]."""
    scores_S = np.asarray(scores, dtype=np.float64)
    match settings.method:
        case "power":
            weights = np.abs(scores_S) ** settings.power
        case "extremes":
            weights = ((scores_S == scores_S.max()) | (scores_S == scores_S.min())).astype(np.float64)
        case "best":
            weights = np.where(scores_S == scores_S.max(), 0.4, 0.1)
    return weights + _TINY


def drawn_factors(scores: Mapping[str, float], settings: ResamplingSettings) -> dict[str, float]:
    """Session id -> factor of its tokens' weights, 0 if it was not drawn. scores: session id -> its reward."""
    if not scores:
        return {}
    ids = sorted(scores)
    seed = int.from_bytes(hashlib.sha256("\n".join(ids).encode()).digest()[:8], "big")
    weights = draw_weights([scores[id_] for id_ in ids], settings)
    drawn = np.random.default_rng(seed).multinomial(len(ids), weights / weights.sum())
    scale = np.count_nonzero(drawn) / len(ids)
    return {one: float(scale * num) for one, num in zip(ids, drawn, strict=True)}
