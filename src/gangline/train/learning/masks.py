"""Masks: the sampled tokens of a trace that are trained on, and their weights. All return weights [T], 0.0 for
untrained tokens.

T is len(response_ids). A turn is a span of sampled tokens (`Trace.spans`). No mask gives weight to a token that
`loss_mask` excludes. Weights of several masks may be multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gangline.domain.tokens import TokenIds
from gangline.domain.trajectory import Trace
from gangline.train.options import TrainingOptions

Weights = NDArray[np.float32]
"""[T] 0.0 for untrained tokens."""


class ThinkingIds(TrainingOptions):
    """A model family's thinking markers: token ids, such as the ids of `<think>` and `</think>`."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


def all_sampled(trace: Trace) -> Weights:
    """The default: every sampled token that may be trained on."""
    return trace.loss_mask.astype(np.float32)


def action_only(trace: Trace, thinking: ThinkingIds) -> Weights:
    """Everything except the thinking and its markers. A turn that ends inside its thinking has no action.

    If the template begins the thinking in the prompt, a turn's first end marker ends it.
    """
    weights = all_sampled(trace)
    for span in trace.spans:
        weights[span.start : span.end] *= _outside(trace.response_ids[span.start : span.end], thinking)
    return weights


def _outside(ids: TokenIds, thinking: ThinkingIds) -> NDArray[np.bool_]:
    """[len(ids)] True for ids outside the thinking."""
    outside = np.ones(len(ids), dtype=np.bool_)
    begin, end = _find(ids, thinking.begin, 0), _find(ids, thinking.end, 0)
    if end is not None and (begin is None or end < begin):
        outside[: end + len(thinking.end)] = False
        begin = _find(ids, thinking.begin, end + len(thinking.end))
    while begin is not None:
        end = _find(ids, thinking.end, begin + len(thinking.begin))
        stop = len(ids) if end is None else end + len(thinking.end)
        outside[begin:stop] = False
        begin = _find(ids, thinking.begin, stop)
    return outside


def _find(ids: TokenIds, wanted: tuple[int, ...], start: int) -> int | None:
    """Index of the first occurrence of `wanted` at or after `start`."""
    num = len(ids) - len(wanted) + 1
    if num <= start:
        return None
    hits = np.all([ids[start + i : num + i] == one for i, one in enumerate(wanted)], axis=0)
    found = np.flatnonzero(hits)
    return start + int(found[0]) if len(found) else None


def num_turns_in_epoch(epoch: int, num_epochs: int, max_turns: int) -> int:
    """Number of last turns kept by a progressive mask: 1 in the first epoch (0), `max_turns` in the last."""
    progress = epoch / max(num_epochs - 1, 1)
    return min(max_turns, 1 + int(progress * (max_turns - 1) + 1e-9))


def last_turns(trace: Trace, num_turns: int) -> Weights:
    """Only the last `num_turns` turns; progressive with `num_turns_in_epoch`."""
    return _turns_from(trace, max(len(trace.spans) - num_turns, 0))


def _turns_from(trace: Trace, first: int) -> Weights:
    weights = all_sampled(trace)
    for span in trace.spans[:first]:
        weights[span.start : span.end] = 0.0
    return weights


def selected_turns(trace: Trace, scores: Mapping[str, float], *, threshold: float) -> Weights:
    """Only turns that score at least `threshold`. scores: completion id -> score, from a process evaluator.

    Raises: ValueError if a turn has no score.
    """
    missing = [span.completion_id for span in trace.spans if span.completion_id not in scores]
    if missing:
        raise ValueError(f"{trace.trace_id}: turns {missing} have no score.")
    weights = all_sampled(trace)
    for span in trace.spans:
        if scores[span.completion_id] < threshold:
            weights[span.start : span.end] = 0.0
    return weights


def outcome_weighted(trace: Trace, reward: float, *, low: float = 0.1, high: float = 2.0) -> Weights:
    """All sampled tokens, weighted from `low` at reward 0 to `high` at reward 1."""
    return all_sampled(trace) * np.float32(low + (high - low) * min(max(reward, 0.0), 1.0))
