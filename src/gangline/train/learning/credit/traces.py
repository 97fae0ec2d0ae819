"""Credit: how a session's advantage is distributed over its traces.

Sessions are compared with each other first (`gangline.train.learning.advantages`). A scheme only decides the share of
each trace, from 0 to 1. It never changes the sign of a session's advantage, and all traces of a session without an
advantage stay at 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gangline.train.options import TrainingOptions

CreditScheme = Literal["broadcast", "divided", "discounted", "last", "own"]
"""broadcast: each trace takes all of it. divided: 1/K for each of K. discounted: the last trace takes all, and each
earlier trace less by a factor. last: only the last trace takes any. own: by the evaluator's own rewards of the traces.
The best trace takes all of a positive advantage and the worst all of a negative one; the others take less by their
distance from it.
"""


class CreditSettings(TrainingOptions):
    scheme: CreditScheme = "broadcast"
    discount: float = Field(default=0.9, gt=0, le=1)
    """Only for `discounted`."""


def spread_advantage(
    advantage: float,
    num_traces: int,
    settings: CreditSettings | None = None,
    *,
    own: NDArray[np.float64] | None = None,
    own_range: float = 0.0,
) -> NDArray[np.float64]:
    """Advantage of each trace, in the order in which the session made them. Returns: [num_traces].

    own: [num_traces], the evaluator's rewards of the traces. own_range: largest minus smallest of such rewards in the
    group; a trace that far from its session's best or worst takes nothing. Raises: ValueError under the scheme `own`
    without such rewards.
    """
    settings = settings or CreditSettings()
    if settings.scheme == "own":
        if own is None or own.shape != (num_traces,):
            raise ValueError(
                "credit by the traces' own rewards needs one of each trace: is the evaluator a process one?"
            )
        return advantage * _own_shares(advantage, own, own_range)
    return advantage * _shares(num_traces, settings)


def _own_shares(advantage: float, own: NDArray[np.float64], own_range: float) -> NDArray[np.float64]:
    distance = own.max(initial=-np.inf) - own if advantage > 0 else own - own.min(initial=np.inf)
    return 1.0 - np.minimum(distance / own_range, 1.0) if own_range > 0 else np.ones(len(own))


def _shares(num: int, settings: CreditSettings) -> NDArray[np.float64]:
    match settings.scheme:
        case "divided":
            return np.full(num, 1.0 / max(num, 1))
        case "discounted":
            return settings.discount ** np.arange(num - 1, -1, -1, dtype=np.float64)
        case "last":
            return (np.arange(num) == num - 1).astype(np.float64)
        case _:
            return np.ones(num)
