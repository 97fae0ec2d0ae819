"""One model call's way: place, decide the prompt, sample, capture, commit.

Laws
- The record is journaled, then in the tree, before the last byte can reach the harness.
- A call ends complete, as an aborted record, or, when the engine failed it, without a record. Never half.
- The call runs in a task of its own: a slow or vanished client holds up neither the engine nor the session's end.
- What the record says about its prompt is what the engine reported, whatever it was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from gangline.domain.completion import Completion, DivergenceCause, PromptSource
from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import EngineIncapable, EngineMalformed, GanglineError, SessionOver
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.domain.tokens import TokenIds, common_prefix_len, token_ids
from gangline.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineReply,
    EngineRequest,
    ReplyAccumulator,
    assistant_message,
)
from gangline.event_loop import Turn
from gangline.gateway.calls.parts import CallParts
from gangline.gateway.truth.capture import Prompt, completion_of, tool_call_id, with_own_call_ids
from gangline.gateway.truth.divergence import find_cause
from gangline.gateway.truth.placing import Digests, Place, unknown
from gangline.gateway.truth.references import INSTRUCTIONS
from gangline.gateway.truth.stitch import Decision
from gangline.gateway.truth.versions import VersionStamps

__all__ = ["RETRY_KEY", "CallInFlight", "whole_delta"]

_log = logging.getLogger("gangline.calls")

RETRY_KEY = "retry_key"
"""Name in a record's metadata, of what a retry is known by."""

_CAUSE_BUDGET_S = 10.0
"""For asking the engine what ids say: the reply is there, and a hanging engine must not keep it."""


class CallInFlight:
    """One admitted call. `start` it; then read `news()`, wait for `reply()`, or `abort` it. Any number may listen."""

    def __init__(
        self,
        call: ModelCall,
        parts: CallParts,
        *,
        wished: SamplingParams | None = None,
        retry_key: str | None = None,
        known: Digests = unknown,
    ) -> None:
        """
        wished: what the harness asked for, where a seed or a sampling policy made something else of it.
        retry_key: what a retry is known by, should it come in another life of the node; None where it cannot be.
        known: see `PlaceIndex.place`.
        """
        self.call = call
        self.record_key = secrets.token_hex(8)
        self.created_at = parts.clock()
        self.num_replays = 0
        """Retries that were given this call's answer."""
        self._parts = parts
        self._wished = wished
        self._retry_key = retry_key
        self._known = known
        self._gathered = ReplyAccumulator()
        self._stamps = VersionStamps(parts.gate)
        self._sent_ids: TokenIds | None = None
        self._num_prompt_tokens: int | None = None
        self._place: Place | None = None
        self._volatile: dict[str, Sequence[str]] = {}
        """Index of a system message -> its volatile text, where the engine was sent other text."""
        self._capabilities: EngineCapabilities | None = None
        """Set once the engine is asked to sample."""
        self._shown: list[ReplyDelta] = []
        self._listeners: set[_Listener] = set()
        """Of each who reads `news`: told when there is something new."""
        self._waiting: list[asyncio.Future[None]] = []
        """Of each who waits for the end."""
        self._abort_message: str | None = None
        self._committing = False
        self._task: asyncio.Task[Reply] | None = None

    def start(self, on_end: Callable[[CallInFlight], None]) -> None:
        """`on_end` is called once, when the call has ended in any way."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._end(on_end))
        self._task.add_done_callback(lambda _: self._release())

    def _end(self, on_end: Callable[[CallInFlight], None]) -> None:
        on_end(self)
        # A finished call may be kept for retries: they need its reply, and send their own body along.
        self.call = msgspec.structs.replace(self.call, messages=(), tools=())
        self._gathered, self._sent_ids, self._place = ReplyAccumulator(), None, None
        self._known = unknown
        self.compact()
        self._wake()

    def _release(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    @property
    def error(self) -> BaseException | None:
        """What ended the call early; None while it runs, when it was answered and when it was aborted."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    @property
    def answered(self) -> bool:
        return self._task is not None and self._task.done() and not self._task.cancelled() and self.error is None

    @property
    def ended_already(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def failed(self) -> bool:
        """Ended without an answer."""
        return self.ended_already and not self.answered

    @property
    def num_prompt_tokens(self) -> int | None:
        """As the engine reported it; None until it did."""
        return self._num_prompt_tokens

    def compact(self) -> None:
        """Keep of an answered stream what a replay needs: one delta for each choice, not one for each token."""
        if self._task is not None and self.answered and self._shown and not self._listeners:
            choices = self._task.result().choices
            self._shown = [whole_delta(choice.index, choice.message, choice.logprobs or ()) for choice in choices]

    def abort(self, message: str) -> None:
        """End the call: cancelled in the engine, kept as an aborted record. One that is wholly sampled is committed."""
        if self._abort_message is None and not self._committing and self._task is not None:
            self._abort_message = message
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until the call has ended in any way. Raises nothing of the call's."""
        assert self._task is not None
        if not self._task.done():
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    async def reply(self) -> Reply:
        """The whole reply. Raises: EngineError, StoreError; SessionOver when the call was aborted."""
        assert self._task is not None
        await self.ended()
        if self._task.cancelled():
            raise SessionOver(self._abort_message or "the node is stopping")
        return self._task.result()

    async def news(self, idle_s: float) -> AsyncGenerator[Sequence[ReplyDelta], None]:
        """What may be shown, from the beginning, as it comes: each time all that is new; ends with the call, however
        that ends. Empty: nothing came for `idle_s` seconds."""
        assert self._task is not None
        num_read, listener = 0, _Listener(idle_s)
        self._listeners.add(listener)
        try:
            while True:
                if num_read < len(self._shown):
                    new = self._shown[num_read:]
                    num_read = len(self._shown)
                    yield new
                elif self._task.done():
                    return
                elif not await listener.heard():
                    yield ()
        finally:
            self._listeners.discard(listener)
            listener.close()

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.notify()

    async def _run(self) -> Reply:
        try:
            async with self._parts.gate.pass_through(self._parts.meter):
                return await self._sample_and_commit()
        except asyncio.CancelledError:
            if self._abort_message is None:
                raise
            await self._record_aborted(self._abort_message)
            raise SessionOver(self._abort_message) from None

    async def _sample_and_commit(self) -> Reply:
        self._place = place = await self._parts.ledger.index.place_in_turns(self.call, self._known)
        self._pin(place)
        capabilities = await self._parts.engine.capabilities()
        decision = await self._parts.tier.decide(self.call, place, capabilities)
        self._capabilities, self._sent_ids = capabilities, decision.prompt_ids
        answer = self._checked(await self._sample(capabilities), capabilities)
        self._committing = True
        prompt = await self._prompt(place, decision, answer)
        return await self._commit(place, prompt, answer, capabilities)

    def _pin(self, place: Place) -> None:
        """The engine is sent the system text that the conversation first had; the record keeps what the client sent."""
        if place.pinned:
            messages = list(self.call.messages)
            for position, first in place.pinned:
                self._volatile[str(position)] = self._parts.ledger.index.volatile.found_in(messages[position])
                messages[position] = first
            self.call = msgspec.structs.replace(self.call, messages=tuple(messages))

    # -- sampling ------------------------------------------------------------------------------------------------

    async def _sample(self, capabilities: EngineCapabilities) -> EngineReply:
        asks_for_texts = self._parts.with_texts and self.call.num_top_logprobs is None
        call = msgspec.structs.replace(self.call, num_top_logprobs=0) if asks_for_texts else self.call
        request = EngineRequest(call=call, prompt_ids=self._sent_ids)
        self._stamps.begin()
        if not (self.call.stream and capabilities.streams_ids):
            answer = await self._parts.engine.chat(request)
            self._note_prompt(answer)
            if self.call.stream:
                for choice in answer.choices:
                    self._show(whole_delta(choice.index, choice.message, choice.token_logprobs))
            return answer
        async with aclosing(self._parts.engine.stream(request)) as pieces:
            async for piece in pieces:
                if piece.prompt_ids is None and self._gathered.prompt_ids is None:
                    raise _no_ids()  # before anything was shown
                self._gathered.feed(piece)
                self._stamps.saw(piece.shown.choice_index, len(piece.sampled_ids or ()))
                if self._num_prompt_tokens is None and piece.prompt_ids is not None:
                    self._num_prompt_tokens = len(piece.prompt_ids)
                if piece.sampled_ids or not piece.shown.shows_nothing:
                    self._show(piece.shown)
        return self._gathered.reply()

    def _note_prompt(self, answer: EngineReply) -> None:
        if answer.prompt_ids is not None:
            self._num_prompt_tokens = len(answer.prompt_ids)
        elif answer.usage is not None:
            self._num_prompt_tokens = answer.usage.num_prompt_tokens

    def _show(self, delta: ReplyDelta) -> None:
        if delta.logprobs and self.call.num_top_logprobs is None:  # the record alone wants them
            delta = msgspec.structs.replace(delta, logprobs=())
        if delta.tool_calls:
            pieces = tuple(self._own_call_id(delta.choice_index, piece) for piece in delta.tool_calls)
            delta = msgspec.structs.replace(delta, tool_calls=pieces)
        self._shown.append(delta)
        self._wake()

    def _own_call_id(self, choice_index: int, piece: ToolCallDelta) -> ToolCallDelta:
        if piece.name is None:
            return piece
        call_id = tool_call_id(self.record_key, choice_index, piece.index)
        return msgspec.structs.replace(piece, call_id=call_id)

    def _checked(self, answer: EngineReply, capabilities: EngineCapabilities) -> EngineReply:
        """Raises: EngineIncapable, EngineMalformed when no record can be made of the answer."""
        if len(answer.choices) != self.call.num_choices:
            raise EngineMalformed(f"the engine answered {len(answer.choices)} of {self.call.num_choices} choices")
        if any(choice.finish_reason is None for choice in answer.choices):
            raise EngineMalformed("the engine ended its reply without a finish reason")
        # An engine that never reports ids was let in by the operator, who wants the text alone.
        has_ids = answer.prompt_ids is not None and all(choice.sampled_ids is not None for choice in answer.choices)
        if capabilities.reports_ids and not has_ids:
            raise _no_ids()
        return answer

    # -- capture -------------------------------------------------------------------------------------------------

    async def _prompt(self, place: Place, decision: Decision, answer: EngineReply) -> Prompt:
        """What the engine says it conditioned on, against the parent's context."""
        reported = answer.prompt_ids
        if reported is None:
            return Prompt(source=self._rendered_by, context="first", parent_id=None, shared=0, suffix_ids=token_ids())
        stitched = decision.prompt_ids is not None and np.array_equal(decision.prompt_ids, reported)
        fallback, cause = decision.fallback, decision.cause
        if decision.prompt_ids is not None and not stitched:
            self._parts.tier.ids_were_ignored()
            fallback = "the engine ignored the exact prompt ids and rendered the messages itself"
            _log.error("call.prompt_ids_ignored session=%s", self._parts.ledger.session_id)
        prompt = self._compared(place, reported, fallback)
        if stitched:
            return msgspec.structs.replace(prompt, source="stitched")
        if prompt.context == "diverged" and cause is None:
            cause = await self._find_cause(place, reported, prompt.shared)
        return msgspec.structs.replace(prompt, cause=cause if prompt.context == "diverged" else None)

    @property
    def _rendered_by(self) -> PromptSource:
        return "engine" if self._capabilities is None else self._capabilities.prompt_source

    def _compared(self, place: Place, reported: TokenIds, fallback: str | None = None) -> Prompt:
        if place.parent_id is None:
            return Prompt(source=self._rendered_by, context="first", parent_id=None, shared=0, suffix_ids=reported)
        tree = self._parts.ledger.tree
        context = tree.context_ids(tree[place.parent_id])
        shared = common_prefix_len(context, reported)
        exact = shared == len(context)
        return Prompt(
            source=self._rendered_by,
            context="exact" if exact else "diverged",
            parent_id=place.parent_id,
            shared=shared,
            suffix_ids=reported[shared:].copy(),
            first_divergence=None if exact else shared,
            fallback=fallback,
        )

    async def _find_cause(self, place: Place, reported: TokenIds, first: int) -> DivergenceCause:
        assert place.parent_id is not None
        tree = self._parts.ledger.tree
        parent = tree[place.parent_id]
        try:
            async with asyncio.timeout(_CAUSE_BUDGET_S):
                return await find_cause(
                    self._parts.engine,
                    tree,
                    parent,
                    self.call.messages[: place.num_shared],
                    tree.context_ids(parent),
                    reported,
                    first,
                    user_turn_follows=any(message.role == "user" for message in place.new_messages),
                )
        except TimeoutError:
            return "unknown"

    async def _commit(
        self, place: Place, prompt: Prompt, answer: EngineReply, capabilities: EngineCapabilities
    ) -> Reply:
        turn = Turn()
        choices = [self._with_own_ids(choice) for choice in answer.choices]
        drafts = self._drafts(place, prompt, choices, capabilities, metadata=answer.metadata)
        await turn.give()
        await self._parts.ledger.commit(drafts, place.digest)
        return self._reply(choices, answer)

    def _drafts(
        self,
        place: Place,
        prompt: Prompt,
        choices: list[EngineChoice],
        capabilities: EngineCapabilities,
        *,
        metadata: dict[str, Any],
        aborted: str | None = None,
    ) -> list[Completion]:
        """`metadata`: the engine's."""
        finished_at, metadata = self._parts.clock(), self._metadata() | metadata
        return [
            completion_of(
                self.call,
                place,
                prompt,
                choice,
                capabilities,
                session_id=self._parts.ledger.session_id,
                attempt=self._parts.ledger.attempt,
                started_at=self.created_at,
                finished_at=finished_at,
                aborted=aborted,
                metadata=metadata,
                with_texts=self._parts.with_texts,
            )
            for choice in choices
        ]

    def _metadata(self) -> dict[str, Any]:
        """What the record says beside its fields: the reply's id, and what became of the harness's wishes."""
        metadata: dict[str, Any] = {"reply_id": self.record_key}
        if self.call.leads_with_instructions:
            metadata[INSTRUCTIONS] = True
        if self._retry_key is not None and self.call.num_top_logprobs is None:
            metadata[RETRY_KEY] = self._retry_key
        if self.num_replays:
            metadata["num_replays"] = self.num_replays
        if self.call.agent_id is not None:
            metadata["agent_id"] = self.call.agent_id
        if self._volatile:
            metadata["volatile_system_text"] = self._volatile
        if self._wished is not None:
            metadata["sampling_wished"] = msgspec.to_builtins(self._wished)
        return metadata

    def _with_own_ids(self, choice: EngineChoice) -> EngineChoice:
        """With tool-call ids of ours, and the gate's policy versions where the engine reports none."""
        message = with_own_call_ids(choice.message, self.record_key, choice.index)
        return msgspec.structs.replace(choice, message=message, version_spans=self._stamps.spans(choice))

    def _reply(self, choices: list[EngineChoice], answer: EngineReply) -> Reply:
        num_prompt = 0 if answer.prompt_ids is None else len(answer.prompt_ids)
        num_sampled = sum(0 if choice.sampled_ids is None else len(choice.sampled_ids) for choice in choices)
        return Reply(
            reply_id=self.record_key,
            model=self.call.model,
            created_at=int(self.created_at),
            choices=tuple(
                ReplyChoice(
                    index=choice.index,
                    message=choice.message,
                    finish_reason=choice.finish_reason or "",
                    stop_reason=choice.stop_reason,
                    logprobs=None if self.call.num_top_logprobs is None else choice.token_logprobs,
                )
                for choice in choices
            ),
            usage=answer.usage or Usage(num_prompt_tokens=num_prompt, num_sampled_tokens=num_sampled),
        )

    async def _record_aborted(self, message: str) -> None:
        """Keep what was sampled until now. Its loss must not hide why the call ended."""
        if self._place is None or self._capabilities is None:
            return  # the engine was asked for nothing yet
        partial = self._gathered.reply()
        prompt = self._prompt_so_far(self._place, partial.prompt_ids)
        choices = [self._with_own_ids(choice) for choice in partial.choices or (_nothing_sampled(),)]
        drafts = self._drafts(
            self._place, prompt, choices, self._capabilities, metadata=partial.metadata, aborted=message
        )
        try:
            await self._parts.ledger.commit(drafts, self._place.digest)
        except GanglineError as error:
            _log.error("call.abort_not_recorded session=%s error=%s", self._parts.ledger.session_id, error)

    def _prompt_so_far(self, place: Place, reported: TokenIds | None) -> Prompt:
        """As far as it is known: reported by the engine, else as sent, else nothing."""
        known = self._sent_ids if reported is None else reported
        if known is None:
            return Prompt(source=self._rendered_by, context="first", parent_id=None, shared=0, suffix_ids=token_ids())
        prompt = self._compared(place, known)
        if self._sent_ids is not None and np.array_equal(self._sent_ids, known):
            return msgspec.structs.replace(prompt, source="stitched")
        return msgspec.structs.replace(prompt, cause="unknown") if prompt.context == "diverged" else prompt


class _Listener:
    """Waits for something new, or for `idle_s` seconds without. One timer for all waits: a stream has hundreds."""

    def __init__(self, idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._waiting: asyncio.Future[bool] | None = None
        self._waiting_since = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._check)

    def notify(self) -> None:
        self._tell(has_news=True)

    async def heard(self) -> bool:
        """True: there is something new. False: nothing came for `idle_s` seconds."""
        self._waiting_since = self._loop.time()
        self._waiting = self._loop.create_future()
        return await self._waiting

    def _tell(self, *, has_news: bool) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(has_news)

    def _check(self) -> None:
        left_s = self._waiting_since + self._idle_s - self._loop.time()
        if left_s <= 0:
            self._tell(has_news=False)
            left_s = self._idle_s
        self._timer = self._loop.call_later(left_s, self._check)

    def close(self) -> None:
        self._timer.cancel()


def whole_delta(index: int, message: Message, logprobs: tuple[TokenLogprob, ...]) -> ReplyDelta:
    """A reply that came in one piece, as the one delta of its stream."""
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    return ReplyDelta(
        choice_index=index,
        thinking="".join(part.text for part in message.parts if isinstance(part, Thinking)),
        text="".join(part.text for part in message.parts if isinstance(part, Text)),
        tool_calls=tuple(ToolCallDelta(i, part.arguments, part.call_id, part.name) for i, part in enumerate(calls)),
        logprobs=logprobs,
    )


def _no_ids() -> EngineIncapable:
    return EngineIncapable(
        "the engine returned no token ids for this call. Reach it without a router that strips `token_ids` and "
        "`prompt_token_ids`."
    )


def _nothing_sampled() -> EngineChoice:
    return EngineChoice(
        index=0, message=assistant_message("", ""), finish_reason=None, sampled_ids=token_ids(), logprobs=None
    )
