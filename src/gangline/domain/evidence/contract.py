"""Evidence about sampled tokens: the contract of a kind, from an engine's reply to a row's column.

A kind, such as routed experts, is one object; no code in between depends on the kind:

    need        whether a task asks for it (`asked_by`), and a call has any (`applies`)
    capability  whether the engine reports it (`EvidenceWire.probe`)
    ask, read   fields of the engine's request and reply (`EvidenceWire`)
    keep        the content of a call's record, certified by a digest (`keep`)
    column      a row's column (`columns`), and whether it matches the certificates (`problem`)

Evidence never changes tokens. If it is unknown, the record has the reason (`refused`), and so does the row (`missing`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from gangline.domain.completion import (
    Certificate,
    Completion,
    CompletionTree,
    Held,
    LogprobKind,
    NumbersEvidence,
)
from gangline.domain.conversation import SamplingParams
from gangline.domain.session import SessionResult
from gangline.domain.task import CaptureSpec
from gangline.domain.tokens import TokenIds
from gangline.domain.trajectory import Trace


class Reported(NamedTuple):
    value: Any
    logprobs: list[float] | None = None
    """[T]: replace the reply's own log-probs; None: keep those."""


class EvidenceWire(ABC):
    """How one engine's messages carry a kind of evidence. Each engine has its own object, which may learn from the
    probe."""

    fields: ClassVar[Sequence[tuple[str, Any, Any]]] = ()
    """Fields of a reply's choice (SGLang: of its `meta_info`) that the client does not read otherwise: name, type,
    default."""
    probe: ClassVar[Literal["unasked", "asked", "apart"]] = "unasked"
    """How a probe finds out whether the engine reports the evidence: `unasked`, every reply has it; `asked`, any call
    may ask for it; `apart`, in a separate call, since an engine without it may refuse that."""

    def ask(self, start: int) -> dict[str, Any]:
        """Returns fields for the request (vLLM's route of ids: for its `sampling_params`). start: see
        `AskedEvidence`."""
        return {}

    def learn(self, found: Any, num_tokens: int) -> None:
        """Learn from a probe's reply. found: an object with `fields`. num_tokens: of prompt and reply. Raises:
        ValueError."""
        return

    @abstractmethod
    def read(self, found: Any) -> Reported | None:
        """Returns None if not reported. found: an object with `fields`. Raises: ValueError for an impossible value."""


class Tokens(NamedTuple):
    """The tokens of a call whose evidence is kept."""

    sampled_ids: TokenIds
    num_shared: int
    """Leading ids that its prompt and the parent's context have in common."""
    num_prompt: int
    num_ids: int | None
    """Size of the vocabulary; None if unknown."""
    before: Certificate | None
    """The parent's."""


class EvidenceKind(ABC):
    name: ClassVar[str]
    """Name of its column in rows, and in records."""
    title: ClassVar[str]
    """For messages: the engine returned no TITLE."""
    what: ClassVar[str]
    """For messages: SETTING asks for WHAT."""
    setting: ClassVar[str] = "capture.evidence"
    """The task's setting, for messages."""
    rule: ClassVar[str] = ""
    """The audit's rule for a row that lacks evidence that its certificates promise; empty: the name."""
    how_to_report: ClassVar[str] = "Take another engine, or leave the setting out."
    record: ClassVar[type[Any]]
    """Its type in certificates; with `refused`, the reason for missing evidence."""
    of_context: ClassVar[bool] = False
    """Whether records also contain it for the prompt, each position once per conversation."""

    # -- need ----------------------------------------------------------------------------------------------------

    def asked_by(self, capture: CaptureSpec) -> bool:
        return self.name in capture.evidence

    def applies(self, sampling: SamplingParams) -> bool:
        """Whether a call with these parameters has such evidence."""
        return True

    # -- capability, ask, read -----------------------------------------------------------------------------------

    @abstractmethod
    def wire(self, engine: str, options: Mapping[str, Any]) -> EvidenceWire | None:
        """Returns None if the engine cannot report it. engine: see `EngineCapabilities`. options: the engine's own."""

    def logprob_kind(self, kind: LogprobKind) -> LogprobKind:
        """Returns the kind of log-probs in a reply with this evidence. kind: without it."""
        return kind

    # -- keep ----------------------------------------------------------------------------------------------------

    def num_known(self, before: Certificate | None) -> int:
        """Returns how many leading positions of a context a record and its ancestors contain. before: the record's
        certificate."""
        return 0

    @abstractmethod
    def without_last(self, value: Any, num_cut: int) -> Any:
        """Returns a reported value without the last sampled tokens, which come after a stop string."""

    @abstractmethod
    def keep(self, value: Any, tokens: Tokens) -> Held:
        """value: as returned by `EvidenceWire.read`; None if nothing was reported."""

    def refused(self, reason: str) -> Held:
        return Held(self.record(refused=reason), b"")

    def alone(self, tree: CompletionTree, completion: Completion) -> Held | None:
        """Returns the evidence for a record that loses its parent; None if nothing changes."""
        return None

    # -- column --------------------------------------------------------------------------------------------------

    def columns(self, result: SessionResult) -> Mapping[str, Any]:
        """Returns trace id -> a row's column; empty if the session was sampled without this evidence."""
        traces = () if result.trajectory is None else result.trajectory.traces
        if all(certificate.evidence_of(self.name) is None for trace in traces for certificate in trace.certificates):
            return {}
        tree = CompletionTree(result.completions)
        return {trace.trace_id: self.column(tree, trace) for trace in traces}

    @abstractmethod
    def column(self, tree: CompletionTree, trace: Trace) -> Any: ...

    def problem(self, tree: CompletionTree, trace: Trace) -> str | None:
        """Returns how a trace differs from its certificates; None if it does not."""
        return None


class AskedEvidence(NamedTuple):
    """A kind of evidence that a call asks the engine for."""

    kind: EvidenceKind
    start: int
    """First position of the context to report; 0 except for evidence `of_context`."""


class RowNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a row's response tokens."""

    values: list[Any] = []
    """[T]: a number, or a list of k numbers; None for a token that was not sampled, or without this evidence."""
    missing: str | None = None
    """Why they are unknown; there are no values then."""


class NumbersOfTokens(EvidenceKind):
    """A kind with one number, or k > 1 numbers, per sampled token. Subclasses only define how engines carry them
    (`wire`)."""

    record = NumbersEvidence
    dtype: ClassVar[str] = "<f4"

    def without_last(self, value: Any, num_cut: int) -> Any:
        return value[: max(0, len(value) - num_cut)]

    def keep(self, value: Any, tokens: Tokens) -> Held:
        if value is None:
            return self.refused(f"the engine reported no {self.title}")
        try:
            array = np.asarray(value, np.dtype(self.dtype))
        except (ValueError, TypeError, OverflowError) as error:
            return self.refused(f"the engine reported odd {self.title}: {error}")
        if array.ndim not in (1, 2) or len(array) != len(tokens.sampled_ids):
            return self.refused(f"{self.title} of shape {array.shape}, and {len(tokens.sampled_ids)} tokens")
        data = array.tobytes()
        return Held(NumbersEvidence(num_tokens=len(array), digest=hashlib.sha256(data).hexdigest()), data)

    def column(self, tree: CompletionTree, trace: Trace) -> RowNumbers:
        """A turn that is not trained on may lack them, such as a turn of a role's engine."""
        values: list[Any] = [None] * len(trace.response_ids)
        for span, certificate in zip(trace.spans, trace.certificates, strict=True):
            evidence = certificate.evidence_of(self.name)
            is_trained = trace.loss_mask[span.start : span.end].any()
            if evidence is None or (evidence.refused is not None and not is_trained):
                continue
            try:
                own = self._array(tree, span.completion_id)[: span.end - span.start]
            except ValueError as why:
                return RowNumbers(missing=str(why))
            values[span.start : span.start + len(own)] = own.tolist()
        return RowNumbers(values=values)

    def problem(self, tree: CompletionTree, trace: Trace) -> str | None:
        for span, certificate in zip(trace.spans, trace.certificates, strict=True):
            evidence = certificate.evidence_of(self.name)
            if evidence is not None and evidence.refused is None and span.completion_id in tree:
                try:
                    self._array(tree, span.completion_id)
                except ValueError as why:
                    return str(why)
        return None

    def _array(self, tree: CompletionTree, completion_id: str) -> np.ndarray[Any, Any]:
        """Returns [T] or [T, k]. Raises: ValueError when the record does not match its certificate."""
        if completion_id not in tree:
            raise ValueError(f"the record of {completion_id} is not among the session's completions")
        evidence, data = tree[completion_id].certificate.evidence_of(self.name), tree[completion_id].data_of(self.name)
        if evidence.refused is not None:
            raise ValueError(f"{completion_id}: {evidence.refused}")
        if hashlib.sha256(data).hexdigest() != evidence.digest:
            raise ValueError(f"{completion_id} holds other {self.title} than its certificate says")
        array = np.frombuffer(data, np.dtype(self.dtype))
        return array if len(array) == evidence.num_tokens else array.reshape(evidence.num_tokens, -1)
