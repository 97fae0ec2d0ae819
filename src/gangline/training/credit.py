"""Credit: how a session's reward is spread over its traces."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gangline.training.options import TrainingOptions

__all__ = ["CreditScheme", "CreditSettings", "trace_credits"]

CreditScheme = Literal["broadcast", "divided", "discounted", "last", "own"]
"""broadcast: all of it to each. divided: 1/K to each of K. discounted: all to the last, and less by a factor for every
trace before it. last: all to the last, 0 to the others. own: what the evaluator gave the trace."""


class CreditSettings(TrainingOptions):
    scheme: CreditScheme = "broadcast"
    discount: float = Field(default=0.9, gt=0, le=1)
    """Only for `discounted`."""


def trace_credits(
    reward: float, num_traces: int, settings: CreditSettings | None = None, *, own: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Reward of each trace, in the order in which the session made them. Returns: [num_traces].

    own: [num_traces] the evaluator's own rewards. Raises: ValueError when `own` is wanted and there is none.
    """
    settings = settings or CreditSettings()
    if settings.scheme == "own":
        if own is None or own.shape != (num_traces,):
            raise ValueError(
                "credit by the traces' own rewards needs one of each trace: is the evaluator a process one?"
            )
        return own
    return reward * _shares(num_traces, settings)


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
