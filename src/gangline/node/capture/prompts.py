"""A call's prompt as its record describes it: against the parent's context, and with the cause of a divergence.

The engine's report is the truth, even where it differs from the request.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import numpy as np

from gangline.domain.completion import DivergenceCause, PromptSource
from gangline.domain.conversation import ModelCall
from gangline.domain.tokens import TokenIds, common_prefix_len, token_ids
from gangline.models.engines.contract import EngineCapabilities
from gangline.node.capture.capture import Prompt
from gangline.node.capture.divergence import find_cause
from gangline.node.capture.parts import CallParts
from gangline.node.capture.placing import Place
from gangline.node.capture.prompt_tier import Decision

__all__ = ["PromptReport"]

_log = logging.getLogger("gangline.calls")

_CAUSE_BUDGET_S = 10.0
"""Seconds for asking the engine to decode ids: the reply is there, and a hanging engine must not delay it."""


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
        """The prompt of a call that was answered."""
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
        """The prompt of an aborted call, as far as it is known: reported by the engine, else as sent, else nothing."""
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
