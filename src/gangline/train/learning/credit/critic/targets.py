"""Computes advantages and the critic's targets from the values of a whole step's batches.

Advantages by a critic: generalised advantage estimation over the trained tokens of each trace.

With r_t the reward after token t, V_t the critic's value before it, and t + 1 the next trained token of the trace:

    delta_t = r_t + gamma * V_{t+1} - V_t
    A_t = delta_t + gamma * lam * A_{t+1}        return_t = A_t + V_t

After the last trained token of a trace, V and A are 0: nothing is bootstrapped over the end of a trace, nor over tokens
between turns, which the policy did not choose.

Invariants: with values of 0, gamma 1 and lam 1, A is the sum of the rewards to come. With the exact values, the mean of
A is 0. With lam 1 the returns do not depend on the values. Source: GAE (arXiv 1506.02438, 3); equal to verl's function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gangline.train.learning.advantages import AdvantageSettings, batch_advantages
from gangline.train.learning.credit.critic.settings import CriticSettings


class Estimate(NamedTuple):
    """[N] each."""

    advantages: NDArray[np.float64]
    """Before whitening and clipping."""
    returns: NDArray[np.float64]
    """The critic's targets."""


def estimate_traces(
    rewards: NDArray[np.float64], values: NDArray[np.float64], traces: NDArray[np.int64], settings: CriticSettings
) -> Estimate:
    """rewards, values: [N] of trained tokens, trace by trace, in order. traces: [N], each token's trace."""
    ends = np.append(np.flatnonzero(np.diff(traces)) + 1, len(traces))
    advantages, start = np.zeros(len(rewards)), 0
    for end in ends.tolist():
        advantages[start:end] = _advantages(rewards[start:end], values[start:end], settings)
        start = end
    return Estimate(advantages, advantages + values)


def _advantages(
    rewards: NDArray[np.float64], values: NDArray[np.float64], settings: CriticSettings
) -> NDArray[np.float64]:
    """[T] for one trace."""
    deltas = rewards + settings.gamma * np.append(values[1:], 0.0) - values
    decay, later = settings.gamma * settings.lam, 0.0
    found = np.empty(len(deltas))
    for at in range(len(deltas) - 1, -1, -1):
        found[at] = later = deltas[at] + decay * later
    return found


def explained_variance(returns: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """1 for a perfect critic, 0 for a critic that only knows the mean, less for a worse one. 0 if all returns are
    equal.
    """
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / variance if variance > 1e-12 else 0.0


class Rewarded(NamedTuple):
    """Trained tokens of one batch, [N] each."""

    rewards: NDArray[np.float64]
    """After each token."""
    traces: NDArray[np.int64]
    """Each token's trace. Tokens of one trace are adjacent and in order."""
    values: Tensor
    """The critic's values before the step's first update."""


class ValueTargets(NamedTuple):
    """[N] each, of one batch."""

    values: Tensor
    """The critic's values before the step's first update."""
    returns: Tensor


class Estimated(NamedTuple):
    """Lists with one entry per batch."""

    advantages: list[NDArray[np.float64]]
    targets: list[ValueTargets]
    metrics: dict[str, float]
    """Over all trained tokens of the step."""


def estimate_batches(batches: Sequence[Rewarded], critic: CriticSettings, advantage: AdvantageSettings) -> Estimated:
    """batches: all batches of a step. Under `scale: batch`, advantages are whitened over all of them."""
    found = [batch.values.double().cpu().numpy() for batch in batches]
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
