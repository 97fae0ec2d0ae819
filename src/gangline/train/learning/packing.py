"""Packing: arranges samples in batches for one forward pass, as padded rows, packed rows, or a prefix tree.

    padded   one row per sample, padded to the longest          [B, L]
    packed   samples in sequence, not attending to each other    [1, N]
    tree     as packed, but a prefix shared by several samples is stored and computed once

In every layout a token keeps the position of its own sample and attends only to earlier tokens of that sample, so
log-probs and gradients are the same; only the amount of work differs. `paths` contains the places of each sample's ids,
`segments` the places that attend to each other. No layout needs a mask over all pairs of places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gangline.domain.tokens import TokenIds, common_prefix_len
from gangline.train.learning.samples import Sample

LayoutKind = Literal["padded", "packed", "tree"]


class Segment(NamedTuple):
    """Places `start` to `end` of a sequence."""

    start: int
    end: int
    prefix: NDArray[np.int64]
    """[P] earlier places that every place of the segment attends to as well, in order; [0] if there are none."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Arrays over places are [R, L]; arrays over trained tokens are [N], sample by sample."""

    samples: tuple[Sample, ...]
    ids: NDArray[np.int64]
    """[R, L] 0 where padded."""
    positions: NDArray[np.int64]
    """[R, L] in the token's own sample."""
    segments: tuple[Segment, ...]
    """padded: empty, each row is causal by itself. Otherwise consecutive parts that cover the single row, each causal
    and preceded by its prefix.
    """
    paths: tuple[NDArray[np.int64], ...]
    """Positions of each sample's ids in `ids.reshape(-1)`."""
    sources: NDArray[np.int64]
    """[N] the place in `ids.reshape(-1)` whose output predicts the token."""
    targets: NDArray[np.int64]
    """[N] the token's id."""
    traces: NDArray[np.int64]
    """[N] index of the token's sample in `samples`."""
    sessions: NDArray[np.int64]
    """[len(samples)] each sample's session, 0 to S - 1."""
    advantages: NDArray[np.float64]
    rewards: NDArray[np.float64]
    """[N] after each token, for a critic; 0 without a critic."""
    weights: NDArray[np.float64]
    behaviour_logprobs: NDArray[np.float64]
    teacher_logprobs: NDArray[np.float64] | None
    """[N], None without a teacher."""
    temperatures: NDArray[np.float32]

    @property
    def num_places(self) -> int:
        """Tokens that the model computes, including padding."""
        return self.ids.size


def pack(samples: Sequence[Sample], kind: LayoutKind = "packed") -> Batch:
    """One batch. Raises: ValueError if there are no samples."""
    if not samples:
        raise ValueError("a batch needs at least one sample.")
    streams = [np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64) for sample in samples]
    match kind:
        case "padded":
            ids, positions, segments, paths = _padded(streams)
        case "packed":
            ids, positions, segments, paths = _laid_out([(index, 0) for index in range(len(streams))], streams)
        case "tree":
            ids, positions, segments, paths = _laid_out(_tree_order(streams), streams)
    trained = [np.flatnonzero(sample.weights) for sample in samples]
    return Batch(
        samples=tuple(samples),
        ids=ids,
        positions=positions,
        segments=tuple(segments),
        paths=tuple(paths),
        sources=_joined(path[len(s.prompt_ids) - 1 + at] for s, path, at in zip(samples, paths, trained, strict=True)),
        targets=_joined(s.response_ids[at].astype(np.int64) for s, at in zip(samples, trained, strict=True)),
        traces=np.repeat(np.arange(len(samples)), [len(at) for at in trained]),
        sessions=np.unique([sample.session_id for sample in samples], return_inverse=True)[1].astype(np.int64),
        advantages=np.concatenate([s.advantages[at] for s, at in zip(samples, trained, strict=True)]),
        rewards=np.concatenate(
            [np.zeros(len(at)) if s.rewards is None else s.rewards[at] for s, at in zip(samples, trained, strict=True)]
        ),
        weights=np.concatenate([s.weights[at].astype(np.float64) for s, at in zip(samples, trained, strict=True)]),
        behaviour_logprobs=np.concatenate(
            [s.behaviour_logprobs[at].astype(np.float64) for s, at in zip(samples, trained, strict=True)]
        ),
        teacher_logprobs=_of_teacher(samples, trained),
        temperatures=np.concatenate([s.temperatures[at] for s, at in zip(samples, trained, strict=True)]),
    )


def _of_teacher(samples: Sequence[Sample], trained: Sequence[NDArray[np.int64]]) -> NDArray[np.float64] | None:
    found = [
        sample.teacher_logprobs[at].astype(np.float64)
        for sample, at in zip(samples, trained, strict=True)
        if sample.teacher_logprobs is not None
    ]
    return np.concatenate(found) if len(found) == len(samples) else None


def pack_all(samples: Iterable[Sample], kind: LayoutKind = "packed", *, max_places: int) -> Iterator[Batch]:
    """Batches of at most `max_places` computed tokens each, in which samples of one session stay together.

    A larger session forms its own batch: splitting it would lose its traces' shared prefixes and its mean.
    """
    chosen: list[Sample] = []
    for session in _by_session(samples):
        if chosen and _num_places([*chosen, *session], kind) > max_places:
            yield pack(chosen, kind)
            chosen = []
        chosen += session
    if chosen:
        yield pack(chosen, kind)


def _by_session(samples: Iterable[Sample]) -> list[list[Sample]]:
    sessions: dict[str, list[Sample]] = {}
    for sample in samples:
        sessions.setdefault(sample.session_id, []).append(sample)
    return list(sessions.values())


def _num_places(samples: Sequence[Sample], kind: LayoutKind) -> int:
    streams = [np.concatenate([sample.prompt_ids, sample.response_ids]) for sample in samples]
    lengths = [len(stream) for stream in streams]
    if kind == "padded":
        return len(lengths) * max(lengths)
    return sum(lengths) - (sum(shared for _, shared in _tree_order(streams)) if kind == "tree" else 0)


_Layout = tuple[NDArray[np.int64], NDArray[np.int64], list[Segment], list[NDArray[np.int64]]]


def _padded(streams: Sequence[NDArray[np.int64]]) -> _Layout:
    width = max(map(len, streams))
    ids = np.zeros((len(streams), width), dtype=np.int64)
    for row, stream in enumerate(streams):
        ids[row, : len(stream)] = stream
    positions = np.broadcast_to(np.arange(width), ids.shape).copy()
    return ids, positions, [], [row * width + np.arange(len(stream)) for row, stream in enumerate(streams)]


def _tree_order(streams: Sequence[TokenIds | NDArray[np.int64]]) -> list[tuple[int, int]]:
    """Streams sorted by their ids, each with the number of ids shared with its predecessor.

    That is the longest prefix it shares with any earlier stream.
    """
    # Big-endian bytes of ids sort as the ids do.
    order = sorted(range(len(streams)), key=lambda index: streams[index].astype(">i8").tobytes())
    shared = [
        common_prefix_len(streams[before].astype(np.int32), streams[index].astype(np.int32))
        for before, index in itertools.pairwise(order)
    ]
    return list(zip(order, [0, *shared], strict=True))


def _laid_out(order: Sequence[tuple[int, int]], streams: Sequence[NDArray[np.int64]]) -> _Layout:
    """order: index of a stream, and the number of ids it reuses from its predecessor."""
    size = sum(len(streams[index]) - shared for index, shared in order)
    ids, positions = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    segments: list[Segment] = []
    paths: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(streams)
    before, start = np.empty(0, dtype=np.int64), 0
    for index, shared in order:
        end = start + len(streams[index]) - shared
        own = np.arange(start, end)
        path = np.concatenate([before[:shared], own])
        ids[start:end], positions[start:end] = streams[index][shared:], np.arange(shared, len(path))
        if end > start:
            segments.append(Segment(start, end, before[:shared]))
        paths[index], before, start = path, path, end
    return ids[None], positions[None], segments, paths


def _joined(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
