"""Routed experts: the experts that a mixture-of-experts model chose for each token of a context.

Each position of a conversation is stored once, with the first call whose reply reports its experts. For a sampled token
this is the call that sampled it, whose log-prob belongs to these experts. So the experts of a context are collected on
the way from a record up to its ancestors.

vLLM sends a NumPy file, which states its type and shape. SGLang sends only the numbers, row after row: int32, unless
the reply says otherwise; the shape is the model's.

Source: vLLM 0.32.0 `entrypoints/openai/chat_completion/protocol.py` and `utils/serial_utils.py`; SGLang 0.5.23
`srt/managers/{detokenizer,tokenizer}_manager.py`, and main at a6463a1, `srt/state_capturer/routed_experts_wire.py` (the
type of experts).
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gangline.domain.completion import Certificate, Completion, CompletionTree, Held
from gangline.domain.evidence.contract import EvidenceKind, EvidenceWire, Reported, Tokens
from gangline.domain.experts import ExpertArray, ExpertEvidence, ExpertNumber, ExpertsMissing, RowExperts
from gangline.domain.task import CaptureSpec
from gangline.domain.trajectory import Trace

_HEAD_BYTES = 4 << 10
"""The header of a file with three dimensions has 128."""
_READ_HEAD = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_NUMBERS = ("int32", "uint16", "uint8")


class RoutedExperts(EvidenceKind):
    name = "routed_experts"
    title = "routed experts"
    what = "the experts of each token"
    how_to_report = (
        "Serve a mixture-of-experts model with `--enable-return-routed-experts` (vLLM and SGLang have it; of SGLang, "
        "give the engine's option experts_per_token too), reach it on its chat route, or leave the setting out."
    )
    record = ExpertEvidence
    of_context = True
    rule = "experts"
    setting = "capture.routed_experts"

    def asked_by(self, capture: CaptureSpec) -> bool:
        return capture.routed_experts

    def wire(self, engine: str, options: Mapping[str, Any]) -> EvidenceWire | None:
        num_chosen = options.get("experts_per_token")
        match engine:
            case "vllm":
                return _VllmExperts()
            case "generate_vllm":
                return _VllmIdsExperts()
            case "sglang" if num_chosen is not None:
                return _SglangExperts(num_chosen)
            case _:
                return None

    def num_known(self, before: Certificate | None) -> int:
        return 0 if before is None or before.routed_experts is None else before.routed_experts.num_known

    def without_last(self, value: ExpertArray, num_cut: int) -> ExpertArray:
        return value[: len(value) - num_cut]

    def keep(self, value: ExpertArray | None, tokens: Tokens) -> Held:
        """value: from position 0, or from the first that the parent's record lacks, up to the last id but one."""
        if value is None or len(tokens.sampled_ids) == 0:
            return self.refused("the engine reported none")
        before = None if tokens.before is None else tokens.before.routed_experts
        known, end = self.num_known(tokens.before), tokens.num_prompt + len(tokens.sampled_ids) - 1
        start, usable = end - len(value), min(known, tokens.num_shared)
        if start not in (0, known):
            return self.refused(
                f"the engine reported experts of {len(value)} tokens, and not of {end - known} or {end}"
            )
        if start > usable:
            return self.refused(f"the experts of positions {usable} to {start} are those of another prompt")
        if usable and before is not None and value.shape[1:] != (before.num_layers, before.num_chosen):
            return self.refused(f"the engine reported {value.shape[1:]} layers and experts, and another number before")
        return _kept(value[usable - start :], usable)

    def alone(self, tree: CompletionTree, completion: Completion) -> Held | None:
        """Returns the experts of its whole context."""
        if completion.certificate.routed_experts is None:
            return None
        try:
            return _kept(context_experts(tree, completion), 0)
        except ExpertsMissing as why:
            return self.refused(str(why))

    def column(self, tree: CompletionTree, trace: Trace) -> RowExperts:
        """Returns the experts of a trace's whole prompt and its response, or why they are unknown."""
        last = trace.spans[-1].completion_id
        if trace.splices:
            return RowExperts(missing="the row is spliced: its ids are not those that the engine had")
        if last not in tree:
            return RowExperts(missing=f"the record of {last} is not among the session's completions")
        try:
            return RowExperts.of(context_experts(tree, tree[last]))
        except ExpertsMissing as why:
            return RowExperts(missing=str(why))

    def problem(self, tree: CompletionTree, trace: Trace) -> str | None:
        evidence, last = trace.certificates[-1].routed_experts, trace.spans[-1].completion_id
        if evidence is None or evidence.refused is not None or trace.splices or last not in tree:
            return None
        return self.column(tree, trace).missing


# -- from engines ------------------------------------------------------------------------------------------------------


class _VllmExperts(EvidenceWire):
    fields = (("routed_experts", bytes | None, None),)

    def ask(self, start: int) -> dict[str, Any]:
        return {"routed_experts_prompt_start": start}

    def read(self, found: Any) -> Reported | None:
        return None if found.routed_experts is None else Reported(experts_of_file(found.routed_experts))


class _VllmIdsExperts(_VllmExperts):
    def ask(self, start: int) -> dict[str, Any]:
        return {"routed_experts_prompt_start": start} if start else {}


class _SglangExperts(EvidenceWire):
    fields = (("routed_experts", bytes | None, None), ("routed_experts_dtype", str, "int32"))
    probe = "asked"

    def __init__(self, num_chosen: int) -> None:
        self._num_chosen = num_chosen
        self._num_layers: int | None = None
        """None before the probe, and if none are reported."""

    def ask(self, start: int) -> dict[str, Any]:
        return {"return_routed_experts": True, "routed_experts_start_len": start}

    def learn(self, found: Any, num_tokens: int) -> None:
        """Learn the number of layers from a reply that reports the experts of all its tokens but the last."""
        self._num_layers = None
        if found.routed_experts is None:
            return
        try:
            num_numbers = len(found.routed_experts) // np.dtype(found.routed_experts_dtype).itemsize
        except TypeError as error:
            raise ValueError(f"experts_per_token cannot be {self._num_chosen}: {error}") from error
        num_rows = num_tokens - 1
        if num_rows < 1 or num_numbers == 0 or num_numbers % (num_rows * self._num_chosen):
            raise ValueError(
                f"experts_per_token cannot be {self._num_chosen}: {num_numbers} numbers of experts for {num_rows} "
                f"tokens of {self._num_chosen} a layer"
            )
        self._num_layers = num_numbers // (num_rows * self._num_chosen)

    def read(self, found: Any) -> Reported | None:
        if self._num_layers is None or found.routed_experts is None:
            return None
        shape = self._num_layers, self._num_chosen
        return Reported(experts_of_numbers(found.routed_experts, found.routed_experts_dtype, *shape))


def experts_of_file(data: bytes) -> ExpertArray:
    """Returns the content of an `.npy` file. Raises: ValueError when it contains no experts of tokens."""
    head = io.BytesIO(data[:_HEAD_BYTES])
    try:
        read = _READ_HEAD[np.lib.format.read_magic(head)]
        shape, is_fortran, dtype = read(head)
    except (ValueError, EOFError, OSError, KeyError) as error:
        raise ValueError(f"it is not a NumPy file: {error}") from error
    if len(shape) != 3 or is_fortran or dtype.kind not in "iu":
        raise ValueError(f"its shape is {shape} of {dtype}, and not (tokens, layers, experts) of integers")
    size, num_bytes = math.prod(shape), len(data) - head.tell()
    if num_bytes != size * dtype.itemsize:
        raise ValueError(f"it is not a NumPy file: it has {num_bytes} bytes for {size} numbers of {dtype}")
    return _narrowed(np.frombuffer(data, dtype, size, head.tell()).reshape(shape))  # not copied


def experts_of_numbers(data: bytes, number: str, num_layers: int, num_chosen: int) -> ExpertArray:
    """Raises: ValueError when the size is not a whole number of tokens."""
    if number not in _NUMBERS:
        raise ValueError(f"its type is {number}, and not one of {', '.join(_NUMBERS)}")
    dtype = np.dtype(number).newbyteorder("<")
    token_bytes = dtype.itemsize * num_layers * num_chosen
    if token_bytes == 0 or len(data) % token_bytes:
        raise ValueError(f"its {len(data)} bytes are not a whole number of tokens of {token_bytes} bytes")
    return _narrowed(np.frombuffer(data, dtype=dtype).reshape(-1, num_layers, num_chosen))


def _narrowed(array: NDArray[Any]) -> ExpertArray:
    """Returns the numbers as uint8, or uint16 if any is larger. Raises: ValueError for other numbers."""
    if array.dtype.kind not in "iu":
        raise ValueError(f"its type is {array.dtype}, and not an integer")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if least < 0 or most > np.iinfo(np.uint16).max:
        raise ValueError(f"it has expert {least if least < 0 else most}, which no model has")
    return np.ascontiguousarray(array, dtype=np.uint8 if most <= np.iinfo(np.uint8).max else np.uint16)


# -- to records --------------------------------------------------------------------------------------------------------


def _kept(own: ExpertArray, start: int) -> Held:
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
    return Held(evidence, data)


# -- to rows -----------------------------------------------------------------------------------------------------------


def context_experts(tree: CompletionTree, completion: Completion) -> ExpertArray:
    """Returns [T - 1, layers, chosen] for prompt and sampled ids, T in all: no layer has seen the last one.

    Raises: ExpertsMissing when a record lacks them, or its bytes do not match its certificate.
    """
    pieces: list[ExpertArray] = []
    at, want = completion, tree.num_context_ids(completion.completion_id) - 1
    while True:
        own = _own(at)
        start = at.certificate.routed_experts.start if at.certificate.routed_experts is not None else 0
        if start + len(own) < want:
            raise ExpertsMissing(f"{at.completion_id} holds experts to position {start + len(own)}, and not to {want}")
        if want > start:
            pieces.append(own[: want - start])
            want = start
        if want == 0:
            return np.concatenate(pieces[::-1]) if len(pieces) != 1 else pieces[0]
        if at.parent_id is None or want > at.prompt_shared:
            raise ExpertsMissing(f"{at.completion_id} holds experts from position {start} on only")
        at = tree[at.parent_id]


def _own(completion: Completion) -> ExpertArray:
    evidence = completion.certificate.routed_experts
    if evidence is None:
        raise ExpertsMissing(f"{completion.completion_id} was sampled without capture.routed_experts")
    if evidence.refused is not None:
        raise ExpertsMissing(f"{completion.completion_id}: {evidence.refused}")
    if hashlib.sha256(completion.routed_experts).hexdigest() != evidence.digest:
        raise ExpertsMissing(f"{completion.completion_id} holds other experts than its certificate says")
    return evidence.array(completion.routed_experts)


EXPERTS = RoutedExperts()
