"""Statistics of an evaluation: unbiased pass@k and pass^k, errors clustered by task, paired differences.

Sessions of one task are not independent draws, so every error is computed over tasks. Sources: Chen et al., Evaluating
large language models trained on code (arXiv 2107.03374), 2.1, for pass@k; Yao et al., tau-bench (arXiv 2406.12045), 4,
for pass^k; Miller, Adding error bars to evals (arXiv 2411.00640), for clustered and paired errors; Wilson, Probable
inference, the law of succession, and statistical inference (JASA 22, 1927), where all tasks pass or none does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gangline.domain.errors import InvalidRequest

_RESAMPLES = 10_000
_LEVEL = 0.95
_QUANTILE = 1.959964
"""The normal distribution's quantile for that level."""
_DRAWN_AT_ONCE = 1_000_000


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks."""

    mean: float
    standard_error: float | None
    """Over tasks; None for a single one, and where all tasks are alike, which says nothing of the next one."""
    num_tasks: int
    interval: tuple[float, float] | None = None
    """Wilson's 95 % interval of a share that is 1 for every task, or 0: the spread tells no error there."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Improvement of the second evaluation over the first, on the tasks that both contain."""

    mean: float
    standard_error: float | None
    """Over tasks; None for a single task."""
    low: float
    high: float
    """Bounds of the 95 % bootstrap interval over resampled tasks."""
    num_tasks: int
    better: tuple[str, ...]
    """Tasks in which the second is better, largest gain first."""
    worse: tuple[str, ...]

    @property
    def is_visible(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased probability that at least one of `k` samples passes: 1 - C(n - c, k) / C(n, k).

    Raises: InvalidRequest if there are fewer than `k` samples.
    """
    _check(num_samples, num_passed, k)
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def pass_hat_k(num_samples: int, num_passed: int, k: int) -> float:
    """pass^k, the probability that all of `k` samples pass: C(c, k) / C(n, k).

    Raises: as `pass_at_k`.
    """
    _check(num_samples, num_passed, k)
    return math.comb(num_passed, k) / math.comb(num_samples, k)


def _check(num_samples: int, num_passed: int, k: int) -> None:
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise InvalidRequest(f"k is {k}, and a task has {num_samples} samples that count: it takes at least {k}.")


def estimate_of(values: Sequence[float], *, is_share: bool = False) -> Estimate | None:
    """values: one of each task. is_share: they lie between 0 and 1. None where there is no value."""
    if not values:
        return None
    mean, alike = math.fsum(values) / len(values), len(set(values)) == 1
    error = None if alike else _standard_error(values)
    interval = _all_or_none(len(values), values[0]) if is_share and alike and values[0] in (0.0, 1.0) else None
    return Estimate(mean=mean, standard_error=error, num_tasks=len(values), interval=interval)


def _all_or_none(num: int, share: float) -> tuple[float, float]:
    """Bounds for a share of 0 or 1 of `num` draws."""
    open_end = _QUANTILE**2 / (num + _QUANTILE**2)
    return (1 - open_end, 1.0) if share else (0.0, open_end)


def difference_of(before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0) -> Difference | None:
    """Paired by task, so that differences between tasks cancel out. None if no task is in both.

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
