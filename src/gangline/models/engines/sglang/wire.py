"""SGLang's chat route as bytes: request bodies and reply bodies. Pure.

Source: SGLang 0.5.23, `srt/entrypoints/openai`; read but not run, since it needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.errors import EngineMalformed
from gangline.domain.tokens import Logprobs, TokenIds, logprobs
from gangline.models.engines.contract import EngineChoice, EngineReply, EngineRequest
from gangline.models.engines.evidence import Found, WireEvidence
from gangline.models.engines.fields import NEUTRAL_SAMPLING, body_of, call_fields, messages_fields
from gangline.models.engines.replies import (
    NO_IDS,
    SentIds,
    TokenId,
    WireLogprobs,
    WireMessage,
    WireSpan,
    WireUsage,
    decode,
    ids_from_json,
    ids_of,
    logprob_values,
    message_of,
    token_logprobs,
    usage_of,
    version_spans,
)
from gangline.models.language.tools import tool_fields

MetaT = TypeVar("MetaT")


class _Meta(msgspec.Struct):
    """`meta_info` of a choice."""

    output_token_logprobs: list[list[Any]] | None = None
    """[T] of (log-prob, id, text or null)."""
    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None


class _Choice(msgspec.Struct, Generic[MetaT]):
    index: int = 0
    message: WireMessage | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    prompt_token_ids: msgspec.Raw = NO_IDS
    response_token_ids: list[TokenId] | None = None
    meta_info: MetaT | None = None


class _Reply(msgspec.Struct, Generic[MetaT]):
    choices: list[_Choice[MetaT]] = []
    usage: WireUsage | None = None
    error: dict[str, Any] | str | None = None


SglangReply = _Reply[_Meta]


def reply_type(evidence: WireEvidence) -> type[SglangReply]:
    """The type of replies that may report evidence."""
    return cast("Any", _Reply)[evidence.extended(_Meta)]


class Detokenized(msgspec.Struct):
    text: str | list[str] = ""


def chat_body(
    request: EngineRequest,
    model: str,
    messages: Sequence[bytes],
    sent: SentIds | None,
    evidence: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """The body of `POST /v1/chat/completions`, in pieces. Never a stream: SGLang reports ids only in whole replies.

    messages: the call's, from `messages_in_turns`. sent: its exact ids, from `sent_ids`. evidence: request fields, from
    `WireEvidence.fields`.
    """
    call = request.call
    body = (
        NEUTRAL_SAMPLING
        | call_fields(call)
        | {
            "model": model,
            "stream": False,
            "logprobs": True,
            "top_logprobs": call.num_top_logprobs or 0,
            "return_token_ids": True,
            "return_prompt_token_ids": True,
            "return_meta_info": True,
            "separate_reasoning": True,
        }
    )
    body |= evidence or {}
    if sent is not None:
        body["input_ids"] = msgspec.Raw(sent.text)
    return body_of(body, messages)


def render_body(
    model: str, messages: Sequence[Message], tools: Sequence[ToolDefinition], template_kwargs: dict[str, Any] | None
) -> bytes:
    """A chat call of one token: SGLang cannot just render, but reports the rendered prompt."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages_fields(messages),
        "max_tokens": 1,
        "return_prompt_token_ids": True,
    }
    if tools:
        body["tools"] = [tool_fields(tool) for tool in tools]
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    return msgspec.json.encode(body)


def learn(evidence: WireEvidence, reply: SglangReply) -> None:
    """Learn properties of the evidence, such as its shape, from a probe's reply.

    Raises: ValueError when the evidence cannot be read, EngineMalformed when the prompt ids are invalid.
    """
    choice = reply.choices[0]
    if choice.meta_info is not None:
        prompt_ids = ids_from_json(choice.prompt_token_ids)
        num_prompt = 0 if prompt_ids is None else len(prompt_ids)
        evidence.learn(choice.meta_info, num_prompt + len(choice.response_token_ids or ()))


def engine_reply(
    reply: SglangReply,
    sent: SentIds | None = None,
    *,
    show_logprobs: bool = False,
    evidence: WireEvidence | None = None,
) -> EngineReply:
    """
    sent: exact ids of the request.
    show_logprobs: whether the client requested log-probs.
    evidence: None if the reply has no evidence.
    Raises: EngineMalformed for invalid ids; ValueError, msgspec.ValidationError when log-probs or evidence cannot be
    read.
    """
    prompts = (ids_from_json(choice.prompt_token_ids, sent) for choice in reply.choices)
    return EngineReply(
        prompt_ids=next((ids for ids in prompts if ids is not None), None),
        choices=tuple(_choice(choice, show_logprobs, evidence) for choice in reply.choices),
        usage=usage_of(reply.usage),
    )


def _choice(choice: _Choice[_Meta], show_logprobs: bool, evidence: WireEvidence | None) -> EngineChoice:
    found = Found({}) if evidence is None or choice.meta_info is None else evidence.read(choice.meta_info)
    meta = choice.meta_info or _Meta()
    meta_values, meta_ids = _of_meta(meta)
    ids = choice.response_token_ids if choice.response_token_ids is not None else meta_ids
    values = meta_values if meta_values is not None else logprob_values(choice.logprobs)
    values = values if found.logprobs is None else found.logprobs
    return EngineChoice(
        index=choice.index,
        message=message_of(choice.message),
        finish_reason=choice.finish_reason,
        # A matched id is the end of turn, a normal end; a matched string was cut off.
        stop_reason=choice.matched_stop if isinstance(choice.matched_stop, str) else None,
        sampled_ids=ids_of(ids),
        logprobs=None if values is None else logprobs(values),
        version_spans=version_spans(_spans(meta, len(ids or ()))),
        token_logprobs=token_logprobs(choice.logprobs) if show_logprobs else (),
        evidence=found.values,
    )


def _of_meta(meta: _Meta) -> tuple[list[float] | None, list[int] | None]:
    """Log-probs and ids [T] of `output_token_logprobs`. Raises: ValueError when an entry is not a pair."""
    entries = meta.output_token_logprobs
    if entries is None:
        return None, None
    pairs = msgspec.convert([entry[:2] for entry in entries], list[tuple[float | None, TokenId]])
    return [np.nan if value is None else value for value, _ in pairs], [token for _, token in pairs]


def _spans(meta: _Meta, num_sampled: int) -> list[WireSpan] | None:
    """A single version for the whole reply if the engine reports no spans."""
    if meta.weight_versions is not None or meta.weight_version is None:
        return meta.weight_versions
    return [WireSpan(meta.weight_version, 0, num_sampled)]


class _PromptMeta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]] = []


class _ScoredPrompt(msgspec.Struct):
    meta_info: _PromptMeta


def score_body(ids: TokenIds) -> bytes:
    sampling = {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False}
    fields = {"input_ids": ids.tolist(), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return msgspec.json.encode(fields)


def scores_of(body: bytes, ids: TokenIds, url: str) -> Logprobs:
    """[T], NaN where the engine reports none. Raises: EngineMalformed."""
    entries = decode(body, _ScoredPrompt, url).meta_info.input_token_logprobs
    if [one for _, one, _ in entries] != ids.tolist():
        raise EngineMalformed(f"engine {url} returned log-probs of other ids than the {len(ids)} asked ones")
    return logprobs(math.nan if value is None else value for value, _, _ in entries)
