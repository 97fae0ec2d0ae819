"""One choice of a reply: request fields -> `SampleRequest`, sampled tokens -> pieces of text with their tokens.

Invariants: every sampled token is in exactly one piece, in order, regardless of stop strings; the sampler's iterator is
closed when the consumer leaves, so an abandoned sequence leaves the running batch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from gangline.models.engine_server.sampler import FinishReason, SampledToken, Sampler, SampleRequest, version_text
from gangline.models.engine_server.wire import ApiError, SamplingFields, TokenLogprob, TopLogprob, WeightSpan
from gangline.models.language.text import IncrementalText, StopStrings

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

ResultT = TypeVar("ResultT")


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for turning sampled ids into reply text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    reported_stop_ids: frozenset[int] = frozenset()
    """The request's own stop ids, which are reported as `stop_reason`; the model's end of turn is not."""


class Piece(msgspec.Struct, frozen=True):
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def plan(
    sampler: Sampler,
    fields: SamplingFields,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int | None,
    num_top_logprobs: int = 0,
) -> SampleRequest:
    """Check the sampling fields and fill in their defaults.

    Raises: ApiError: 400, naming the field, 404 for a model that is not served, or `context_length_exceeded`.
    """
    if fields.model is not None and fields.model != sampler.model_name:
        message = f"The model `{fields.model}` does not exist; this engine serves `{sampler.model_name}`."
        raise ApiError(message, status=404, type="NotFoundError", param="model")
    _check(fields, num_top_logprobs)
    own_stops = frozenset[int]() if fields.ignore_eos else sampler.tokenizer.eos_ids
    return SampleRequest(
        prompt_ids=prompt_ids,
        max_tokens=_budget(sampler.context_length, len(prompt_ids), max_tokens),
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        seed=fields.seed,
        stop_ids=own_stops | frozenset(fields.stop_token_ids or ()),
        min_tokens=fields.min_tokens or 0,
        num_top_logprobs=num_top_logprobs,
        session_id=fields.session_id,
    )


def text_rules(fields: SamplingFields) -> TextRules:
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return TextRules(
        stops=tuple(stops),
        include_stop=fields.include_stop_str_in_output,
        skip_special=fields.skip_special_tokens,
        reported_stop_ids=frozenset(fields.stop_token_ids or ()),
    )


def exact_prompt_ids(fields: SamplingFields) -> list[int] | None:
    """The ids in `kv_transfer_params.prompt_token_ids`, if the request has them."""
    ids: object = (fields.kv_transfer_params or {}).get("prompt_token_ids")
    if ids is None:
        return None
    try:
        exact = msgspec.convert(ids, list[int])
    except msgspec.ValidationError as error:
        raise ApiError(str(error), param="kv_transfer_params.prompt_token_ids") from None
    if not exact or min(exact) < 0:
        message = "prompt_token_ids must be a list of token ids that is not empty."
        raise ApiError(message, param="kv_transfer_params.prompt_token_ids")
    return exact


async def generate(
    sampler: Sampler, request: SampleRequest, rules: TextRules, choice_index: int
) -> AsyncGenerator[Piece, None]:
    """Pieces of one choice. Only the last one has a `finish_reason`."""
    # Choices of one request must differ, but be reproducible.
    seed = None if request.seed is None else request.seed + choice_index
    request = msgspec.structs.replace(request, choice_index=choice_index, seed=seed)
    choice = _Choice(sampler, request, rules)
    async with aclosing(sampler.sample(request)) as tokens:
        async for token in tokens:
            piece = choice.feed(token)
            yield piece
            if piece.finish_reason is not None:
                return
    yield choice.abort()


class _Choice:
    def __init__(self, sampler: Sampler, request: SampleRequest, rules: TextRules) -> None:
        self._text = IncrementalText(sampler.tokenizer, skip_special=rules.skip_special)
        self._stops = StopStrings(rules.stops, include=rules.include_stop)
        self._rules = rules
        self._min_tokens = request.min_tokens
        self._num_tokens = 0

    def feed(self, token: SampledToken) -> Piece:
        self._num_tokens += 1
        is_stop_token = token.finish_reason == "stop"
        delta = "" if is_stop_token and not self._rules.include_stop else self._text.feed(token.token_id)
        if token.finish_reason is not None:
            delta += self._text.flush()
        text, stop = (delta, None) if self._num_tokens <= self._min_tokens else self._stops.feed(delta)
        if stop is not None:
            return Piece(text, (token,), "stop", stop)
        if token.finish_reason is not None:
            text += self._stops.flush()
        named = is_stop_token and token.token_id in self._rules.reported_stop_ids
        return Piece(text, (token,), token.finish_reason, token.token_id if named else None)

    def abort(self) -> Piece:
        text, stop = self._stops.feed(self._text.flush())
        return Piece(text if stop else text + self._stops.flush(), (), "abort")


def token_logprobs(sampler: Sampler, tokens: Sequence[SampledToken], *, as_ids: bool = False) -> list[TokenLogprob]:
    """One entry per token, in order: [T]."""

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else sampler.tokenizer.decode([token_id])

    return [
        TokenLogprob(
            token=(text := name(token.token_id)),
            logprob=token.logprob,
            bytes=list(text.encode()),
            top_logprobs=[
                TopLogprob(token=(other := name(token_id)), logprob=logprob, bytes=list(other.encode()))
                for token_id, logprob in token.top_logprobs
            ],
        )
        for token in tokens
    ]


def weight_spans(tokens: Sequence[SampledToken]) -> list[WeightSpan]:
    """Runs of tokens sampled with the same weight version."""
    spans: list[WeightSpan] = []
    for position, token in enumerate(tokens):
        version = version_text(token.version)
        if spans and spans[-1].version == version:
            spans[-1].end = position + 1
        else:
            spans.append(WeightSpan(version, position, position + 1))
    return spans


def _check(fields: SamplingFields, num_top_logprobs: int) -> None:
    rules: list[tuple[str, float | None, float, float]] = [
        ("n", fields.n, 1, MAX_CHOICES),
        ("temperature", fields.temperature, 0, float("inf")),
        ("presence_penalty", fields.presence_penalty, -2, 2),
        ("frequency_penalty", fields.frequency_penalty, -2, 2),
        ("top_k", fields.top_k, -1, float("inf")),
        ("min_tokens", fields.min_tokens, 0, float("inf")),
        ("top_logprobs", num_top_logprobs, 0, MAX_TOP_LOGPROBS),
    ]
    for name, value, low, high in rules:
        if value is not None and not low <= value <= high:
            limit = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
            raise ApiError(f"{name} must be {limit}, got {value:g}.", param=name)
    if fields.top_p is not None and not 0 < fields.top_p <= 1:
        raise ApiError(f"top_p must be in (0, 1], got {fields.top_p:g}.", param="top_p")


def _budget(context_length: int, num_prompt: int, max_tokens: int | None) -> int:
    """Number of tokens that may be sampled; without a limit in the request, the rest of the context."""
    if num_prompt == 0:
        raise ApiError("The prompt is empty.", param="prompt")
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt + wanted > context_length:
        raise ApiError(
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{wanted} output tokens and your prompt contains {num_prompt} input tokens, for a total of "
            f"{num_prompt + wanted} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            param="input_tokens",
            code="context_length_exceeded",
        )
    return context_length - num_prompt if max_tokens is None else max_tokens
