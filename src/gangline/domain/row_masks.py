"""Sampling masks of a row, put together from the records of its calls."""

from __future__ import annotations

import numpy as np

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.sampling_masks import RowMask, SamplingMask
from gangline.domain.session import SessionResult
from gangline.domain.tokens import TokenIds
from gangline.domain.trajectory import Trace

__all__ = ["is_masked", "mask_of_trace", "mask_problem", "masks_of_traces", "outside_of_mask"]


def is_masked(certificate: Certificate) -> bool:
    """Whether a call's record holds the ids that its tokens were drawn among."""
    evidence = certificate.sampling_mask
    return evidence is not None and evidence.refused is None


def mask_of_trace(tree: CompletionTree, trace: Trace) -> SamplingMask:
    """The mask of the response's tokens; 0 ids where nothing was cut away, nothing was sampled, or nothing is trained.

    Raises: ValueError where the record of a trained turn lacks what its certificate says.
    """
    counts = np.zeros(len(trace.response_ids), np.int32)
    pieces: list[SamplingMask] = []
    for span, certificate in zip(trace.spans, trace.certificates, strict=True):
        if certificate.sampling_mask is None or not trace.loss_mask[span.start : span.end].any():
            continue
        if span.completion_id not in tree:
            raise ValueError(f"the record of {span.completion_id} is not among the session's completions")
        found = _own(tree[span.completion_id]).first(span.end - span.start)
        counts[span.start : span.start + len(found.counts)] = found.counts
        pieces.append(found)
    ids = [piece.ids for piece in pieces]
    return SamplingMask(counts, np.concatenate(ids) if ids else np.empty(0, np.int32))


def _own(completion: Completion) -> SamplingMask:
    evidence = completion.certificate.sampling_mask
    assert evidence is not None
    try:
        return evidence.mask(completion.sampling_mask)
    except ValueError as why:
        raise ValueError(f"{completion.completion_id}: {why}") from why


def mask_problem(tree: CompletionTree, trace: Trace) -> str | None:
    """The mask that a trace is certified to have and has not; None where nothing is wrong."""
    for span, certificate in zip(trace.spans, trace.certificates, strict=True):
        if is_masked(certificate) and span.completion_id in tree:
            completion = tree[span.completion_id]
            try:
                found = _own(completion)
            except ValueError as why:
                return str(why)
            if (problem := outside_of_mask(found, completion.sampled_ids)) is not None:
                return f"{completion.completion_id}: {problem}"
    return None


def outside_of_mask(mask: SamplingMask, sampled_ids: TokenIds) -> str | None:
    """Why a mask is not of these tokens; None where each was drawn among the ids that it keeps."""
    num = len(sampled_ids)
    if len(mask.counts) != num:
        return f"the mask is of {len(mask.counts)} tokens, and {num} were sampled"
    token = np.repeat(np.arange(num), mask.counts)
    lacking = np.bincount(token[mask.ids == sampled_ids[token]], minlength=num) == 0
    if lacking.any():
        wrong = int(lacking.argmax())
        return f"sampled token {wrong} is {int(sampled_ids[wrong])}, which its mask does not keep"
    return None


def masks_of_traces(result: SessionResult) -> dict[str, RowMask]:
    """trace id -> its mask; none where no turn of the session has one."""
    traces = () if result.trajectory is None else result.trajectory.traces
    if all(one.sampling_mask is None for trace in traces for one in trace.certificates):
        return {}
    tree = CompletionTree(result.completions)
    return {trace.trace_id: _row_mask(tree, trace) for trace in traces}


def _row_mask(tree: CompletionTree, trace: Trace) -> RowMask:
    try:
        mask = mask_of_trace(tree, trace)
    except ValueError as why:
        return RowMask(missing=str(why))
    return RowMask(num_tokens=len(mask.counts), data=mask.data())
