"""`/inference/v1/generate`: ids in, ids and log-probs out, without template, text or parsing."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web

from gangline.machine.event_loop import call_all
from gangline.models.engine_server.generation import Piece, generate, plan, text_rules, weight_spans
from gangline.models.engine_server.sampler import SampledToken, Sampler
from gangline.models.engine_server.sse import EventStream
from gangline.models.engine_server.wire import (
    ApiError,
    GenerateChoice,
    GenerateReply,
    GenerateRequest,
    IdLogprob,
    IdLogprobs,
    TopIdLogprob,
    Usage,
    encode,
)


class GenerateRoute:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def answer(self, request: web.Request, asked: GenerateRequest) -> web.StreamResponse:
        call = _GenerateCall(self._sampler, asked)
        if asked.stream:
            return await call.stream(request)
        return web.Response(body=encode(await call.whole()), content_type="application/json")


class _GenerateCall:
    def __init__(self, sampler: Sampler, asked: GenerateRequest) -> None:
        if any(token_id < 0 for token_id in asked.token_ids):
            raise ApiError("token_ids must not contain negative values.", param="token_ids")
        fields = asked.sampling_params
        fields.model = asked.model
        self._sampler = sampler
        self._asked = asked
        request = plan(
            sampler, fields, asked.token_ids, max_tokens=fields.max_tokens, num_top_logprobs=fields.logprobs or 0
        )
        self._request = msgspec.structs.replace(request, with_mask=sampler.returns_masks)
        self._id = uuid.uuid4().hex
        self._num_choices = fields.n or 1

    async def whole(self) -> GenerateReply:
        choices = await call_all([self._choice(index, None) for index in range(self._num_choices)])
        reply = self._reply(choices)
        reply.usage = self._usage(sum(len(choice.token_ids) for choice in choices))
        self._repeat_prompt(reply)
        return reply

    async def stream(self, request: web.Request) -> web.StreamResponse:
        async with EventStream(request) as events:
            choices = await call_all([self._choice(index, events) for index in range(self._num_choices)])
            if self._asked.stream_options and self._asked.stream_options.include_usage:
                usage_chunk = self._reply([])
                usage_chunk.usage = self._usage(sum(len(choice.token_ids) for choice in choices))
                await events.send(usage_chunk)
        return events.response

    async def _choice(self, index: int, events: EventStream | None) -> GenerateChoice:
        """Returns the whole choice. Sends each piece to `events` as it is sampled."""
        pieces: list[Piece] = []
        rules = text_rules(self._asked.sampling_params)
        async with aclosing(generate(self._sampler, self._request, rules, index)) as sampled:
            async for piece in sampled:
                pieces.append(piece)
                if events is not None:
                    chunk = self._reply([self._part(index, [piece], pieces)])
                    if len(pieces) == 1:
                        self._repeat_prompt(chunk)
                    await events.send(chunk)
        return self._part(index, pieces, pieces)

    def _part(self, index: int, pieces: Sequence[Piece], so_far: Sequence[Piece]) -> GenerateChoice:
        last = pieces[-1]
        tokens = [token for piece in pieces for token in piece.tokens]
        all_tokens = [token for piece in so_far for token in piece.tokens] if last.finish_reason else []
        return GenerateChoice(
            index=index,
            token_ids=[token.token_id for token in tokens],
            logprobs=None if self._asked.sampling_params.logprobs is None else IdLogprobs(_logprobs(tokens)),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            weight_versions=weight_spans(all_tokens) or None,
            kept_ids=_kept_ids(tokens),
        )

    def _repeat_prompt(self, reply: GenerateReply) -> None:
        if self._asked.return_token_ids:
            reply.prompt_token_ids = self._asked.token_ids

    def _reply(self, choices: list[GenerateChoice]) -> GenerateReply:
        return GenerateReply(request_id=self._id, choices=choices)

    def _usage(self, num_sampled: int) -> Usage:
        num_prompt = len(self._asked.token_ids)
        return Usage(num_prompt, num_sampled, num_prompt + num_sampled)


def _kept_ids(tokens: Sequence[SampledToken]) -> list[list[int]] | None:
    """The kept ids of each token; None if no token has any. Either all tokens of a request have them, or no token
    does."""
    kept = [list(token.kept_ids) for token in tokens if token.kept_ids is not None]
    return kept or None


def _logprobs(tokens: Sequence[SampledToken]) -> list[IdLogprob]:
    return [
        IdLogprob(
            token_id=token.token_id,
            logprob=token.logprob,
            top_logprobs=[TopIdLogprob(token_id, logprob) for token_id, logprob in token.top_logprobs],
        )
        for token in tokens
    ]
