"""Records of one call, made from the engine's choices and committed together.

Policy versions of a call are the engine's own, or the gate's if it reports none. The gate's version applies to
engines that were healthy when the version was set. An engine that was added or recovered later has the weights it was
started with: its tokens have an unknown version until a version is set again.

A record describes its prompt relative to the parent's context, with the cause of a divergence. The engine's report
counts, even where it differs from the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gangline.domain.completion import Completion, DivergenceCause, PromptSource, VersionSpan
from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError
from gangline.domain.tokens import TokenIds, common_prefix_len, token_ids
from gangline.machine.event_loop import Turn
from gangline.models.engines.contract import EngineCapabilities, EngineChoice, assistant_message
from gangline.node.backends.gate import Gate
from gangline.node.capture.capture import (
    ENGINE_CALL_IDS,
    Prompt,
    completion_of,
    engine_call_ids,
    with_own_call_ids,
)
from gangline.node.capture.divergence import find_cause
from gangline.node.capture.parts import CallParts
from gangline.node.capture.placing import HistoryDigest, Place
from gangline.node.capture.prompt_tier import Decision

_log = logging.getLogger("gangline.calls")

_CAUSE_BUDGET_S = 10.0
"""Seconds for the engine to decode ids: the reply is ready, and a hanging engine must not delay it."""


class PromptReport(msgspec.Struct, frozen=True):
    """The prompt of one call, with the values to compare it with."""

    parts: CallParts
    place: Place
    source: PromptSource
    """Who renders messages."""

    @classmethod
    def of(cls, parts: CallParts, place: Place, capabilities: EngineCapabilities) -> PromptReport:
        return cls(parts, place, capabilities.prompt_source)

    async def whole(self, call: ModelCall, decision: Decision, reported: TokenIds | None) -> Prompt:
        """Returns the prompt of an answered call."""
        if reported is None:
            return self._unknown()
        stitched = decision.prompt_ids is not None and np.array_equal(decision.prompt_ids, reported)
        fallback, cause = decision.fallback, decision.cause
        if decision.prompt_ids is not None and not stitched:
            self.parts.tier.ids_were_ignored()
            fallback = "the engine ignored the exact prompt ids and rendered the messages itself"
            _log.error("call.prompt_ids_ignored session=%s", self.parts.ledger.session_id)
        prompt = self._compared(reported, fallback)
        if stitched:
            return msgspec.structs.replace(
                prompt,
                source="stitched",
                as_rendered=decision.as_rendered,
                unlike_rendering=decision.unlike_rendering,
            )
        if prompt.context == "diverged" and cause is None:
            cause = await self._find_cause(call, reported, prompt.shared)
        return msgspec.structs.replace(prompt, cause=cause if prompt.context == "diverged" else None)

    def so_far(self, sent: TokenIds | None, reported: TokenIds | None) -> Prompt:
        """Returns the prompt of an aborted call as far as it is known: as reported by the engine, else as sent, else
        empty."""
        known = sent if reported is None else reported
        if known is None:
            return self._unknown()
        prompt = self._compared(known)
        if sent is not None and np.array_equal(sent, known):
            return msgspec.structs.replace(prompt, source="stitched")
        return msgspec.structs.replace(prompt, cause="unknown") if prompt.context == "diverged" else prompt

    def _unknown(self) -> Prompt:
        return Prompt(source=self.source, context="first", parent_id=None, shared=0, suffix_ids=token_ids())

    def _compared(self, reported: TokenIds, fallback: str | None = None) -> Prompt:
        parent_id = self.place.parent_id
        if parent_id is None:
            return Prompt(source=self.source, context="first", parent_id=None, shared=0, suffix_ids=reported)
        tree = self.parts.ledger.tree
        context = tree.context_ids(tree[parent_id])
        shared = common_prefix_len(context, reported)
        exact = shared == len(context)
        return Prompt(
            source=self.source,
            context="exact" if exact else "diverged",
            parent_id=parent_id,
            shared=shared,
            suffix_ids=reported[shared:].copy(),
            first_divergence=None if exact else shared,
            fallback=fallback,
        )

    async def _find_cause(self, call: ModelCall, reported: TokenIds, first: int) -> DivergenceCause:
        assert self.place.parent_id is not None
        tree = self.parts.ledger.tree
        parent = tree[self.place.parent_id]
        try:
            async with asyncio.timeout(_CAUSE_BUDGET_S):
                return await find_cause(
                    self.parts.engine,
                    tree,
                    parent,
                    call.messages[: self.place.num_shared],
                    tree.context_ids(parent),
                    reported,
                    first,
                    user_turn_follows=any(message.role == "user" for message in self.place.new_messages),
                )
        except TimeoutError:
            return "unknown"


class VersionStamps:
    """Stamps each token with the gate's version at its arrival. A reply that arrived in one piece gets the version at
    its start: it is unknown where in it the weights changed, and the older version is the safe choice."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._begun_under: int | None = None
        self._spans: dict[int, list[VersionSpan]] = {}

    def begin(self) -> None:
        """Record that the engine is asked now. Tokens of an earlier try are dropped."""
        self._spans.clear()
        self._begun_under = self._gate.version

    def saw(self, choice_index: int, num_ids: int) -> None:
        """Record that `num_ids` more tokens of a choice arrived."""
        version = self._gate.version
        if version is None or num_ids == 0:
            return
        spans = self._spans.setdefault(choice_index, [])
        end = spans[-1].end if spans else 0
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end + num_ids)
        else:
            spans.append(VersionSpan(version, end, end + num_ids))

    def spans(self, choice: EngineChoice) -> tuple[VersionSpan, ...]:
        """Returns version spans of all sampled tokens of a choice: the engine's, else the gate's; empty if unknown."""
        if choice.version_spans or not choice.weights_known:
            return choice.version_spans
        num_ids = 0 if choice.sampled_ids is None else len(choice.sampled_ids)
        seen = self._spans.get(choice.index)
        if seen and seen[-1].end == num_ids:
            return tuple(seen)
        if self._begun_under is None or num_ids == 0:
            return ()
        return (VersionSpan(self._begun_under, 0, num_ids),)


class Sampled(NamedTuple):
    """Everything about a call that goes into its records."""

    call: ModelCall
    """As the client sent it, with the messages that the engine was sent."""
    place: Place
    prompt: Prompt
    choices: Sequence[EngineChoice]
    """With the node's tool-call ids and policy versions: see `Recorder.own`."""
    capabilities: EngineCapabilities
    metadata: Mapping[str, Any]


class Recorder:
    """Commits one call to the journal, then to the tree, before the last byte can reach the harness."""

    def __init__(self, parts: CallParts, record_key: str, started_at: float) -> None:
        self.stamps = VersionStamps(parts.gate)
        self._parts = parts
        self._record_key = record_key
        self._started_at = started_at
        self._engine_ids: dict[str, str] = {}
        """Own call id -> the engine's."""
        self._set_aside: list[tuple[list[Completion], HistoryDigest]] = []
        """Records of replies that were given up, committed with the call's own."""

    def own(self, choices: Sequence[EngineChoice]) -> list[EngineChoice]:
        """Returns the choices with our tool-call ids, and with the gate's policy versions if the engine reports
        none."""
        own: list[EngineChoice] = []
        for choice in choices:
            message = with_own_call_ids(choice.message, self._record_key, choice.index)
            self._engine_ids |= engine_call_ids(choice.message, message)
            own.append(
                msgspec.structs.replace(choice, message=message, version_spans=self.stamps.spans(choice)),
            )
        return own

    async def commit(self, sampled: Sampled, *, turn: Turn | None = None) -> list[Completion]:
        """Record an answered call. `turn`: given up before the journal is written. Raises: StoreError."""
        drafts = self._drafts(sampled, None)
        if turn is not None:
            await turn.give()
        await self._commit_set_aside()
        return await self._parts.ledger.commit(drafts, sampled.place.digest)

    async def commit_aborted(self, sampled: Sampled, message: str) -> None:
        """Record a call that was cut off. A failure is logged: it must not hide why the call ended."""
        try:
            await self._commit_set_aside()
            await self._parts.ledger.commit(self._drafts(sampled, message), sampled.place.digest)
        except GanglineError as error:
            _log.error("call.abort_not_recorded session=%s error=%s", self._parts.ledger.session_id, error)

    def set_aside(self, sampled: Sampled, message: str) -> None:
        """Keep a reply that was given up and is sampled again, as an aborted record before the call's own.

        message: why it was given up.
        """
        self._set_aside.append((self._drafts(sampled, message), sampled.place.digest))

    async def _commit_set_aside(self) -> None:
        """Raises: StoreError."""
        while self._set_aside:
            await self._parts.ledger.commit(*self._set_aside[0])
            del self._set_aside[0]

    def _drafts(self, sampled: Sampled, aborted: str | None) -> list[Completion]:
        finished_at, metadata = self._parts.clock(), dict(sampled.metadata)
        if self._engine_ids and sampled.capabilities.template.prints_call_ids:
            metadata[ENGINE_CALL_IDS] = dict(self._engine_ids)
        parent_id, tree = sampled.prompt.parent_id, self._parts.ledger.tree
        before = None if parent_id is None else tree[parent_id].certificate
        kinds = [kind for kind in self._parts.evidence if kind.applies(sampled.call.sampling)]
        return [
            completion_of(
                sampled.call,
                sampled.place,
                sampled.prompt,
                choice,
                sampled.capabilities,
                session_id=self._parts.ledger.session_id,
                attempt=self._parts.ledger.attempt,
                started_at=self._started_at,
                finished_at=finished_at,
                aborted=aborted,
                metadata=metadata,
                with_texts=self._parts.with_texts,
                kinds=kinds,
                before=before,
                engine_role=self._parts.engine_role,
            )
            for choice in sampled.choices or self.own([_nothing_sampled()])
        ]


def _nothing_sampled() -> EngineChoice:
    return EngineChoice(
        index=0, message=assistant_message("", ""), finish_reason=None, sampled_ids=token_ids(), logprobs=None
    )
