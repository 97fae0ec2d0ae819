"""`/v1/completions`: text or ids in, text and ids out, without template or parsing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing

from aiohttp import web
from msgspec import UNSET, UnsetType

from gangline.machine.event_loop import call_all
from gangline.models.engine_server.generation import (
    exact_prompt_ids,
    generate,
    plan,
    text_rules,
    token_logprobs,
    weight_spans,
)
from gangline.models.engine_server.sampler import SampledToken, Sampler, Scorer
from gangline.models.engine_server.sse import EventStream
from gangline.models.engine_server.wire import (
    ApiError,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
    Usage,
    encode,
)


class CompletionRoute:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def answer(self, request: web.Request, completion: CompletionRequest) -> web.StreamResponse:
        call = _CompletionCall(self._sampler, completion)
        if completion.stream and completion.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs come with whole replies: leave out stream.", param="prompt_logprobs")
        if completion.stream:
            return await call.stream(request)
        return web.Response(body=encode(await call.whole()), content_type="application/json")


class _CompletionCall:
    def __init__(self, sampler: Sampler, completion: CompletionRequest) -> None:
        self._sampler = sampler
        self._completion = completion
        self._prompt_ids = exact_prompt_ids(completion) or self._encode(completion.prompt)
        self._request = plan(
            sampler,
            completion,
            self._prompt_ids,
            max_tokens=completion.max_tokens,
            num_top_logprobs=completion.logprobs or 0,
        )
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_choices = completion.n or 1

    async def whole(self) -> CompletionReply:
        scored = await self._prompt_logprobs()
        calls = await call_all([self._choice(index, None) for index in range(self._num_choices)])
        for choice, _ in calls:
            choice.prompt_logprobs = scored
        reply = self._reply([choice for choice, _ in calls])
        reply.usage = self._usage(sum(num_tokens for _, num_tokens in calls))
        return reply

    async def _prompt_logprobs(self) -> list[dict[str, dict[str, float]] | None] | UnsetType:
        """As in vLLM: for each id, a map of only that id; None for the first."""
        if self._completion.prompt_logprobs is None:
            return UNSET
        if not isinstance(self._sampler, Scorer):
            raise ApiError("This engine has no weights, and scores no prompt.", param="prompt_logprobs")
        ids = self._prompt_ids
        scores = await self._sampler.score(ids)
        return [None, *({str(one): {"logprob": score}} for one, score in zip(ids[1:], scores, strict=True))]

    async def stream(self, request: web.Request) -> web.StreamResponse:
        async with EventStream(request) as events:
            calls = await call_all([self._choice(index, events) for index in range(self._num_choices)])
            options = self._completion.stream_options
            if options and options.include_usage:
                usage_chunk = self._reply([])
                usage_chunk.usage = self._usage(sum(num_tokens for _, num_tokens in calls))
                await events.send(usage_chunk)
        return events.response

    async def _choice(self, index: int, events: EventStream | None) -> tuple[CompletionChoice, int]:
        """Returns the whole choice and its number of tokens. Sends each piece to `events` as it is sampled."""
        whole = self._part(index, "", ())
        tokens: list[SampledToken] = []
        async with aclosing(generate(self._sampler, self._request, text_rules(self._completion), index)) as pieces:
            async for piece in pieces:
                part = self._part(index, piece.text, piece.tokens, text_offset=len(whole.text))
                part.finish_reason, part.stop_reason = piece.finish_reason, piece.stop_reason
                if not tokens and self._completion.return_token_ids:
                    part.prompt_token_ids = self._prompt_ids
                tokens.extend(piece.tokens)
                if piece.finish_reason and self._completion.return_weight_versions:
                    part.weight_versions = weight_spans(tokens)
                if events is not None:
                    await events.send(self._reply([part]))
                _append(whole, part)
        return whole, len(tokens)

    def _part(self, index: int, text: str, tokens: Sequence[SampledToken], *, text_offset: int = 0) -> CompletionChoice:
        wants_ids = self._completion.return_token_ids
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(tokens, text_offset),
            finish_reason=None,
            stop_reason=None,
            token_ids=[token.token_id for token in tokens] if wants_ids else UNSET,
        )

    def _logprobs(self, tokens: Sequence[SampledToken], text_offset: int) -> CompletionLogprobs | None:
        if self._completion.logprobs is None:
            return None
        as_ids = bool(self._completion.return_tokens_as_token_ids)
        entries = token_logprobs(self._sampler, tokens, as_ids=as_ids)
        return CompletionLogprobs(
            tokens=[entry.token for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[{top.token: top.logprob for top in entry.top_logprobs} for entry in entries],
            text_offset=[text_offset] * len(entries),
        )

    def _encode(self, prompt: str | list[int]) -> list[int]:
        return self._sampler.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _reply(self, choices: list[CompletionChoice]) -> CompletionReply:
        return CompletionReply(id=self._id, created=self._created, model=self._sampler.model_name, choices=choices)

    def _usage(self, num_sampled: int) -> Usage:
        num_prompt = len(self._prompt_ids)
        return Usage(num_prompt, num_sampled, num_prompt + num_sampled)


def _append(whole: CompletionChoice, part: CompletionChoice) -> None:
    whole.text += part.text
    whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
    if part.prompt_token_ids is not UNSET:
        whole.prompt_token_ids = part.prompt_token_ids
    whole.weight_versions = part.weight_versions
    if isinstance(whole.token_ids, list) and isinstance(part.token_ids, list):
        whole.token_ids += part.token_ids
    if whole.logprobs is not None and part.logprobs is not None:
        whole.logprobs.tokens += part.logprobs.tokens
        whole.logprobs.token_logprobs += part.logprobs.token_logprobs
        whole.logprobs.top_logprobs += part.logprobs.top_logprobs
        whole.logprobs.text_offset += part.logprobs.text_offset
