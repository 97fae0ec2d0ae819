"""Statistics of an evaluation: unbiased pass@k and pass^k, errors clustered by task, paired differences.

Sessions of one task are no independent draws, so every error is computed over tasks. Sources: Chen et al., Evaluating
large language models trained on code (arXiv 2107.03374), 2.1, for pass@k; Yao et al., tau-bench (arXiv 2406.12045), 4,
for pass^k; Miller, Adding error bars to evals (arXiv 2411.00640), for clustered and paired errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gangline.domain.errors import InvalidRequest

__all__ = ["Difference", "Estimate", "difference_of", "estimate_of", "pass_at_k", "pass_hat_k"]

_RESAMPLES = 10_000
_LEVEL = 0.95
_DRAWN_AT_ONCE = 1_000_000


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks."""

    mean: float
    standard_error: float | None
    """Over tasks; None for a single one."""
    num_tasks: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How much better the second of two is, over the tasks that both have."""

    mean: float
    standard_error: float | None
    """Over tasks; None for a single one."""
    low: float
    high: float
    """Bounds of the 95 % bootstrap interval, of resampled tasks."""
    num_tasks: int
    better: tuple[str, ...]
    """Tasks in which the second does better, the largest gain first."""
    worse: tuple[str, ...]

    @property
    def is_visible(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that at least one of `k` samples passes, without bias: 1 - C(n - c, k) / C(n, k).

    Raises: InvalidRequest where there are fewer than `k` samples.
    """
    _check(num_samples, num_passed, k)
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def pass_hat_k(num_samples: int, num_passed: int, k: int) -> float:
    """pass^k, the chance that all of `k` samples pass: C(c, k) / C(n, k).

    Raises: as `pass_at_k`.
    """
    _check(num_samples, num_passed, k)
    return math.comb(num_passed, k) / math.comb(num_samples, k)


def _check(num_samples: int, num_passed: int, k: int) -> None:
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise InvalidRequest(f"k is {k}, and a task has {num_samples} samples that count: it takes at least {k}.")


def estimate_of(values: Sequence[float]) -> Estimate | None:
    """values: one of each task. None where there is none."""
    if not values:
        return None
    return Estimate(mean=math.fsum(values) / len(values), standard_error=_standard_error(values), num_tasks=len(values))


def difference_of(before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0) -> Difference | None:
    """By task, in pairs: the differences between tasks themselves cancel out. None where no task is in both.

    before, after: task -> its mean. seed: of the bootstrap.
    """
    shared = [task for task in before if task in after]
    if not shared:
        return None
    gains = np.array([after[task] - before[task] for task in shared])
    low, high = _interval(gains, seed)
    by_gain = sorted(zip(gains.tolist(), shared, strict=True))
    return Difference(
        mean=float(gains.mean()),
        standard_error=_standard_error(gains.tolist()),
        low=low,
        high=high,
        num_tasks=len(shared),
        better=tuple(task for gain, task in reversed(by_gain) if gain > 0),
        worse=tuple(task for gain, task in by_gain if gain < 0),
    )


def _standard_error(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def _interval(gains: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """Percentiles of the means of resampled tasks."""
    chance, num_tasks = np.random.default_rng(seed), len(gains)
    at_once = max(_DRAWN_AT_ONCE // num_tasks, 1)
    means = np.concatenate(
        [
            gains[chance.integers(num_tasks, size=(min(at_once, _RESAMPLES - done), num_tasks))].mean(axis=1)
            for done in range(0, _RESAMPLES, at_once)
        ]
    )
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
