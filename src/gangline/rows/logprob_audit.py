"""The model part of the audit: compares recorded log-probs with log-probs recomputed by teacher forcing.

On rows with exact contexts they differ by numerical noise. On spliced rows they show the cost of splicing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from gangline.domain.tokens import Logprobs, TokenIds
from gangline.domain.trajectory import Trace, Trajectory
from gangline.rows.audit import turn_class
from gangline.rows.comparability import scoring_temperature, why_not_comparable
from gangline.rows.shared_prefixes import with_whole_prompts

Score = Callable[[TokenIds, float], Logprobs]
"""(ids [T], temperature) -> log-prob of each id given the previous ids [T]; the first entry is not read."""


class LogprobStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of |re-computed - recorded|, in nats per token."""

    num_tokens: int
    mean: float
    p50: float
    p99: float
    max: float


@dataclass
class LogprobDifferences:
    """Collects differences over many sessions."""

    by_class: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict[str, list[NDArray[np.float64]]])
    """turn class -> signed differences (re-computed minus recorded)."""
    not_comparable: dict[str, int] = field(default_factory=dict[str, int])
    """reason -> trained tokens left out."""

    def stats(self) -> dict[str, LogprobStats]:
        return {name: _stats(np.concatenate(parts)) for name, parts in sorted(self.by_class.items())}


def _stats(differences: NDArray[np.float64]) -> LogprobStats:
    sizes = np.abs(differences)
    return LogprobStats(
        num_tokens=len(sizes),
        mean=float(sizes.mean()),
        p50=float(np.percentile(sizes, 50)),
        p99=float(np.percentile(sizes, 99)),
        max=float(sizes.max()),
    )


def compare_logprobs(
    trajectories: Iterable[Trajectory],
    score: Score,
    *,
    version: int | None = None,
    on_trace: Callable[[Trace], None] | None = None,
) -> LogprobDifferences:
    """Score every trained token again.

    version: the policy version of the model behind `score`; tokens of other versions are left out. None: compares all.
    on_trace: called after each trace, for progress.
    """
    differences = LogprobDifferences()
    for trajectory in trajectories:
        for trace in with_whole_prompts(trajectory.traces):
            _compare_trace(trace, score, version, differences)
            if on_trace is not None:
                on_trace(trace)
    return differences


def _compare_trace(trace: Trace, score: Score, version: int | None, differences: LogprobDifferences) -> None:
    scored: dict[float, Logprobs] = {}
    for index, span in enumerate(trace.spans):
        on = trace.loss_mask[span.start : span.end] == 1
        if version is not None:
            ours = trace.response_versions[span.start : span.end] == version
            _count(differences.not_comparable, "another policy version", int(np.count_nonzero(on & ~ours)))
            on = on & ours
        num = int(np.count_nonzero(on))
        reason = why_not_comparable(trace.certificates[index])
        if trace.certificates[index].images is not None:
            reason = "images: the model here is given ids alone"
        if num == 0 or reason is not None:
            _count(differences.not_comparable, reason or "", num)
            continue
        temperature = scoring_temperature(trace.certificates[index])
        if temperature not in scored:
            row = np.concatenate([trace.prompt_ids, trace.response_ids])
            scored[temperature] = score(row, temperature)[len(trace.prompt_ids) :]
        again = scored[temperature][span.start : span.end][on].astype(np.float64)
        recorded = trace.response_logprobs[span.start : span.end][on].astype(np.float64)
        differences.by_class.setdefault(turn_class(trace, index), []).append(again - recorded)


def _count(counts: dict[str, int], reason: str, num: int) -> None:
    if num:
        counts[reason] = counts.get(reason, 0) + num
