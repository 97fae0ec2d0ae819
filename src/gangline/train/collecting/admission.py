"""Staleness: how many policy versions ago a trace was sampled, and whether it may still be used for training."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np
from pydantic import Field

from gangline.domain.completion import VersionSpan
from gangline.domain.tokens import LossMask, Versions
from gangline.domain.trajectory import Trace
from gangline.train.options import TrainingOptions


class StalenessSettings(TrainingOptions):
    max_lag: int = Field(default=1, ge=0)
    """In versions. 0 is on-policy only."""
    measured_by: Literal["oldest_token", "start"] = "oldest_token"
    """The oldest trained token, or the first token of the trajectory."""


def version_spans(versions: Versions) -> tuple[VersionSpan, ...]:
    """Runs of tokens with the same version. Masked tokens (-1) are left out. versions: [T]."""
    if len(versions) == 0:
        return ()
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    spans = (VersionSpan(int(versions[start]), start, end) for start, end in itertools.pairwise(cuts))
    return tuple(span for span in spans if span.version >= 0)


def lag_of(
    traces: Iterable[Trace], current_version: int, measured_by: Literal["oldest_token", "start"] = "oldest_token"
) -> int | None:
    """Versions between `current_version` and the traces' trained tokens; None if any trained token has no known
    version.

    Traces must be in the order in which the session made them. Returns 0 if there is no trained token.
    """
    parts = [_trained(trace.response_versions, trace.loss_mask) for trace in traces]
    versions = np.concatenate([*parts, np.empty(0, np.int32)])
    if (versions < 0).any():
        return None
    if len(versions) == 0:
        return 0
    return current_version - int(versions.min() if measured_by == "oldest_token" else versions[0])


def _trained(versions: Versions, mask: LossMask) -> Versions:
    return versions[mask != 0]


def is_fresh(traces: Iterable[Trace], current_version: int, settings: StalenessSettings) -> bool:
    """Whether the trainer of `current_version` may use the traces. False if their version is unknown."""
    lag = lag_of(traces, current_version, settings.measured_by)
    return lag is not None and lag <= settings.max_lag


def lag_histogram(traces: Iterable[Trace], current_version: int) -> dict[int, int]:
    """lag in versions -> number of trained tokens, sorted by lag. Tokens of unknown version are left out."""
    counts: Counter[int] = Counter()
    for trace in traces:
        versions, numbers = np.unique(_trained(trace.response_versions, trace.loss_mask), return_counts=True)
        for version, number in zip(versions.tolist(), numbers.tolist(), strict=True):
            if version >= 0:
                counts[current_version - version] += number
    return dict(sorted(counts.items()))
