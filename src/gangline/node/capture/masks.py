"""The sampling mask of a call, checked against what it sampled. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gangline.domain.row_masks import outside_of_mask
from gangline.domain.sampling_masks import MaskEvidence, SamplingMask
from gangline.domain.tokens import token_ids
from gangline.models.engines.contract import EngineChoice

__all__ = ["KeptMask", "kept_mask"]


class KeptMask(NamedTuple):
    evidence: MaskEvidence
    data: bytes
    """As `SamplingMask.data`; empty where the evidence is refused."""


def kept_mask(choice: EngineChoice, num_ids: int | None) -> KeptMask:
    """num_ids: size of the vocabulary, where it is known."""
    mask = choice.sampling_mask
    if mask is None:
        return _refused("the engine reported no sampling mask")
    sampled = token_ids() if choice.sampled_ids is None else choice.sampled_ids
    if (problem := outside_of_mask(mask, sampled)) is not None:
        return _refused(problem)
    if (mask.ids < 0).any() or (num_ids is not None and (mask.ids >= num_ids).any()):
        return _refused("the mask keeps an id that is outside of the vocabulary")
    if (wrong := _first_repeating(mask)) is not None:
        return _refused(f"the mask of sampled token {wrong} keeps an id twice")
    data = mask.data()
    return KeptMask(MaskEvidence.of(mask, data), data)


def _first_repeating(mask: SamplingMask) -> int | None:
    """Index of the first token that keeps an id twice: a sum over the kept ids would count it twice."""
    token = np.repeat(np.arange(len(mask.counts), dtype=np.int64), mask.counts)
    # Engines mostly write ascending ids, and a stable sort of what is sorted takes no time.
    pairs = np.sort((token << 32) | mask.ids, kind="stable")
    again = np.flatnonzero(pairs[1:] == pairs[:-1])
    return int(pairs[again[0]] >> 32) if len(again) else None


def _refused(reason: str) -> KeptMask:
    return KeptMask(MaskEvidence(refused=reason), b"")
