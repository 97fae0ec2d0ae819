"""Evidence alongside sampled tokens: what a kind of it must say, from an engine's reply to a row's column.

A kind, such as routed experts, is one object, and nothing on the way names it:

    need        does a task ask for it (`asked_by`), and does a call have any (`applies`)
    capability  does the engine report it (`EvidenceWire.probe`)
    ask, read   fields of the engine's request, and of its reply (`EvidenceWire`)
    keep        what a call's record holds, certified by a digest (`keep`)
    column      what a row has (`columns`), and whether it is what the certificates say (`problem`)

Evidence never changes tokens. Where it is not known, the record says why (`refused`), and so does the row (`missing`).
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
    """[T]: take these in the place of the reply's own; None: keep those."""


class EvidenceWire:
    """How one engine's messages carry a kind. An engine has its own object, which may learn from the probe."""

    fields: ClassVar[Sequence[tuple[str, Any, Any]]] = ()
    """Fields of a reply's choice (SGLang: of its `meta_info`) that the client does not read anyway: name, type, value
    where there is none."""
    probe: ClassVar[Literal["unasked", "asked", "apart"]] = "unasked"
    """How a probe finds out whether the engine reports it: `unasked`, every reply has it; `asked`, it may be asked for
    in any call; `apart`, in its own call, as an engine that has none may refuse that."""

    def ask(self, start: int) -> dict[str, Any]:
        """Fields of a request (vLLM's route of ids: of its `sampling_params`). start: see `AskedEvidence`."""
        return {}

    def learn(self, found: Any, num_tokens: int) -> None:
        """A probe's reply. found: an object with `fields`. num_tokens: of prompt and reply. Raises: ValueError."""

    def read(self, found: Any) -> Reported | None:
        """None: not reported. found: an object with `fields`. Raises: ValueError for anything that it cannot be."""
        raise NotImplementedError


class Tokens(NamedTuple):
    """The tokens of a call whose evidence is kept."""

    sampled_ids: TokenIds
    num_shared: int
    """Leading ids that its prompt and the parent's context have in common."""
    num_prompt: int
    num_ids: int | None
    """Size of the vocabulary; None where it is not known."""
    before: Certificate | None
    """The parent's."""


class EvidenceKind(ABC):
    name: ClassVar[str]
    """The name of its column in rows, and in records."""
    title: ClassVar[str]
    """In messages: the engine returned no TITLE."""
    what: ClassVar[str]
    """Likewise: SETTING asks for WHAT."""
    setting: ClassVar[str] = "capture.evidence"
    """The task's, in messages."""
    rule: ClassVar[str] = ""
    """The audit's, for a row that lacks what its certificates say; empty: the name."""
    how_to_report: ClassVar[str] = "Take another engine, or leave the setting out."
    record: ClassVar[type[Any]]
    """In certificates; with `refused`, why there is none."""
    of_context: ClassVar[bool] = False
    """Whether records hold it for the prompt too, each position once in a conversation."""

    # -- need ----------------------------------------------------------------------------------------------------

    def asked_by(self, capture: CaptureSpec) -> bool:
        return self.name in capture.evidence

    def applies(self, sampling: SamplingParams) -> bool:
        """Whether a call with these parameters has any."""
        return True

    # -- capability, ask, read -----------------------------------------------------------------------------------

    @abstractmethod
    def wire(self, engine: str, options: Mapping[str, Any]) -> EvidenceWire | None:
        """None: the engine cannot report it. engine: see `EngineCapabilities`. options: the engine's own."""

    def logprob_kind(self, kind: LogprobKind) -> LogprobKind:
        """The kind of a reply's log-probs that come with it. kind: of those that come without."""
        return kind

    # -- keep ----------------------------------------------------------------------------------------------------

    def num_known(self, before: Certificate | None) -> int:
        """Leading positions of a context that a record and its ancestors hold. before: the record's certificate."""
        return 0

    @abstractmethod
    def without_last(self, value: Any, num_cut: int) -> Any:
        """A reported value without the last sampled tokens, which stand behind a stop string."""

    @abstractmethod
    def keep(self, value: Any, tokens: Tokens) -> Held:
        """value: as `EvidenceWire.read` gave it; None where nothing was reported."""

    def refused(self, reason: str) -> Held:
        return Held(self.record(refused=reason), b"")

    def alone(self, tree: CompletionTree, completion: Completion) -> Held | None:
        """The evidence of a record that loses its parent; None where nothing changes."""
        return None

    # -- column --------------------------------------------------------------------------------------------------

    def columns(self, result: SessionResult) -> Mapping[str, Any]:
        """trace id -> a row's column; empty where the session was sampled without."""
        traces = () if result.trajectory is None else result.trajectory.traces
        if all(certificate.evidence_of(self.name) is None for trace in traces for certificate in trace.certificates):
            return {}
        tree = CompletionTree(result.completions)
        return {trace.trace_id: self.column(tree, trace) for trace in traces}

    @abstractmethod
    def column(self, tree: CompletionTree, trace: Trace) -> Any: ...

    def problem(self, tree: CompletionTree, trace: Trace) -> str | None:
        """What a trace is certified to have, and has not; None where nothing is wrong."""
        return None


class AskedEvidence(NamedTuple):
    """A kind that a call asks the engine for."""

    kind: EvidenceKind
    start: int
    """First position of the context that it is asked for; 0 but for evidence `of_context`."""


class RowNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a row's response tokens."""

    values: list[Any] = []
    """[T]: a number, or a list of k of them; None for a token that was not sampled, or not with this evidence."""
    missing: str | None = None
    """Why they are not known; there are no values then."""


class NumbersOfTokens(EvidenceKind):
    """A kind with a number, or k > 1 numbers, for each sampled token. It only says how engines carry them (`wire`)."""

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
        """A turn that is not trained on may lack them, such as one of a role's engine."""
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
        """[T] or [T, k]. Raises: ValueError where the record lacks what its certificate says."""
        if completion_id not in tree:
            raise ValueError(f"the record of {completion_id} is not among the session's completions")
        evidence, data = tree[completion_id].certificate.evidence_of(self.name), tree[completion_id].data_of(self.name)
        if evidence.refused is not None:
            raise ValueError(f"{completion_id}: {evidence.refused}")
        if hashlib.sha256(data).hexdigest() != evidence.digest:
            raise ValueError(f"{completion_id} holds other {self.title} than its certificate says")
        array = np.frombuffer(data, np.dtype(self.dtype))
        return array if len(array) == evidence.num_tokens else array.reshape(evidence.num_tokens, -1)
