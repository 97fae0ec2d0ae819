"""Evidence for a row's tokens: the ids that each one was drawn from, and the experts that it was routed to."""

# Records can have any structure.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from gangline.domain.evidence.experts import EXPERTS
from gangline.domain.evidence.masks import MASKS
from gangline.domain.experts import RowExperts
from gangline.domain.masks import SamplingMask
from gangline.tasks.check_rows.samples import Ints, Sample, as_ids, spans_of


def gangline_evidence(sample: Sample, record: Mapping[str, Any]) -> None:
    """record: a row, as exports write it."""
    _gangline_mask(sample, record.get(MASKS.name))
    _gangline_experts(sample, record.get(EXPERTS.name))


def _gangline_mask(sample: Sample, given: Mapping[str, Any] | None) -> None:
    """given: `RowMask`, as written by exports. A turn without kept ids was drawn from the whole vocabulary."""
    if given is None or _is_missing(sample, "sampling mask", given):
        return
    try:
        mask = SamplingMask.of_data(_bytes(given["data"]), given["num_tokens"])
    except ValueError as error:
        sample.add("masks_wrong", None, str(error))
        return
    if _masks(sample, as_ids(mask.counts), as_ids(mask.ids)):
        _lost_sets(sample, as_ids(mask.counts))


def slime_mask(sample: Sample, ids: Any, offsets: Any) -> None:
    """slime treats a token without kept ids as certain, so every trained token must have some."""
    if ids is None and offsets is None:
        return
    counts = np.diff(as_ids(offsets))
    if len(as_ids(offsets)) == 0 or as_ids(offsets)[0] != 0:
        sample.add("masks_wrong", None, "the offsets do not begin with 0")
    elif _masks(sample, counts, as_ids(ids)):
        _add_first(sample, counts == 0, "a trained token without kept ids")


def _masks(sample: Sample, counts: Ints, ids: Ints) -> bool:
    """Whether the kept ids match the shape of the response. counts: [T]; ids: [sum(counts)]."""
    num = len(sample.ids) - sample.num_prompt
    if len(counts) != num or (counts < 0).any() or int(counts.sum()) != len(ids):
        words = f"{len(ids)} kept ids, {int(counts.sum())} counted, of {len(counts)} tokens for a response of {num}"
        sample.add("masks_wrong", None, words)
        return False
    token = np.repeat(np.arange(num), counts)
    has_own = np.zeros(num, np.bool_)
    has_own[token[ids == sample.ids[sample.num_prompt + token]]] = True
    _add_first(sample, (counts > 0) & ~has_own, "a trained token that its kept ids lack")
    sample.among_kept = np.concatenate((np.zeros(sample.num_prompt, np.bool_), counts > 0))
    return True


def _lost_sets(sample: Sample, counts: Ints) -> None:
    """Top-k and top-p apply to a whole turn: either all or no tokens of it have kept ids."""
    for start, end in spans_of(sample.mask):
        empty = counts[start - sample.num_prompt : end - sample.num_prompt] == 0
        if empty.any() and not empty.all():
            sample.add(
                "masks_wrong", start + int(empty.argmax()), "no kept ids, and other tokens of the turn have some"
            )
            return


def _add_first(sample: Sample, wrong: np.ndarray[Any, np.dtype[np.bool_]], words: str) -> None:
    """wrong: [T] of the response."""
    places = np.flatnonzero(wrong & sample.mask[sample.num_prompt :])
    if len(places):
        more = "" if len(places) == 1 else f" ({len(places)} tokens)"
        sample.add("masks_wrong", sample.num_prompt + int(places[0]), words + more)


def _gangline_experts(sample: Sample, given: Mapping[str, Any] | None) -> None:
    """given: `RowExperts`, as written by exports."""
    if given is None or _is_missing(sample, "routed experts", given):
        return
    try:
        fields: dict[str, Any] = {**given, "data": _bytes(given["data"])}
        array = RowExperts(**fields).array()
    except ValueError as error:
        sample.add("experts_wrong", None, str(error))
        return
    _experts(sample, array.shape)


def slime_experts(sample: Sample, given: Any) -> None:
    if given is None:
        return
    try:
        shape = np.asarray(given).shape
    except ValueError:  # NumPy makes no array of lists that differ in length
        sample.add("experts_wrong", None, "the number of layers or of experts changes within the row")
        return
    _experts(sample, shape)


def _experts(sample: Sample, shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or shape[0] != len(sample.ids) - 1 or 0 in shape[1:]:
        words = f"an array of {shape}, not ({len(sample.ids) - 1}, layers, experts)"
        sample.add("experts_wrong", None, words)


def _is_missing(sample: Sample, what: str, given: Mapping[str, Any]) -> bool:
    if (why := given.get("missing")) is None:
        return False
    if sample.mask.any():
        sample.add("evidence_missing", None, f"{what}: {why}")
    return True


def _bytes(data: bytes | str) -> bytes:
    """JSON contains them in base64. Raises: ValueError."""
    return base64.b64decode(data, validate=True) if isinstance(data, str) else data
