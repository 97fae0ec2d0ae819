"""Rules for a single sample. They operate on whole arrays, with NumPy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gangline.tasks.check_rows.samples import Sample, spans_of

_SENTINEL = -1000.0
_ZERO_SPAN = 8
"""A confident model reports 0.0 occasionally, but rarely for so many tokens."""
_ZERO_TAIL = 16
_CONSTANT = 16
_SHOWN = 3
"""Maximum number of findings of one kind per sample."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Facts about ids, from a tokenizer or the caller."""

    size: int | None = None
    stop_ids: Collection[int] = ()
    pad_id: int | None = None
    special_ids: Collection[int] = ()


def judge(sample: Sample, vocabulary: Vocabulary) -> None:
    """Add findings to the sample."""
    spans = list(spans_of(sample.mask))
    _ids(sample, vocabulary)
    is_padded = _padding(sample, vocabulary, spans)
    _special(sample, vocabulary)
    _cut_turns(sample, vocabulary, spans)
    _versions(sample)
    if sample.logprobs is not None:
        _values(sample, sample.logprobs)
        _alignment(sample, sample.logprobs)
        _constant(sample, sample.logprobs)
        if not is_padded:
            _zeros(sample, sample.logprobs, spans)


def _each(sample: Sample, kind: str, where: NDArray[np.bool_], detail: str) -> bool:
    found = np.flatnonzero(where)
    if len(found):
        sample.add(kind, int(found[0]), detail if len(found) == 1 else f"{detail} ({len(found)} tokens)")
    return len(found) > 0


def _ids(sample: Sample, vocabulary: Vocabulary) -> None:
    if not len(sample.ids):
        return
    low, high = int(sample.ids.min()), int(sample.ids.max())
    too_high = vocabulary.size is not None and high >= vocabulary.size
    if low < 0 or too_high:
        wrong = (sample.ids < 0) | (sample.ids >= (vocabulary.size or high + 1))
        _each(sample, "ids_invalid", wrong, f"id {low if low < 0 else high}")


def _padding(sample: Sample, vocabulary: Vocabulary, spans: list[tuple[int, int]]) -> bool:
    if sample.padding is not None and _each(
        sample, "padding_trained", sample.padding & sample.mask, "trained where the attention mask is 0"
    ):
        return True
    if vocabulary.pad_id is not None:
        padded = (sample.ids == vocabulary.pad_id) & sample.mask
        if padded.any():
            padded[[end - 1 for _, end in spans]] = False  # base models end a text with the padding id
            if _each(sample, "padding_trained", padded, f"pad id {vocabulary.pad_id} is trained"):
                return True
    return _repeated_tail(sample, spans)


def _repeated_tail(sample: Sample, spans: list[tuple[int, int]]) -> bool:
    """Detects padding without a tokenizer: one id repeated at the end, each time with log-prob 0.0."""
    if sample.logprobs is None or not spans or spans[-1][1] != len(sample.ids):
        return False
    start, end = spans[-1]
    ids, logprobs = sample.ids[start:end], sample.logprobs[start:end]
    others = np.flatnonzero((ids != ids[-1]) | (logprobs != 0.0))
    num = len(ids) - (int(others[-1]) + 1 if len(others) else 0)
    if num >= (_ZERO_SPAN * 4 if sample.is_rounded else _ZERO_SPAN):
        sample.add("padding_trained", end - num, f"id {int(ids[-1])} {num} times at the end, with log-prob 0.0")
        return True
    return False


def _special(sample: Sample, vocabulary: Vocabulary) -> None:
    unexpected = set(vocabulary.special_ids) - set(vocabulary.stop_ids) - {vocabulary.pad_id}
    if unexpected:
        found = np.isin(sample.ids, list(unexpected)) & sample.mask
        if found.any():
            _each(sample, "special_trained", found, f"id {int(sample.ids[int(np.argmax(found))])}")


def _cut_turns(sample: Sample, vocabulary: Vocabulary, spans: list[tuple[int, int]]) -> None:
    if not vocabulary.stop_ids:
        return
    goes_on = np.append(sample.mask[1:], False)
    stops = np.isin(sample.ids, list(vocabulary.stop_ids)) & sample.mask & goes_on
    if vocabulary.pad_id not in vocabulary.stop_ids:
        _each(sample, "past_stop", stops, "more of the turn follows")
    num = 0
    for _, end in spans:
        if end < len(sample.ids) and int(sample.ids[end - 1]) not in vocabulary.stop_ids and num < _SHOWN:
            sample.add("cut_turn", end, f"the turn ends with id {int(sample.ids[end - 1])}, and context follows")
            num += 1


def _versions(sample: Sample) -> None:
    if sample.versions is None:
        return
    trained = sample.versions[sample.mask]
    if not len(trained):
        return
    places = np.flatnonzero(sample.mask)
    unknown = trained < 0
    if unknown.any() and not unknown.all():
        sample.add("version_invalid", int(places[int(np.argmax(unknown))]), "a trained token has no version")
    known = trained[~unknown]
    falls = np.flatnonzero(np.diff(known) < 0)
    if len(falls):
        at = int(falls[0])
        place = int(places[~unknown][at + 1])
        sample.add("versions_backwards", place, f"version {int(known[at + 1])} after {int(known[at])}")


def _values(sample: Sample, logprobs: NDArray[np.float64]) -> None:
    trained = logprobs[sample.mask]
    if not len(trained):
        return
    low, high = float(trained.min()), float(trained.max())  # NaN if any value is
    if low > _SENTINEL and high <= 0.0:
        return
    finite = np.isfinite(logprobs)
    _each(sample, "logprob_nan", ~finite & sample.mask, "not a number")
    usable = finite & sample.mask
    _each(sample, "logprob_positive", usable & (logprobs > 0.0), "above 0")
    _each(sample, "logprob_sentinel", usable & (logprobs <= _SENTINEL), "below -1000")


def _constant(sample: Sample, logprobs: NDArray[np.float64]) -> None:
    trained = logprobs[sample.mask]
    if len(trained) >= _CONSTANT and trained[0] != 0.0 and (trained == trained[0]).all():
        sample.add("logprobs_constant", None, f"{len(trained)} trained tokens with log-prob {trained[0]:g}")


def _alignment(sample: Sample, logprobs: NDArray[np.float64]) -> None:
    """Log-probs outside of the mask: shifted by one position, or for whole turns."""
    outside = (logprobs != 0.0) & ~sample.mask
    if not outside.any():
        return
    inside = (logprobs != 0.0) & sample.mask
    at = int(np.argmax(outside))
    for shift, words in ((1, "one position too late"), (-1, "one position too early")):
        moved = np.zeros_like(sample.mask)
        if shift == 1:
            moved[1:] = sample.mask[:-1]
        else:
            moved[:-1] = sample.mask[1:]
        edge = sample.mask & ~moved
        if not (outside & ~moved).any() and edge.any() and not (inside & edge).any():
            sample.add("logprobs_shifted", at, words)
            return
    _each(sample, "sampled_as_context", outside, "masked, with a log-prob")


def _zeros(sample: Sample, logprobs: NDArray[np.float64], spans: list[tuple[int, int]]) -> None:
    if np.count_nonzero(logprobs[sample.mask]) == np.count_nonzero(sample.mask):
        return
    num, least = 0, _ZERO_SPAN * 4 if sample.is_rounded else _ZERO_SPAN
    for start, end in spans:
        part = logprobs[start:end]
        if end - start < least or part[-1] != 0.0 or num == _SHOWN:
            continue
        others = np.flatnonzero(part)
        if not len(others):
            sample.add("logprobs_zero", start, f"{end - start} trained tokens with log-prob 0.0")
            num += 1
            continue
        last = int(others[-1]) + 1
        if len(part) - last >= _ZERO_TAIL and len(others) > 0.95 * last:
            sample.add("logprobs_padded", start + last, f"the last {len(part) - last} log-probs of the turn are 0.0")
            num += 1
