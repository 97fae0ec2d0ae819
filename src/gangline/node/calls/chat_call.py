"""The steps of one model call: place, decide the prompt, sample, capture, commit. A `Flight` runs it.

An empty generation is a reply that ends by itself without text, thinking or a tool call. The task sets how often such a
reply is sampled again (`capture.empty_generation_retries`).

Laws
- A reply that was given up is recorded as aborted, so it is never trained on, and the client sees nothing of it.
- The call stays one call: one turn, one number, one id. Only its seed changes, since the same seed samples the same
  reply.
- The last reply is delivered as it is, and its record has `empty_generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import msgspec

from gangline.domain.completion import EMPTY_GENERATION, OF_ENVIRONMENT
from gangline.domain.conversation import ModelCall, SamplingParams, Text, Thinking, Usage
from gangline.domain.errors import EngineIncapable, EngineMalformed
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, ToolCallDelta, whole_delta
from gangline.domain.seeds import derived_seed
from gangline.machine.event_loop import Turn
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineReply,
    EngineRequest,
    ReplyAccumulator,
)
from gangline.models.engines.templates.fitting import in_template_words
from gangline.node.calls.flight import Flight, Progress
from gangline.node.calls.sampling_policy import NUM_SEEDS
from gangline.node.capture.capture import parse_status, tool_call_id
from gangline.node.capture.parts import CallParts
from gangline.node.capture.placing import Digests, Place, unknown
from gangline.node.capture.prompt_tier import Decision
from gangline.node.capture.recorder import PromptReport, Recorder, Sampled
from gangline.node.capture.references import INSTRUCTIONS
from gangline.rows.forks.calls import REQUEST, USAGE, request_fields

RETRY_KEY = "retry_key"
"""Name in a record's metadata: the key that identifies a retry."""

CHECKPOINT = "checkpoint"
"""Name in a record's metadata: id of the checkpoint of the files at the time of the call."""

CallInFlight: TypeAlias = Flight[Reply, ReplyDelta]

GIVEN_UP = "empty_generation: sampled again"
"""Abort message in the record of a reply that was given up."""

_CUT_SHORT = ("length", "abort", None)
"""Finish reasons of replies that did not end by themselves."""


def is_empty(choices: Sequence[EngineChoice], stop: Sequence[str]) -> bool:
    """Whether no choice of a reply has any content and the model itself ended all of them.

    stop: the client's stop strings. A stop string at the very start leaves nothing, as the client asked.
    """
    for choice in choices:
        if choice.finish_reason in _CUT_SHORT or choice.parse not in (None, "ok") or choice.stop_reason in stop:
            return False
        for part in choice.message.parts:
            if not isinstance(part, Text | Thinking) or part.text:
                return False
    return True


class Tries:
    """The tries of one call. While a try may still be given up, its deltas are held back until one has content."""

    def __init__(self, num_retries: int, show: Callable[[ReplyDelta], None]) -> None:
        self.num_given_up = 0
        self._num_retries = num_retries
        self._show = show
        self._held: list[ReplyDelta] = []
        self._is_holding = num_retries > 0

    def show(self, delta: ReplyDelta) -> None:
        self._held.append(delta)
        if not self._is_holding or delta.text or delta.thinking or delta.tool_calls:
            self.deliver()

    def deliver(self) -> None:
        """Show all deltas that were held back. Later ones are shown at once."""
        self._is_holding = False
        for delta in self._held:
            self._show(delta)
        self._held.clear()

    def give_up(self) -> bool:
        """Drop an empty reply if it may be sampled again. Returns whether it may."""
        if self.num_given_up >= self._num_retries:
            return False
        self.num_given_up += 1
        self._held.clear()
        return True

    def metadata(self, choices: Sequence[EngineChoice], stop: Sequence[str]) -> dict[str, Any]:
        """Returns metadata for the record of the delivered reply."""
        metadata: dict[str, Any] = {EMPTY_GENERATION: "delivered"} if is_empty(choices, stop) else {}
        return metadata | ({"empty_retries": self.num_given_up} if self.num_given_up else {})

    def sampling(self, first: SamplingParams) -> SamplingParams:
        """Returns the parameters of the next try. `first`: the first try's."""
        if first.seed is None:
            return first
        return msgspec.structs.replace(first, seed=derived_seed(first.seed, self.num_given_up) % NUM_SEEDS)


def call_in_flight(
    call: ModelCall,
    parts: CallParts,
    *,
    requested: SamplingParams | None = None,
    retry_key: str | None = None,
    known: Digests = unknown,
) -> CallInFlight:
    """Returns a call that is ready to start.

    requested: the harness's own parameters, if a seed or a sampling policy changed them.
    retry_key: identifies a retry after a restart of the node; None: nothing does.
    known: see `PlaceIndex.place`.
    """
    progress = Progress[ReplyDelta](parts.clock())
    sampler = _ChatSampler(call, parts, progress, requested=requested, retry_key=retry_key, known=known)
    return Flight(sampler, progress, parts, shown_again)


class _ChatSampler:
    """See `Sampler`."""

    def __init__(
        self,
        call: ModelCall,
        parts: CallParts,
        progress: Progress[ReplyDelta],
        *,
        requested: SamplingParams | None,
        retry_key: str | None,
        known: Digests,
    ) -> None:
        self.is_committing = False
        self._call = call
        self._parts = parts
        self._progress = progress
        self._wished = requested
        self._retry_key = retry_key
        self._known = known
        self._recorder = Recorder(parts, progress.record_key, progress.created_at)
        self._gathered = ReplyAccumulator()
        self._tries = Tries(parts.empty_retries, progress.show)
        self._sent = EngineRequest(call=call)
        """The request without changes for one try: exact ids and the evidence asked for."""
        self._place: Place | None = None
        self._checkpoint: str | None = None
        self._volatile: dict[str, Sequence[str]] = {}
        """Index of a system message -> its volatile text, if the engine was sent other text."""
        self._capabilities: EngineCapabilities | None = None
        """Set once the engine is asked to sample."""

    async def answer(self) -> Reply:
        parts = self._parts
        parts.share.join()
        self._place = place = await parts.index.place_in_turns(self._call, self._known)
        self._pin(place)
        if parts.checkpoint is not None:  # before the answer: the agent acts as soon as it sees part of it
            self._checkpoint = await parts.checkpoint()
        capabilities = await parts.engine.capabilities()
        self._call = in_template_words(self._call, capabilities.template)
        decision = await parts.tier.decide(self._call, place, capabilities)
        asked = parts.asks(capabilities, self._call.sampling, place.parent_id, decision.prompt_ids)
        self._sent = EngineRequest(call=self._call, prompt_ids=decision.prompt_ids, evidence=asked)
        self._capabilities = capabilities
        report = PromptReport.of(parts, place, capabilities)
        answer = await self._final(capabilities, report, decision)
        self.is_committing = True
        prompt = await report.whole(self._call, decision, answer.prompt_ids)
        turn = Turn()
        choices = self._recorder.own(answer.choices)
        metadata = self._metadata() | self._tries.metadata(answer.choices, self._call.sampling.stop) | answer.metadata
        if answer.usage is not None:
            metadata[USAGE] = msgspec.to_builtins(answer.usage)
        await self._recorder.commit(Sampled(self._call, place, prompt, choices, capabilities, metadata), turn=turn)
        return self._reply(choices, answer)

    async def record_aborted(self, message: str) -> None:
        if self._place is None or self._capabilities is None:
            return  # the engine was asked for nothing yet
        partial = self._gathered.reply()
        report = PromptReport.of(self._parts, self._place, self._capabilities)
        prompt = report.so_far(self._sent.prompt_ids, partial.prompt_ids)
        choices, metadata = self._recorder.own(partial.choices), self._metadata() | partial.metadata
        sampled = Sampled(self._call, self._place, prompt, choices, self._capabilities, metadata)
        await self._recorder.commit_aborted(sampled, message)

    def _pin(self, place: Place) -> None:
        """Send the engine the conversation's first system text. The record keeps the text that the client sent."""
        if place.pinned:
            messages = list(self._call.messages)
            for position, first in place.pinned:
                self._volatile[str(position)] = self._parts.ledger.volatile.found_in(messages[position])
                messages[position] = first
            self._call = msgspec.structs.replace(self._call, messages=tuple(messages))

    # -- sampling ------------------------------------------------------------------------------------------------

    async def _final(self, capabilities: EngineCapabilities, report: PromptReport, decision: Decision) -> EngineReply:
        """Returns the reply to deliver. Raises: EngineError."""
        first = self._call.sampling
        while True:
            answer = self._checked(await self._sample(capabilities), capabilities)
            if not is_empty(answer.choices, first.stop) or not self._tries.give_up():
                self._tries.deliver()
                return answer
            prompt = await report.whole(self._call, decision, answer.prompt_ids)
            metadata = self._metadata() | answer.metadata | {EMPTY_GENERATION: "retried"}
            choices = self._recorder.own(answer.choices)
            self._recorder.set_aside(
                Sampled(self._call, report.place, prompt, choices, capabilities, metadata), GIVEN_UP
            )
            self._gathered = ReplyAccumulator()
            self._sample_by(self._tries.sampling(first))

    def _sample_by(self, sampling: SamplingParams) -> None:
        """Set the parameters of the next try. The record keeps the harness's own."""
        if sampling != self._call.sampling:
            self._wished = self._call.sampling if self._wished is None else self._wished
            self._call = msgspec.structs.replace(self._call, sampling=sampling)

    async def _sample(self, capabilities: EngineCapabilities) -> EngineReply:
        asks_for_texts = self._parts.with_texts and self._call.num_top_logprobs is None
        call = msgspec.structs.replace(self._call, num_top_logprobs=0) if asks_for_texts else self._call
        request = msgspec.structs.replace(self._sent, call=call)
        stamps, progress, gathered = self._recorder.stamps, self._progress, self._gathered
        stamps.begin()
        if self._sent.evidence or not (self._call.stream and capabilities.streams_ids):
            answer = await self._parts.engine.chat(request)
            self._note_prompt(answer)
            if self._call.stream:
                for choice in answer.choices:
                    self._show(whole_delta(choice.index, choice.message, choice.token_logprobs))
            return answer
        async with aclosing(self._parts.engine.stream(request)) as pieces:
            async for piece in pieces:
                if piece.prompt_ids is None and gathered.prompt_ids is None:
                    raise _no_ids()  # before anything was shown
                gathered.feed(piece)
                stamps.saw(piece.shown.choice_index, len(piece.sampled_ids or ()))
                if progress.num_prompt_tokens is None and piece.prompt_ids is not None:
                    progress.num_prompt_tokens = len(piece.prompt_ids)
                if piece.sampled_ids or not piece.shown.shows_nothing:
                    self._show(piece.shown)
        return gathered.reply()

    def _note_prompt(self, answer: EngineReply) -> None:
        if answer.prompt_ids is not None:
            self._progress.num_prompt_tokens = len(answer.prompt_ids)
        elif answer.usage is not None:
            self._progress.num_prompt_tokens = answer.usage.num_prompt_tokens

    def _show(self, delta: ReplyDelta) -> None:
        if delta.logprobs and self._call.num_top_logprobs is None:  # only the record asked for them
            delta = msgspec.structs.replace(delta, logprobs=())
        if delta.tool_calls:
            pieces = tuple(self._own_call_id(delta.choice_index, piece) for piece in delta.tool_calls)
            delta = msgspec.structs.replace(delta, tool_calls=pieces)
        self._tries.show(delta)

    def _own_call_id(self, choice_index: int, piece: ToolCallDelta) -> ToolCallDelta:
        if piece.name is None:
            return piece
        call_id = tool_call_id(self._progress.record_key, choice_index, piece.index)
        return msgspec.structs.replace(piece, call_id=call_id)

    def _checked(self, answer: EngineReply, capabilities: EngineCapabilities) -> EngineReply:
        """Raises: EngineIncapable, EngineMalformed when no record can be made of the answer."""
        if len(answer.choices) != self._call.num_choices:
            raise EngineMalformed(f"the engine answered {len(answer.choices)} of {self._call.num_choices} choices")
        if any(choice.finish_reason is None for choice in answer.choices):
            raise EngineMalformed("the engine ended its reply without a finish reason")
        # The operator accepted an engine that never reports ids for its text alone.
        has_ids = answer.prompt_ids is not None and all(choice.sampled_ids is not None for choice in answer.choices)
        if capabilities.reports_ids and not has_ids:
            raise _no_ids()
        self._parts.check_evidence(answer, self._sent.evidence)
        return answer

    # -- the answer ----------------------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, Any]:
        """Returns the reply's id, and the harness's requests that were changed."""
        requested = self._call.sampling if self._wished is None else self._wished
        asked = request_fields(msgspec.structs.replace(self._call, sampling=requested))
        metadata: dict[str, Any] = {"reply_id": self._progress.record_key, REQUEST: asked}
        if self._checkpoint is not None:
            metadata[CHECKPOINT] = self._checkpoint
        if self._call.leads_with_instructions:
            metadata[INSTRUCTIONS] = True
        if self._retry_key is not None and self._call.num_top_logprobs is None:
            metadata[RETRY_KEY] = self._retry_key
        if self._progress.num_replays:
            metadata["num_replays"] = self._progress.num_replays
        if self._call.agent_id is not None:
            metadata["agent_id"] = self._call.agent_id
        if self._call.agent_role is not None:
            metadata["agent_role"] = self._call.agent_role
        if self._call.of_environment:
            metadata[OF_ENVIRONMENT] = True
        if self._volatile:
            metadata["volatile_system_text"] = self._volatile
        if self._wished is not None:
            metadata["sampling_wished"] = msgspec.to_builtins(self._wished)
        if self._call.template_kwargs:
            metadata["template_kwargs"] = self._call.template_kwargs
        if self._call.template_wished:
            metadata["template_kwargs_wished"] = self._call.template_wished
        return metadata

    def _reply(self, choices: list[EngineChoice], answer: EngineReply) -> Reply:
        num_prompt = 0 if answer.prompt_ids is None else len(answer.prompt_ids)
        num_sampled = sum(0 if choice.sampled_ids is None else len(choice.sampled_ids) for choice in choices)
        return Reply(
            reply_id=self._progress.record_key,
            model=self._call.model,
            created_at=int(self._progress.created_at),
            choices=tuple(
                ReplyChoice(
                    index=choice.index,
                    message=choice.message,
                    finish_reason=choice.finish_reason or "",
                    stop_reason=choice.stop_reason,
                    logprobs=None if self._call.num_top_logprobs is None else choice.token_logprobs,
                    sampled_ids=_listed(choice.sampled_ids) if self._call.wants_token_ids else None,
                    parse=parse_status(self._call, choice),
                )
                for choice in choices
            ),
            prompt_ids=_listed(answer.prompt_ids) if self._call.wants_token_ids else None,
            usage=answer.usage or Usage(num_prompt_tokens=num_prompt, num_sampled_tokens=num_sampled),
        )


def _listed(ids: Iterable[int] | None) -> list[int] | None:
    return None if ids is None else list(map(int, ids))


def shown_again(reply: Reply) -> list[ReplyDelta]:
    """Returns the deltas that replay a reply."""
    return [whole_delta(choice.index, choice.message, choice.logprobs or ()) for choice in reply.choices]


def _no_ids() -> EngineIncapable:
    return EngineIncapable(
        "the engine returned no token ids for this call. Reach it without a router that strips `token_ids` and "
        "`prompt_token_ids`."
    )
