"""A completion is one captured model call; a session's completions form a prefix tree.

A completion stores only the difference from its parent. With P the parent's context (its prompt ids, then its sampled
ids), the full prompt is `P[:prompt_shared] + prompt_suffix_ids`; likewise for messages. So a conversation of T turns
costs O(T), and "the engine saw exactly the sampled ids" is one comparison: `prompt_shared == len(P)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from gangline.domain.conversation import Message, SamplingParams, ToolDefinition
from gangline.domain.decodable import warm_decoder
from gangline.domain.experts import ExpertEvidence
from gangline.domain.images import ImageEvidence
from gangline.domain.masks import MaskEvidence
from gangline.domain.tokens import Logprobs, TokenIds, token_ids

OF_ENVIRONMENT = "of_environment"
"""In `Completion.metadata`: true if an environment made the call."""

OWN_EVIDENCE = ("routed_experts", "sampling_mask")
"""Kinds of evidence with their own fields; all others are in the field `evidence`."""

PromptSource = Literal["engine", "stitched", "rendered"]
"""Who made the prompt ids: the engine's rendering (T0), our stitching (T1), our rendering (T2)."""

Context = Literal["first", "exact", "diverged"]
"""`exact`: the prompt begins with every id of the parent's context. `first`: no parent."""

LogprobKind = Literal["raw", "processed", "temperature_scaled", "missing"]

ParseStatus = Literal["ok", "partial", "failed"]
"""Whether all, some or none of a reply's tool calls could be parsed."""

Constraint = Literal["tool_choice", "response_format"]
"""A request's constraint on its reply that engines enforce with a grammar."""

DivergenceCause = Literal[
    "bpe_merge",
    "thinking_dropped",
    "tool_call_reserialised",
    "whitespace",
    "system_changed",
    "tools_changed",
    "model_changed",
    "template_changed",
    "history_edited",
    "special_token_in_text",
    "truncated_turn",
    "end_of_turn",
    "template_rewrites",
    "unknown",
]


SPAN = "span"
"""Name in a record's metadata: the id of the call's span in traces, in hexadecimal, as its engine got it."""

EMPTY_GENERATION = "empty_generation"
"""Name in a record's metadata if the whole reply ended by itself without content: `delivered`, or `retried` if it was
sampled again."""

MEDIA = ("images", "documents")
"""Why a call is untrainable whose prompt contains more than token ids, which do not represent pixels. Calls with
certified images (`Certificate.images`) are trainable. Documents are only those other than text."""

Relation = Literal["root", "continuation", "branch", "sibling", "retry", "changed", "spawned", "compacted"]
"""The relation of a call to an earlier call of its session, the origin.

root: no origin. continuation: the first call that continues the origin. branch: another continuation of the same
origin. sibling: the same prompt. retry: the same prompt, and the origin was aborted. changed: would continue the
origin, had the client not changed earlier content. Known only when the session is over (see `trajectories.lineage`):
spawned, started by a tool call of the origin; compacted, continues from the origin's summary.
"""


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens `[start, end)` were drawn by policy version `version`."""

    version: int
    start: int
    end: int


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """How a call follows from an earlier one, by its messages. For the ids see the certificate."""

    relation: Relation = "root"
    origin_id: str | None = None
    """The parent, for continuation and branch; otherwise possibly a call of another conversation."""
    cause: DivergenceCause | None = None
    """The client's change, for the relation `changed`."""
    first_change: int | None = None
    """Index of the first request message that differs from the origin's, for the relation `changed`; None if the
    difference precedes all messages."""
    reason: str = ""
    """The evidence for the relation, as text; empty if it is obvious."""


class NumbersEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of sampled tokens in a call's record, for a kind of evidence from a plug-in."""

    num_tokens: int = 0
    digest: str = ""
    """SHA-256 of the bytes, in hexadecimal."""
    refused: str | None = None
    """Why the numbers are unknown; no bytes are stored then."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of a completion are exact."""

    prompt_source: PromptSource
    context: Context
    logprobs: LogprobKind
    finish_reason: str
    """stop, length, tool_calls, abort, ..., as the engine reported."""
    parse: ParseStatus = "ok"
    first_divergence: int | None = None
    """Index into the parent's context of the first id that differs; None unless diverged."""
    cause: DivergenceCause | None = None
    fallback: str | None = None
    """Why the engine rendered the prompt although it takes ids; None when it was stitched, or never could be."""
    as_rendered: bool | None = None
    """Whether a stitched prompt equals the template's rendering of the whole conversation, except for the model's own
    turns, which stay as they were prompted and sampled. None: not compared, or not stitched."""
    unlike_rendering: str | None = None
    """The difference, if `as_rendered` is false."""
    untrainable: str | None = None
    """Why no token of this call may be trained on (NaN log-probs, missing ids ...); None when they may."""
    stop_reason: str | None = None
    """Stop string or stop id that ended the reply, if the engine reports one."""
    sampling: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    """An engine that enforces the constraint reports log-probs over the tokens its grammar allowed, not over the
    model's own distribution, so no trainer can recompute them."""
    version_spans: tuple[VersionSpan, ...] = ()
    engine: str = ""
    engine_version: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""
    engine_role: str | None = None
    """The role whose own engines answered, with a model other than the policy's; None: the policy's engines did."""
    images: ImageEvidence | None = None
    """The pixels for the prompt's placeholder ids; None if the prompt contains no image."""
    routed_experts: ExpertEvidence | None = None
    """The experts that the model chose for the context; None unless `capture.routed_experts` asks for them."""
    sampling_mask: MaskEvidence | None = None
    """The ids that each sampled token was drawn from; None if `capture.sampling_masks` is off or no id was cut away."""
    evidence: dict[str, NumbersEvidence] | msgspec.UnsetType = msgspec.UNSET
    """Evidence of the kinds that `capture.evidence` asks for, by name; absent without any."""

    def evidence_of(self, kind: str) -> Any:
        """Returns the evidence of a kind, by its name; None if it was not asked for."""
        return getattr(self, kind) if kind in OWN_EVIDENCE else (self.evidence or {}).get(kind)


class Held(NamedTuple):
    """Evidence of one kind in a record."""

    evidence: Any
    """For its certificate."""
    data: bytes
    """Empty if the evidence is refused."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One captured model call (one per choice when `n > 1`)."""

    completion_id: str
    """Unique in its session; sorts by commit order."""
    session_id: str
    attempt: int
    status: Literal["complete", "aborted"]
    """aborted: the client or the session disconnected first, or the reply was empty and sampled again. The tokens
    sampled so far are kept and never trained on."""
    parent_id: str | None
    branch_key: str
    """Digest of (model, tools, template arguments): calls with different keys share no prefix."""
    dialect: str
    model: str
    choice_index: int = 0
    prompt_shared: int
    prompt_suffix_ids: TokenIds
    sampled_ids: TokenIds
    logprobs: Logprobs
    """[len(sampled_ids)]"""
    sampled_texts: tuple[str, ...] = ()
    """[len(sampled_ids)], as the engine reports them; empty unless `capture.token_texts` asks for them."""
    routed_experts: bytes = b""
    """Expert numbers in the layout of `certificate.routed_experts`. Empty in records of an open session."""
    sampling_mask: bytes = b""
    """Kept ids in the layout of `certificate.sampling_mask`. Empty in records of an open session."""
    evidence: dict[str, bytes] | msgspec.UnsetType = msgspec.UNSET
    """Bytes of each kind in `certificate.evidence`. Absent in records of an open session."""
    messages_shared: int
    new_messages: tuple[Message, ...]
    response: Message
    tools: tuple[ToolDefinition, ...] = ()
    """Empty with a parent, whose tools apply (see `CompletionTree.tools`)."""
    certificate: Certificate
    lineage: Lineage = Lineage()
    started_at: float
    """Unix time, UTC, seconds."""
    finished_at: float
    dropped: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}

    @property
    def of_environment(self) -> bool:
        """Whether one of the session's environments made the call, rather than the agent."""
        return bool(self.metadata.get(OF_ENVIRONMENT))

    @property
    def trainable(self) -> bool:
        """Whether the policy may be trained on it."""
        return self.trainable_for(None)

    def trainable_for(self, engine_role: str | None) -> bool:
        """Whether the model of a role's own engines (None: the policy) may be trained on it."""
        certificate = self.certificate
        is_whole = self.status == "complete" and certificate.untrainable is None and len(self.sampled_ids) > 0
        is_others = self.of_environment and engine_role is None
        return is_whole and certificate.engine_role == engine_role and not is_others

    def data_of(self, kind: str) -> bytes:
        """Returns the bytes of a kind of evidence, in the layout of the certificate."""
        return getattr(self, kind) if kind in OWN_EVIDENCE else (self.evidence or {}).get(kind, b"")

    @property
    def num_evidence_bytes(self) -> int:
        return len(self.routed_experts) + len(self.sampling_mask) + sum(map(len, (self.evidence or {}).values()))

    def with_evidence(self, held: Mapping[str, Held]) -> Completion:
        """Returns the record with evidence of these kinds, by name."""
        certificate = _with(self.certificate, {name: one.evidence for name, one in held.items()})
        data = _with(self, {name: one.data for name, one in held.items()})
        return msgspec.structs.replace(data, certificate=certificate)

    def without_evidence_bytes(self) -> Completion:
        """Returns the record without evidence bytes; the certificate still describes them."""
        if not self.num_evidence_bytes:
            return self
        return msgspec.structs.replace(self, routed_experts=b"", sampling_mask=b"", evidence=msgspec.UNSET)


_RecordT = TypeVar("_RecordT", Certificate, Completion)


def _with(record: _RecordT, found: Mapping[str, Any]) -> _RecordT:
    own = {name: value for name, value in found.items() if name in OWN_EVIDENCE}
    others = {name: value for name, value in found.items() if name not in OWN_EVIDENCE}
    changed = own | ({"evidence": (record.evidence or {}) | others} if others else {})
    return msgspec.structs.replace(record, **changed)


class RecordedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of an open session from the node's journal, in commit order."""

    attempt: int
    completions: tuple[Completion, ...]


class CompletionTree:
    """All completions of one session attempt, by id, in commit order."""

    def __init__(self, completions: Iterable[Completion] = ()) -> None:
        self._by_id: dict[str, Completion] = {}
        self._context_len: dict[str, int] = {}
        self._tools: dict[str, tuple[ToolDefinition, ...]] = {}
        for completion in completions:
            self.add(completion)

    def add(self, completion: Completion) -> None:
        """Raises: ValueError when the parent is unknown, or shorter than the shared part."""
        parent_len = 0 if completion.parent_id is None else self._context_len.get(completion.parent_id, -1)
        if parent_len < completion.prompt_shared:
            raise ValueError(f"{completion.completion_id}: shares more than its parent has")
        self._by_id[completion.completion_id] = completion
        self._tools[completion.completion_id] = self.tools(completion)
        self._context_len[completion.completion_id] = self.num_prompt_ids(completion) + len(completion.sampled_ids)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self._by_id.values())

    def __getitem__(self, completion_id: str) -> Completion:
        return self._by_id[completion_id]

    def __contains__(self, completion_id: object) -> bool:
        return completion_id in self._by_id

    @staticmethod
    def num_prompt_ids(completion: Completion) -> int:
        return completion.prompt_shared + len(completion.prompt_suffix_ids)

    def num_context_ids(self, completion_id: str) -> int:
        """Length of prompt plus sampled ids."""
        return self._context_len[completion_id]

    def prompt_ids(self, completion: Completion) -> TokenIds:
        """Returns the full prompt ids [T]. `completion` need not be in the tree yet; its parent must."""
        pieces = [completion.prompt_suffix_ids]
        want, at = completion.prompt_shared, completion.parent_id
        while want > 0:
            if at is None:
                raise ValueError(f"{completion.completion_id}: shares ids but has no parent")
            parent = self._by_id[at]
            # `want` ids are needed from the front of the parent's context: [shared | suffix | sampled].
            num_prompt = self.num_prompt_ids(parent)
            if want > num_prompt:
                pieces.append(parent.sampled_ids[: want - num_prompt])
                want = num_prompt
            if want > parent.prompt_shared:
                pieces.append(parent.prompt_suffix_ids[: want - parent.prompt_shared])
                want = parent.prompt_shared
            at = parent.parent_id
        pieces.reverse()
        return np.concatenate(pieces) if pieces else token_ids()

    def context_ids(self, completion: Completion) -> TokenIds:
        """Returns prompt, then sampled ids [T]."""
        return np.concatenate([self.prompt_ids(completion), completion.sampled_ids])

    def messages(self, completion: Completion) -> tuple[Message, ...]:
        """Returns all messages of the request. Echoes of sampled turns appear as they were sampled."""
        pieces = [completion.new_messages]
        want, at = completion.messages_shared, completion.parent_id
        while want > 0:
            if at is None:
                raise ValueError(f"{completion.completion_id}: shares messages but has no parent")
            # `want` messages are needed from the front of the parent's [shared | new | response].
            parent = self._by_id[at]
            own = (*parent.new_messages, parent.response)
            if want > parent.messages_shared:
                pieces.append(own[: want - parent.messages_shared])
                want = parent.messages_shared
            at = parent.parent_id
        return tuple(message for piece in reversed(pieces) for message in piece)

    def tools(self, completion: Completion) -> tuple[ToolDefinition, ...]:
        """Returns the tools of the request, which the conversation's first call has: other tools mean another branch
        key."""
        return completion.tools if completion.parent_id is None else self._tools[completion.parent_id]


warm_decoder(RecordedCalls)
