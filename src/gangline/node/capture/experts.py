"""Routed experts of a call, beside those that its parent's record holds. Pure.

Each position of a conversation is kept once, with the first call whose reply reports its experts. For a sampled token
this is the call that sampled it, whose log-prob goes with these experts.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.experts import ExpertArray, ExpertEvidence, ExpertNumber, ExpertsMissing
from gangline.domain.row_experts import context_experts

__all__ = ["KeptExperts", "kept_experts", "num_known", "whole_experts"]


class KeptExperts(NamedTuple):
    evidence: ExpertEvidence
    data: bytes
    """[evidence.num_tokens, num_layers, num_chosen], little-endian; empty where the evidence is refused."""


def num_known(before: ExpertEvidence | None) -> int:
    """Leading positions of a call's context whose experts its record and its ancestors' hold."""
    return 0 if before is None or before.refused is not None else before.end


def kept_experts(
    array: ExpertArray | None, before: ExpertEvidence | None, *, num_shared: int, num_prompt: int, num_sampled: int
) -> KeptExperts:
    """The part of a reply's experts that its record keeps.

    array: as reported: from position 0, or from the first that the parent's record lacks, to the last id but one.
    before: evidence of the parent; None where there is none. num_shared: ids that prompt and parent have in common.
    """
    if array is None or num_sampled == 0:
        return _refused("the engine reported none")
    known, end = num_known(before), num_prompt + num_sampled - 1
    start, usable = end - len(array), min(known, num_shared)
    if start not in (0, known):
        return _refused(f"the engine reported experts of {len(array)} tokens, and not of {end - known} or {end}")
    if start > usable:
        return _refused(f"the experts of positions {usable} to {start} are those of another prompt")
    if usable and before is not None and array.shape[1:] != (before.num_layers, before.num_chosen):
        return _refused(f"the engine reported {array.shape[1:]} layers and experts, and another number before")
    return _kept(array[usable - start :], usable)


def whole_experts(tree: CompletionTree, completion: Completion) -> KeptExperts | None:
    """Experts of a record that loses its parent: of its whole context. None where it was recorded without."""
    if completion.certificate.routed_experts is None:
        return None
    try:
        return _kept(context_experts(tree, completion), 0)
    except ExpertsMissing as why:
        return _refused(str(why))


def _kept(own: ExpertArray, start: int) -> KeptExperts:
    number: ExpertNumber = "uint8" if own.dtype.itemsize == 1 else "uint16"
    data = own.astype(f"<u{own.dtype.itemsize}", copy=False).tobytes()
    evidence = ExpertEvidence(
        start=start,
        num_tokens=len(own),
        num_layers=own.shape[1],
        num_chosen=own.shape[2],
        number=number,
        digest=hashlib.sha256(data).hexdigest(),
    )
    return KeptExperts(evidence, data)


def _refused(reason: str) -> KeptExperts:
    return KeptExperts(ExpertEvidence(refused=reason), b"")
