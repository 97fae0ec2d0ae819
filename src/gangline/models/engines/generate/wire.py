"""Routes that take and return ids, as bytes: vLLM's `/inference/v1/generate`, SGLang's `/generate`. Pure.

Source: vLLM 0.32 `entrypoints/scale_out/token_in_token_out`; SGLang 0.5.23 `srt/managers`, read but not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
import numpy as np

from gangline.domain.completion import LogprobKind, VersionSpan
from gangline.domain.conversation import ModelCall, Usage
from gangline.domain.errors import EngineMalformed, EngineUnavailable
from gangline.domain.evidence.contract import AskedEvidence
from gangline.domain.tokens import TokenIds
from gangline.models.engines.evidence import Found, WireEvidence
from gangline.models.engines.fields import NEUTRAL_SAMPLING
from gangline.models.engines.replies import (
    NO_IDS,
    SentIds,
    TokenId,
    WireSpan,
    WireUsage,
    decode,
    ids_from_json,
    usage_of,
    version_spans,
)

Candidate = tuple[int, float]
"""(id, log-prob)"""


class GenerateAsk(msgspec.Struct, frozen=True, kw_only=True):
    """One choice to sample."""

    model: str
    prompt_ids: TokenIds
    call: ModelCall
    max_tokens: int
    stop_ids: tuple[int, ...]
    """Ids that end a turn, in addition to the ones that the engine knows."""
    stops: tuple[str, ...] = ()
    """Strings at which the engine must stop, if they are not found on this side."""
    images: tuple[str, ...] = ()
    """`data:` URLs of the prompt's images. The prompt has one placeholder id for each, which the engine expands."""
    seed: int | None = None
    stream: bool = False
    evidence: tuple[AskedEvidence, ...] = ()
    """As in `EngineRequest`."""
    headers: dict[str, str] = {}
    """See `call_headers`."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply, or the content of one chunk of a stream."""

    ids: list[int]
    logprobs: list[float] | None
    """One per id; NaN where the engine sent null."""
    candidates: list[list[Candidate]] = []
    """The likeliest ids at each position; empty unless requested."""
    finish_reason: str | None = None
    stop_string: str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    prompt_ids: TokenIds | None = None
    """Repeated by some engines."""
    usage: Usage | None = None
    evidence: dict[str, Any] = {}
    """As in `EngineChoice`; only in a whole reply."""


class GenerateRoute(Protocol):
    """The route of one engine. Each instance parses one reply."""

    name: str
    path: str
    logprob_kind: LogprobKind | None
    """None: to be probed."""
    takes_images: bool
    """Whether ids may be sent with images and stay unchanged."""

    def body(self, ask: GenerateAsk) -> bytes: ...

    def read(self, answer: bytes, url: str) -> Sampled | None:
        """A whole reply or a chunk; None for a chunk without content. Raises: EngineUnavailable."""
        ...


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float | None = None
    token_id: int = -1
    top_logprobs: list[_TokenLogprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WireSpan] | None = None


ChoiceT = TypeVar("ChoiceT")


class _VllmReply(msgspec.Struct, Generic[ChoiceT]):
    choices: list[ChoiceT] = []
    prompt_token_ids: msgspec.Raw = NO_IDS
    usage: WireUsage | None = None
    error: dict[str, Any] | str | None = None


class VllmGenerate:
    name = "vllm"
    path = "/inference/v1/generate"
    logprob_kind: LogprobKind | None = None
    takes_images = True

    def __init__(self, evidence: WireEvidence | None = None) -> None:
        """evidence: the engine's; None: a new object."""
        self._evidence = evidence or WireEvidence("generate_vllm")
        self._sent: SentIds | None = None

    def body(self, ask: GenerateAsk) -> bytes:
        sent = self._sent = SentIds.of(ask.prompt_ids)
        constraint = _schema_of(ask.call)
        params = _sampling(ask) | {
            "logprobs": max(1, ask.call.num_top_logprobs or 0),
            "structured_outputs": None if constraint is None else {"json": constraint},
        }
        body: dict[str, Any] = {
            "model": ask.model,
            "token_ids": msgspec.Raw(sent.text),
            "sampling_params": NEUTRAL_SAMPLING | _given(params) | self._evidence.fields(ask.evidence),
            "return_token_ids": True,
            "stream": ask.stream,
        }
        if ask.images:
            body["content_parts"] = [{"type": "image_url", "url": url} for url in ask.images]
        if ask.stream:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)

    def read(self, answer: bytes, url: str) -> Sampled | None:
        reply = decode(answer, _vllm_reply(self._evidence.extended(_Choice)), url)
        if reply.error is not None:
            raise EngineUnavailable(f"engine {url} failed: {reply.error}")
        choice = reply.choices[0] if reply.choices else _Choice(token_ids=[])
        content = choice.logprobs.content if choice.logprobs is not None else None
        ids = choice.token_ids or []
        if not ids and choice.finish_reason is None and reply.usage is None:
            return None
        found = self._found(choice, url) if reply.choices else Found({})
        values = None if content is None else [_number(entry.logprob) for entry in content]
        return Sampled(
            ids=ids,
            logprobs=values if found.logprobs is None else found.logprobs,
            candidates=[_candidates(entry.top_logprobs) for entry in content or ()],
            finish_reason=choice.finish_reason,
            stop_string=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
            version_spans=version_spans(choice.weight_versions),
            prompt_ids=ids_from_json(reply.prompt_token_ids, self._sent),
            usage=usage_of(reply.usage),
            evidence=found.values,
        )

    def _found(self, choice: _Choice, url: str) -> Found:
        """Raises: EngineMalformed."""
        try:
            return self._evidence.read(choice)
        except ValueError as error:
            raise EngineMalformed(f"engine {url} answered {error}") from error


def _vllm_reply(choice: type[_Choice]) -> type[_VllmReply[_Choice]]:
    return cast("Any", _VllmReply)[choice]


def _candidates(entries: list[_TokenLogprob]) -> list[Candidate]:
    return [(entry.token_id, _number(entry.logprob)) for entry in entries]


class _SglangFinish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _SglangMeta(msgspec.Struct):
    finish_reason: _SglangFinish | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: list[list[Any]] | None = None
    output_top_logprobs: list[list[list[Any]] | None] | None = None
    prompt_token_ids: msgspec.Raw = NO_IDS
    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None


MetaT = TypeVar("MetaT")


class _SglangReply(msgspec.Struct, Generic[MetaT]):
    meta_info: MetaT | None = None
    output_ids: list[TokenId] = []
    prompt_token_ids: msgspec.Raw = NO_IDS
    error: dict[str, Any] | str | None = None


class SglangGenerate:
    """Its streams repeat all ids from the start or, with `--incremental-streaming-output`, contain only new ones."""

    name = "sglang"
    path = "/generate"
    logprob_kind: LogprobKind | None = "temperature_scaled"
    takes_images = False  # with `image_data` it turns ids into text, and that into other ids

    def __init__(self, evidence: WireEvidence | None = None) -> None:
        """evidence: the engine's; None: a new object."""
        self._evidence = evidence or WireEvidence("generate_sglang")
        self._num_read = 0
        self._sent: SentIds | None = None

    def body(self, ask: GenerateAsk) -> bytes:
        sent = self._sent = SentIds.of(ask.prompt_ids)
        constraint = _schema_of(ask.call)
        params = _sampling(ask)
        params |= {
            "max_new_tokens": params.pop("max_tokens"),
            "sampling_seed": params.pop("seed"),
            "json_schema": None if constraint is None else msgspec.json.encode(constraint).decode(),
            "skip_special_tokens": False,
        }
        body: dict[str, Any] = {
            "input_ids": msgspec.Raw(sent.text),
            "sampling_params": NEUTRAL_SAMPLING | _given(params),
            "return_logprob": True,
            "top_logprobs_num": ask.call.num_top_logprobs or 0,
            "return_prompt_token_ids": True,
            "stream": ask.stream,
        }
        return msgspec.json.encode(body | self._evidence.fields(ask.evidence))

    def read(self, answer: bytes, url: str) -> Sampled | None:
        kind = self._evidence.extended(_SglangMeta)
        reply = decode(answer, _sglang_reply(kind), url)
        meta = kind() if reply.meta_info is None else reply.meta_info
        finish = meta.finish_reason
        if reply.error is not None or (finish is not None and finish.type == "abort" and finish.message):
            raise EngineUnavailable(f"engine {url} failed: {reply.error or (finish and finish.message)}")
        num_new = max(meta.completion_tokens - self._num_read, 0)
        if num_new == 0 and finish is None:
            return None
        self._num_read = meta.completion_tokens
        ids = _last(reply.output_ids, num_new)
        prompt_ids = ids_from_json(reply.prompt_token_ids, self._sent)
        if prompt_ids is None:
            prompt_ids = ids_from_json(meta.prompt_token_ids, self._sent)
        try:
            values, candidates = _sglang_logprobs(meta, ids)
            found = self._evidence.read(meta)
        except (msgspec.ValidationError, ValueError) as error:
            raise EngineMalformed(f"engine {url} answered odd log-probs or evidence in meta_info: {error}") from error
        spans = meta.weight_versions
        if spans is None and meta.weight_version is not None:
            spans = [WireSpan(meta.weight_version, 0, meta.completion_tokens)]
        return Sampled(
            ids=ids,
            logprobs=values if found.logprobs is None else found.logprobs,
            candidates=candidates,
            finish_reason=None if finish is None else finish.type,
            stop_string=finish.matched if finish is not None and isinstance(finish.matched, str) else None,
            version_spans=version_spans(spans),
            prompt_ids=prompt_ids,
            usage=None
            if finish is None
            else Usage(
                num_prompt_tokens=meta.prompt_tokens,
                num_sampled_tokens=meta.completion_tokens,
                num_cached_tokens=meta.cached_tokens,
            ),
            evidence=found.values,
        )


def _sglang_reply(meta: type[_SglangMeta]) -> type[_SglangReply[_SglangMeta]]:
    return cast("Any", _SglangReply)[meta]


def _sglang_logprobs(meta: _SglangMeta, ids: list[int]) -> tuple[list[float] | None, list[list[Candidate]]]:
    """Raises: ValueError, ValidationError when an entry is not a (log-prob, id), or belongs to another token."""
    if meta.output_token_logprobs is None:
        return None, []
    pairs = list(_pairs(_last(meta.output_token_logprobs, len(ids))))
    if [token for token, _ in pairs] != ids[: len(pairs)]:
        raise ValueError("they are of other tokens than output_ids")
    tops = _last(meta.output_top_logprobs or [], len(ids))
    return [value for _, value in pairs], [list(_pairs(entries or [])) for entries in tops]


def _pairs(entries: list[list[Any]]) -> Iterator[Candidate]:
    for entry in entries:
        value, token = msgspec.convert(entry[:2], tuple[float | None, int])
        yield token, _number(value)


def _last(values: list[Any], count: int) -> list[Any]:
    return values[len(values) - count :] if count else []


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def _sampling(ask: GenerateAsk) -> dict[str, Any]:
    """Every parameter of the call, by vLLM's name; None if unset."""
    return msgspec.structs.asdict(ask.call.sampling) | {
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "stop": list(ask.stops) or None,
        "stop_token_ids": list(ask.stop_ids) or None,
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _schema_of(call: ModelCall) -> dict[str, Any] | None:
    """JSON schema of the structured output that the call requests."""
    asked = call.response_format or {}
    if asked.get("type") == "json_object":
        return {"type": "object"}
    inner: object = asked.get("json_schema")
    schema: object = cast("dict[str, Any]", inner).get("schema") if isinstance(inner, dict) else None
    return cast("dict[str, Any]", schema) if isinstance(schema, dict) else None
