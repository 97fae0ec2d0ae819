"""A call in tokens: prompt ids in, sampled ids and log-probs out, recorded beside the session's other calls.

For callers that render their own prompts (verl's agent loops, for one). The engine is asked through its chat route with
exact prompt ids, under a stand-in conversation that it must ignore; a reply to any other prompt is refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
import numpy as np

from gangline.domain.completion import Completion, CompletionTree, Lineage, VersionSpan
from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text
from gangline.domain.errors import EngineIncapable, EngineMalformed, GanglineError, SessionOver
from gangline.domain.tokens import Logprobs, TokenIds, logprobs, token_ids
from gangline.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineReply,
    EngineRequest,
    ReplyAccumulator,
    assistant_message,
)
from gangline.gateway.calls.parts import CallParts
from gangline.gateway.truth.capture import Prompt, completion_of, with_own_call_ids
from gangline.gateway.truth.placing import Place, history_of_key
from gangline.gateway.truth.versions import VersionStamps

__all__ = ["TokenCall", "TokenPiece", "TokenReply", "TokenRequest"]

_log = logging.getLogger("gangline.calls")

_STAND_IN = (Message("user", (Text("x"),)),)
_DIALECT = "tokens"


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: TokenIds
    sampling: SamplingParams = SamplingParams()
    stream: bool = False


class TokenPiece(msgspec.Struct, frozen=True):
    """What a stream adds."""

    output_ids: TokenIds
    logprobs: Logprobs
    """[len(output_ids)]"""


class TokenReply(msgspec.Struct, frozen=True, kw_only=True):
    completion_id: str
    prompt_ids: TokenIds
    output_ids: TokenIds
    """[T], end of turn included."""
    logprobs: Logprobs
    """[T]"""
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]
    text: str


class TokenCall:
    """One admitted call. `start` it; then read `pieces()`, or wait for `reply()`, or `abort` it."""

    def __init__(
        self,
        request: TokenRequest,
        parts: CallParts,
        *,
        wished: SamplingParams | None = None,
    ) -> None:
        """`wished`: the agent's own parameters, where a seed or a sampling policy changed them."""
        self.request = request
        self._wished = wished
        self._parts = parts
        self._stamps = VersionStamps(parts.gate)
        self._started_at = parts.clock()
        self._record_key = secrets.token_hex(8)
        self._gathered = ReplyAccumulator()
        self._capabilities: EngineCapabilities | None = None
        self._pieces: asyncio.Queue[TokenPiece | None] = asyncio.Queue()
        self._abort_message: str | None = None
        self._committing = False
        self._task: asyncio.Task[TokenReply] | None = None

    def start(self, on_end: Callable[[TokenCall], None]) -> None:
        """`on_end` is called once, when the call has ended in any way."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._pieces.put_nowait(None))
        self._task.add_done_callback(lambda _: on_end(self))

    @property
    def error(self) -> BaseException | None:
        """What ended the call early; None while it runs, when it was answered and when it was aborted."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    @property
    def answered(self) -> bool:
        return self._task is not None and self._task.done() and not self._task.cancelled() and self.error is None

    def abort(self, message: str) -> None:
        """End the call: cancelled in the engine, kept as an aborted record. One that is wholly sampled is committed."""
        if self._abort_message is None and not self._committing and self._task is not None:
            self._abort_message = message
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until the call has ended in any way. Raises nothing of the call's."""
        assert self._task is not None
        await asyncio.wait({self._task})

    async def reply(self) -> TokenReply:
        """The whole reply, recorded. Raises: EngineError, StoreError; SessionOver when the call was aborted."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise SessionOver(self._abort_message or "the node is stopping")
        return self._task.result()

    async def pieces(self) -> AsyncGenerator[TokenPiece, None]:
        """Tokens as they come; ends with the call, however that ends."""
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def _run(self) -> TokenReply:
        try:
            async with self._parts.gate.pass_through(self._parts.meter):
                return await self._sample_and_commit()
        except asyncio.CancelledError:
            if self._abort_message is None:
                raise
            await self._record_aborted(self._abort_message)
            raise SessionOver(self._abort_message) from None

    async def _sample_and_commit(self) -> TokenReply:
        self._capabilities = capabilities = await self._parts.engine.capabilities()
        if not capabilities.takes_prompt_ids:
            raise EngineIncapable(
                f"the engine ({capabilities.engine} {capabilities.version}) takes no exact prompt ids on its chat "
                "route, so calls in tokens cannot be answered."
            )
        choice = self._checked(await self._sample())
        self._committing = True
        return await self._commit(choice, capabilities)

    def _model_call(self) -> ModelCall:
        """As the record has it: no messages. The engine is sent a stand-in, which it ignores."""
        model = self._capabilities.model if self._capabilities is not None else ""
        request = self.request
        return ModelCall(dialect=_DIALECT, model=model, messages=(), sampling=request.sampling, stream=request.stream)

    async def _sample(self) -> EngineReply:
        call = msgspec.structs.replace(
            self._model_call(), messages=_STAND_IN, num_top_logprobs=0 if self._parts.with_texts else None
        )
        request = EngineRequest(call=call, prompt_ids=self.request.prompt_ids)
        assert self._capabilities is not None
        self._stamps.begin()
        if not (self.request.stream and self._capabilities.streams_ids):
            answer = await self._parts.engine.chat(request)
            for choice in answer.choices[:1]:
                self._show(choice.sampled_ids, choice.logprobs)
            return answer
        async with aclosing(self._parts.engine.stream(request)) as deltas:
            async for delta in deltas:
                self._gathered.feed(delta)
                self._stamps.saw(delta.shown.choice_index, len(delta.sampled_ids or ()))
                if delta.sampled_ids:
                    self._show(token_ids(delta.sampled_ids), logprobs(delta.logprobs or ()))
        return self._gathered.reply()

    def _show(self, ids: TokenIds | None, values: Logprobs | None) -> None:
        self._pieces.put_nowait(
            TokenPiece(token_ids() if ids is None else ids, logprobs() if values is None else values)
        )

    def _checked(self, answer: EngineReply) -> EngineChoice:
        """Raises: EngineIncapable, EngineMalformed when no record can be made of the answer."""
        if len(answer.choices) != 1 or answer.choices[0].finish_reason is None:
            raise EngineMalformed("the engine ended its reply without a finish reason")
        if answer.prompt_ids is None or answer.choices[0].sampled_ids is None:
            raise EngineIncapable("the engine returned no token ids for this call.")
        if not np.array_equal(answer.prompt_ids, self.request.prompt_ids):
            raise EngineIncapable("the engine ignored the exact prompt ids and answered another prompt.")
        return answer.choices[0]

    # -- capture -------------------------------------------------------------------------------------------------

    async def _commit(self, choice: EngineChoice, capabilities: EngineCapabilities) -> TokenReply:
        draft = self._draft(choice, capabilities)
        (completion,) = await self._parts.ledger.commit([draft], history_of_key(draft.branch_key))
        return TokenReply(
            completion_id=completion.completion_id,
            prompt_ids=self.request.prompt_ids,
            output_ids=completion.sampled_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.certificate.finish_reason,
            version_spans=completion.certificate.version_spans,
            text="".join(part.text for part in completion.response.parts if isinstance(part, Text)),
        )

    def _draft(
        self, choice: EngineChoice, capabilities: EngineCapabilities, *, aborted: str | None = None
    ) -> Completion:
        parent = _parent_of(self._parts.ledger.tree, self.request.prompt_ids)
        shared = 0 if parent is None else self._parts.ledger.tree.num_context_ids(parent.completion_id)
        branch_key = f"{_DIALECT}:{capabilities.model}" if parent is None else parent.branch_key
        message = with_own_call_ids(choice.message, self._record_key, choice.index)
        return completion_of(
            self._model_call(),
            self._place(branch_key, parent),
            Prompt(
                source="rendered",
                context="first" if parent is None else "exact",
                parent_id=None if parent is None else parent.completion_id,
                shared=shared,
                suffix_ids=self.request.prompt_ids[shared:].copy(),
            ),
            msgspec.structs.replace(choice, message=message, version_spans=self._stamps.spans(choice)),
            capabilities,
            session_id=self._parts.ledger.session_id,
            attempt=self._parts.ledger.attempt,
            started_at=self._started_at,
            finished_at=self._parts.clock(),
            aborted=aborted,
            metadata={} if self._wished is None else {"sampling_wished": msgspec.to_builtins(self._wished)},
            with_texts=self._parts.with_texts,
        )

    @staticmethod
    def _place(branch_key: str, parent: Completion | None) -> Place:
        """Told by ids alone."""
        if parent is None:
            return Place(branch_key, None, 0, (), history_of_key(branch_key))
        lineage = Lineage(relation="continuation", origin_id=parent.completion_id)
        return Place(branch_key, parent.completion_id, 0, (), history_of_key(branch_key), lineage)

    async def _record_aborted(self, message: str) -> None:
        if self._capabilities is None:
            return  # the engine was asked for nothing yet
        partial = self._gathered.reply().choices or (_nothing_sampled(),)
        draft = self._draft(partial[0], self._capabilities, aborted=message)
        try:
            await self._parts.ledger.commit([draft], history_of_key(draft.branch_key))
        except GanglineError as error:  # its loss must not hide why the call ended
            _log.error("call.abort_not_recorded session=%s error=%s", self._parts.ledger.session_id, error)


def _parent_of(tree: CompletionTree, prompt_ids: TokenIds) -> Completion | None:
    """The completion with the longest context that the prompt begins with, the latest of equals."""
    candidates = [
        (tree.num_context_ids(completion.completion_id), number, completion)
        for number, completion in enumerate(tree)
        if completion.status == "complete" and tree.num_context_ids(completion.completion_id) <= len(prompt_ids)
    ]
    for length, _, completion in sorted(candidates, key=lambda candidate: candidate[:2], reverse=True):
        if np.array_equal(tree.context_ids(completion), prompt_ids[:length]):
            return completion
    return None


def _nothing_sampled() -> EngineChoice:
    return EngineChoice(
        index=0, message=assistant_message("", ""), finish_reason=None, sampled_ids=token_ids(), logprobs=None
    )
