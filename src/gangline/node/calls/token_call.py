"""A call in tokens: prompt ids in, sampled ids and log-probs out, recorded together with the session's other calls.

For callers that render their own prompts, such as verl's agent loops. The engine's chat route gets exact prompt ids and
a placeholder conversation that it must ignore. A reply to any other prompt is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import TypeAlias

import msgspec
import numpy as np

from gangline.domain.completion import Completion, CompletionTree, Lineage, VersionSpan
from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text
from gangline.domain.errors import EngineIncapable, EngineMalformed
from gangline.domain.evidence.contract import AskedEvidence
from gangline.domain.tokens import Logprobs, TokenIds, logprobs, token_ids
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineReply,
    EngineRequest,
    ReplyAccumulator,
)
from gangline.node.calls.flight import Flight, Progress
from gangline.node.capture.capture import Prompt
from gangline.node.capture.parts import CallParts
from gangline.node.capture.placing import Place, history_of_key
from gangline.node.capture.recorder import Recorder, Sampled

_STAND_IN = (Message("user", (Text("x"),)),)
_DIALECT = "tokens"


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: TokenIds
    sampling: SamplingParams = SamplingParams()
    stream: bool = False


class TokenPiece(msgspec.Struct, frozen=True):
    """The new tokens of a stream."""

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


TokenCall: TypeAlias = Flight[TokenReply, TokenPiece]


def token_call(request: TokenRequest, parts: CallParts, *, requested: SamplingParams | None = None) -> TokenCall:
    """`requested`: the agent's own parameters, if a seed or a sampling policy changed them."""
    progress = Progress[TokenPiece](parts.clock())
    return Flight(_TokenSampler(request, parts, progress, requested), progress, parts, _replay)


class _TokenSampler:
    """See `Sampler`."""

    def __init__(
        self, request: TokenRequest, parts: CallParts, progress: Progress[TokenPiece], requested: SamplingParams | None
    ) -> None:
        self.is_committing = False
        self._request = request
        self._parts = parts
        self._progress = progress
        self._wished = requested
        self._recorder = Recorder(parts, progress.record_key, progress.created_at)
        self._gathered = ReplyAccumulator()
        self._capabilities: EngineCapabilities | None = None
        """Set once the engine is asked to sample."""

    async def answer(self) -> TokenReply:
        capabilities = await self._parts.engine.capabilities()
        self._capabilities = capabilities
        if not capabilities.takes_prompt_ids:
            raise EngineIncapable(
                f"the engine ({capabilities.engine} {capabilities.version}) takes no exact prompt ids on its chat "
                "route, so calls in tokens cannot be answered."
            )
        parent_id = self._parent_id() if self._parts.keeps_context else None
        asked = self._parts.asks(capabilities, self._request.sampling, parent_id, self._request.prompt_ids)
        answer = self._checked(await self._sample(capabilities, asked))
        self._parts.check_evidence(answer, asked)
        self.is_committing = True
        (completion,) = await self._recorder.commit(self._sampled(answer.choices, capabilities))
        return TokenReply(
            completion_id=completion.completion_id,
            prompt_ids=self._request.prompt_ids,
            output_ids=completion.sampled_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.certificate.finish_reason,
            version_spans=completion.certificate.version_spans,
            text="".join(part.text for part in completion.response.parts if isinstance(part, Text)),
        )

    def _parent_id(self) -> str | None:
        parent = _parent_of(self._parts.ledger.tree, self._request.prompt_ids, self._parts.engine_role)
        return None if parent is None else parent.completion_id

    async def record_aborted(self, message: str) -> None:
        if self._capabilities is None:
            return  # the engine was asked for nothing yet
        partial = self._gathered.reply().choices[:1]
        await self._recorder.commit_aborted(self._sampled(partial, self._capabilities), message)

    def _call(self, capabilities: EngineCapabilities) -> ModelCall:
        """The call as recorded: no messages. The engine is sent a placeholder, which it ignores."""
        request = self._request
        return ModelCall(
            dialect=_DIALECT,
            model=capabilities.model,
            messages=(),
            sampling=request.sampling,
            stream=request.stream,
        )

    async def _sample(self, capabilities: EngineCapabilities, asked: tuple[AskedEvidence, ...]) -> EngineReply:
        call = msgspec.structs.replace(
            self._call(capabilities), messages=_STAND_IN, num_top_logprobs=0 if self._parts.with_texts else None
        )
        request = EngineRequest(call=call, prompt_ids=self._request.prompt_ids, evidence=asked)
        stamps = self._recorder.stamps
        stamps.begin()
        if asked or not (self._request.stream and capabilities.streams_ids):
            answer = await self._parts.engine.chat(request)
            for choice in answer.choices[:1]:
                self._show(choice.sampled_ids, choice.logprobs)
            return answer
        async with aclosing(self._parts.engine.stream(request)) as deltas:
            async for delta in deltas:
                self._gathered.feed(delta)
                stamps.saw(delta.shown.choice_index, len(delta.sampled_ids or ()))
                if delta.sampled_ids:
                    self._show(token_ids(delta.sampled_ids), logprobs(delta.logprobs or ()))
        return self._gathered.reply()

    def _show(self, ids: TokenIds | None, values: Logprobs | None) -> None:
        piece = TokenPiece(token_ids() if ids is None else ids, logprobs() if values is None else values)
        self._progress.show(piece)

    def _checked(self, answer: EngineReply) -> EngineReply:
        """Raises: EngineIncapable, EngineMalformed when no record can be made of the answer."""
        if len(answer.choices) != 1 or answer.choices[0].finish_reason is None:
            raise EngineMalformed("the engine ended its reply without a finish reason")
        if answer.prompt_ids is None or answer.choices[0].sampled_ids is None:
            raise EngineIncapable("the engine returned no token ids for this call.")
        if not np.array_equal(answer.prompt_ids, self._request.prompt_ids):
            raise EngineIncapable("the engine ignored the exact prompt ids and answered another prompt.")
        return answer

    def _sampled(self, choices: Sequence[EngineChoice], capabilities: EngineCapabilities) -> Sampled:
        """Returns the record's content, placed by ids alone."""
        tree, prompt_ids = self._parts.ledger.tree, self._request.prompt_ids
        parent = _parent_of(tree, prompt_ids, self._parts.engine_role)
        shared = 0 if parent is None else tree.num_context_ids(parent.completion_id)
        prompt = Prompt(
            source="rendered",
            context="first" if parent is None else "exact",
            parent_id=None if parent is None else parent.completion_id,
            shared=shared,
            suffix_ids=prompt_ids[shared:].copy(),
        )
        metadata = {} if self._wished is None else {"sampling_wished": msgspec.to_builtins(self._wished)}
        call, place = self._call(capabilities), _place(parent, capabilities)
        return Sampled(call, place, prompt, self._recorder.own(choices), capabilities, metadata)


def _replay(reply: TokenReply) -> list[TokenPiece]:
    return [TokenPiece(reply.output_ids, reply.logprobs)]


def _place(parent: Completion | None, capabilities: EngineCapabilities) -> Place:
    if parent is None:
        branch_key = f"{_DIALECT}:{capabilities.model}"
        return Place(branch_key, None, 0, (), history_of_key(branch_key))
    lineage = Lineage(relation="continuation", origin_id=parent.completion_id)
    return Place(parent.branch_key, parent.completion_id, 0, (), history_of_key(parent.branch_key), lineage)


def _parent_of(tree: CompletionTree, prompt_ids: TokenIds, engine_role: str | None) -> Completion | None:
    """Returns the completion with the longest context that is a prefix of the prompt, the latest if equal. Only from
    the same engines, since equal ids mean different text for two models."""
    candidates = [
        (tree.num_context_ids(completion.completion_id), number, completion)
        for number, completion in enumerate(tree)
        if completion.status == "complete"
        and completion.certificate.engine_role == engine_role
        and tree.num_context_ids(completion.completion_id) <= len(prompt_ids)
    ]
    for length, _, completion in sorted(candidates, key=lambda candidate: candidate[:2], reverse=True):
        if np.array_equal(tree.context_ids(completion), prompt_ids[:length]):
            return completion
    return None
