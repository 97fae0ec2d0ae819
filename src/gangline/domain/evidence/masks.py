"""Sampling masks: for each sampled token of a call, the ids that top-k and top-p left to draw it from.

Both engines send a list of ids for each sampled token. SGLang also sends the log-probs among them; vLLM's log-probs are
among them if they are processed.

Source: vLLM 0.32.0 `entrypoints/scale_out/token_in_token_out`; SGLang 0.5.23 `srt/managers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import simdjson

from gangline.domain.completion import Certificate, Completion, CompletionTree, Held, LogprobKind
from gangline.domain.conversation import SamplingParams
from gangline.domain.evidence.contract import EvidenceKind, EvidenceWire, Reported, Tokens
from gangline.domain.masks import MaskEvidence, RowMask, SamplingMask
from gangline.domain.task import CaptureSpec
from gangline.domain.tokens import TokenIds
from gangline.domain.trajectory import Trace

_NULL = msgspec.Raw(b"null")
_LARGEST_ID = np.iinfo(np.int32).max


class SamplingMasks(EvidenceKind):
    name = "sampling_mask"
    title = "sampling mask"
    what = "the ids that each token was drawn among"
    how_to_report = (
        "vLLM reports them on its generate route with `--return-sampling-mask` (reach it as the engine kind generate), "
        "SGLang 0.5.23 on both routes, the embedded engine as vLLM does. Or leave the setting out."
    )

    record = MaskEvidence
    rule = "masks"
    setting = "capture.sampling_masks"

    def asked_by(self, capture: CaptureSpec) -> bool:
        return capture.sampling_masks

    def applies(self, sampling: SamplingParams) -> bool:
        """Whether top-k or top-p removes ids before a token is drawn. Otherwise there is nothing to keep."""
        if sampling.temperature == 0:
            return False  # nothing is drawn
        return sampling.top_p not in (None, 1.0) or sampling.top_k not in (None, 0, -1)

    def wire(self, engine: str, options: Mapping[str, Any]) -> EvidenceWire | None:
        match engine:
            case "generate_vllm":
                return _VllmMasks()
            case "sglang" | "generate_sglang":
                return _SglangMasks()
            case _:
                return None

    def logprob_kind(self, kind: LogprobKind) -> LogprobKind:
        return kind if kind == "raw" else "processed"

    def without_last(self, value: SamplingMask, num_cut: int) -> SamplingMask:
        return value.first(max(0, len(value.counts) - num_cut))

    def keep(self, value: SamplingMask | None, tokens: Tokens) -> Held:
        if value is None:
            return self.refused("the engine reported no sampling mask")
        if (problem := outside_of_mask(value, tokens.sampled_ids)) is not None:
            return self.refused(problem)
        if (value.ids < 0).any() or (tokens.num_ids is not None and (value.ids >= tokens.num_ids).any()):
            return self.refused("the mask keeps an id that is outside of the vocabulary")
        if (wrong := _first_repeating(value)) is not None:
            return self.refused(f"the mask of sampled token {wrong} keeps an id twice")
        data = value.data()
        return Held(MaskEvidence.of(value, data), data)

    def column(self, tree: CompletionTree, trace: Trace) -> RowMask:
        """A token has 0 ids if nothing was cut away, it was not sampled, or it is not trained on."""
        counts = np.zeros(len(trace.response_ids), np.int32)
        ids: list[TokenIds] = []
        for span, certificate in zip(trace.spans, trace.certificates, strict=True):
            if certificate.sampling_mask is None or not trace.loss_mask[span.start : span.end].any():
                continue
            if span.completion_id not in tree:
                return RowMask(missing=f"the record of {span.completion_id} is not among the session's completions")
            try:
                found = _own(tree[span.completion_id]).first(span.end - span.start)
            except ValueError as why:
                return RowMask(missing=str(why))
            counts[span.start : span.start + len(found.counts)] = found.counts
            ids.append(found.ids)
        mask = SamplingMask(counts, np.concatenate(ids) if ids else np.empty(0, np.int32))
        return RowMask(num_tokens=len(counts), data=mask.data())

    def problem(self, tree: CompletionTree, trace: Trace) -> str | None:
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


# -- from engines ------------------------------------------------------------------------------------------------------


class _VllmMasks(EvidenceWire):
    fields = (("sampling_mask", msgspec.Raw, _NULL),)
    probe = "apart"

    def read(self, found: Any) -> Reported | None:
        mask = mask_from_json(found.sampling_mask)
        return None if mask is None else Reported(mask)


class _SglangMasks(EvidenceWire):
    fields = (
        ("output_token_sampling_mask", msgspec.Raw, _NULL),
        ("output_token_sampling_logprobs", list[float | None] | None, None),
    )
    probe = "apart"

    def ask(self, start: int) -> dict[str, Any]:
        return {"return_sampling_mask": True}

    def read(self, found: Any) -> Reported | None:
        """Uses the log-probs among the mask's ids: SGLang's other ones are over the whole vocabulary."""
        mask = mask_from_json(found.output_token_sampling_mask)
        if mask is None:
            return None
        values = found.output_token_sampling_logprobs
        num_values = 0 if values is None else len(values)
        if values is None or num_values != len(mask.counts):
            raise ValueError(f"{len(mask.counts)} sampling masks, and {num_values} log-probs of them")
        return Reported(mask, [np.nan if value is None else value for value in values])


def mask_from_json(raw: msgspec.Raw) -> SamplingMask | None:
    """Parse a list of ids per token without a Python object for each id: a long reply has a million. None for null.

    Raises: ValueError for anything else.
    """
    text = bytes(raw)
    if text == b"null":
        return None
    try:
        sets = simdjson.Parser().parse(text)
        if not isinstance(sets, simdjson.Array):
            raise TypeError("it is not a list")
        lists = [set_ for set_ in sets if isinstance(set_, simdjson.Array)]
        if len(lists) != len(sets) or text.count(b"[") != 1 + len(lists):  # the parser would flatten deeper lists
            raise TypeError("it is not a list of lists of ids")
        counts = np.fromiter(map(len, lists), np.int32, len(lists))
        ids = np.frombuffer(sets.as_buffer(of_type="i"), np.int64) if counts.any() else np.empty(0, np.int64)
    except (TypeError, RuntimeError) as error:  # the last for numbers that are not integers of 64 bits
        raise ValueError(f"no sampling mask: {error}") from error
    if len(ids) != counts.sum() or (ids < 0).any() or (ids > _LARGEST_ID).any():
        raise ValueError("no sampling mask: it holds other values than ids")
    return SamplingMask(counts, ids.astype(np.int32))


# -- to records --------------------------------------------------------------------------------------------------------


def _first_repeating(mask: SamplingMask) -> int | None:
    """Returns the index of the first token that keeps an id twice: a sum over the kept ids would count it twice."""
    token = np.repeat(np.arange(len(mask.counts), dtype=np.int64), mask.counts)
    # Engines mostly write ascending ids, and a stable sort of sorted data is fast.
    pairs = np.sort((token << 32) | mask.ids, kind="stable")
    again = np.flatnonzero(pairs[1:] == pairs[:-1])
    return int(pairs[again[0]] >> 32) if len(again) else None


def outside_of_mask(mask: SamplingMask, sampled_ids: TokenIds) -> str | None:
    """Returns why a mask does not belong to these tokens; None if each token is among the ids kept for it."""
    num = len(sampled_ids)
    if len(mask.counts) != num:
        return f"the mask is of {len(mask.counts)} tokens, and {num} were sampled"
    token = np.repeat(np.arange(num), mask.counts)
    lacking = np.bincount(token[mask.ids == sampled_ids[token]], minlength=num) == 0
    if lacking.any():
        wrong = int(lacking.argmax())
        return f"sampled token {wrong} is {int(sampled_ids[wrong])}, which its mask does not keep"
    return None


def is_masked(certificate: Certificate) -> bool:
    """Whether a call's record contains the ids that its tokens were drawn from."""
    evidence = certificate.sampling_mask
    return evidence is not None and evidence.refused is None


def why_not_replayed(certificate: Certificate) -> str | None:
    """Returns why log-probs among the ids that a turn was drawn from are unavailable; None if its ids were not asked
    for."""
    evidence = certificate.sampling_mask
    if evidence is None:
        return None
    return "its log-probs are raw" if evidence.refused is None else evidence.refused


def _own(completion: Completion) -> SamplingMask:
    evidence = completion.certificate.sampling_mask
    assert evidence is not None
    try:
        return evidence.mask(completion.sampling_mask)
    except ValueError as why:
        raise ValueError(f"{completion.completion_id}: {why}") from why


MASKS = SamplingMasks()
