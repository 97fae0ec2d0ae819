"""From the values of a whole step's batches to their advantages, and to what the critic should have said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gangline.train.learning.advantages import AdvantageSettings, batch_advantages
from gangline.train.learning.credit.critic.estimate import estimate_traces, explained_variance
from gangline.train.learning.credit.critic.settings import CriticSettings

__all__ = ["Estimated", "Rewarded", "ValueTargets", "estimate_batches"]


class Rewarded(NamedTuple):
    """Trained tokens of one batch, [N] each."""

    rewards: NDArray[np.float64]
    """After each token."""
    traces: NDArray[np.int64]
    """Which trace a token is of; the tokens of one stand together, in order."""
    values: Tensor
    """The critic's before the step's first update."""


class ValueTargets(NamedTuple):
    """[N] each, of one batch."""

    values: Tensor
    """The critic's before the step's first update."""
    returns: Tensor


class Estimated(NamedTuple):
    """By batch."""

    advantages: list[NDArray[np.float64]]
    targets: list[ValueTargets]
    metrics: dict[str, float]
    """Over all trained tokens of the step."""


def estimate_batches(batches: Sequence[Rewarded], critic: CriticSettings, advantage: AdvantageSettings) -> Estimated:
    """batches: all of a step. Under `scale: batch`, advantages are whitened over all of them."""
    found = [one.values.double().cpu().numpy() for one in batches]
    estimates = [
        estimate_traces(one.rewards, values, one.traces, critic) for one, values in zip(batches, found, strict=True)
    ]
    joined = np.concatenate([np.empty(0), *(one.advantages for one in estimates)])
    ends = np.cumsum([len(values) for values in found])
    values = np.concatenate([np.empty(0), *found])
    returns = np.concatenate([np.empty(0), *(one.returns for one in estimates)])
    return Estimated(
        np.split(batch_advantages(joined, advantage), ends[:-1]) if batches else [],
        [
            ValueTargets(one.values, one.values.new_tensor(estimate.returns))
            for one, estimate in zip(batches, estimates, strict=True)
        ],
        {
            "explained_variance": explained_variance(returns, values),
            "value_mean": float(values.mean()) if len(values) else 0.0,
            "return_mean": float(returns.mean()) if len(returns) else 0.0,
        },
    )
