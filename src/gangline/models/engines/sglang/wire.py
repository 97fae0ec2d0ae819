"""SGLang's chat route as bytes: request bodies and reply bodies. Pure.

Source: SGLang 0.5.23, `srt/entrypoints/openai`; read, not run: it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.tokens import logprobs
from gangline.models.engines.contract import EngineChoice, EngineReply, EngineRequest
from gangline.models.engines.evidence import experts_of_numbers, sglang_mask
from gangline.models.engines.fields import NEUTRAL_SAMPLING, body_of, call_fields, messages_fields
from gangline.models.engines.json_ids import NO_IDS, SentIds, TokenId, ids_from_json
from gangline.models.engines.replies import (
    WireLogprobs,
    WireMessage,
    WireSpan,
    WireUsage,
    ids_of,
    logprob_values,
    message_of,
    token_logprobs,
    usage_of,
    version_spans,
)
from gangline.models.language.tools import tool_fields

__all__ = ["Detokenized", "SglangReply", "chat_body", "engine_reply", "num_expert_layers", "render_body"]


class _Meta(msgspec.Struct):
    """`meta_info` of a choice."""

    output_token_logprobs: list[list[Any]] | None = None
    """[T] of (log-prob, id, text or null)."""
    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None
    routed_experts: bytes | None = None
    """Numbers of experts, token after token, layer after layer."""
    routed_experts_dtype: str = "int32"
    output_token_sampling_mask: msgspec.Raw = NO_IDS
    """[T] lists of the ids that were kept."""
    output_token_sampling_logprobs: list[float | None] | None = None
    """[T], among these."""


class _Choice(msgspec.Struct):
    index: int = 0
    message: WireMessage | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    prompt_token_ids: msgspec.Raw = NO_IDS
    response_token_ids: list[TokenId] | None = None
    meta_info: _Meta | None = None


class SglangReply(msgspec.Struct):
    choices: list[_Choice] = []
    usage: WireUsage | None = None
    error: dict[str, Any] | str | None = None


class Detokenized(msgspec.Struct):
    text: str | list[str] = ""


def chat_body(request: EngineRequest, model: str, messages: Sequence[bytes], sent: SentIds | None) -> list[bytes]:
    """The body of `POST /v1/chat/completions`, in pieces. Never a stream: SGLang reports ids in whole replies only.

    messages: those of the call, from `messages_in_turns`. sent: its exact ids, from `sent_ids`.
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
    if request.experts_from is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = request.experts_from
    if request.with_mask:
        body["return_sampling_mask"] = True
    if sent is not None:
        body["input_ids"] = msgspec.Raw(sent.text)
    return body_of(body, messages)


def render_body(
    model: str, messages: Sequence[Message], tools: Sequence[ToolDefinition], template_kwargs: dict[str, Any] | None
) -> bytes:
    """A chat call of one token: SGLang has no route that renders, but reports its rendered prompt."""
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


def num_expert_layers(reply: SglangReply, num_chosen: int) -> int | None:
    """Layers of a reply that reports the experts of all its tokens; None where it reports none.

    Raises: ValueError when it cannot be `num_chosen` experts a layer, EngineMalformed when the prompt's ids are none.
    """
    choice = reply.choices[0]
    meta = choice.meta_info or _Meta()
    if meta.routed_experts is None:
        return None
    prompt_ids = ids_from_json(choice.prompt_token_ids)
    num_prompt = 0 if prompt_ids is None else len(prompt_ids)
    num_tokens = num_prompt + len(choice.response_token_ids or ()) - 1
    num_numbers = len(meta.routed_experts) // np.dtype(meta.routed_experts_dtype).itemsize
    if num_tokens < 1 or num_numbers == 0 or num_numbers % (num_tokens * num_chosen):
        raise ValueError(f"{num_numbers} numbers of experts for {num_tokens} tokens of {num_chosen} a layer")
    return num_numbers // (num_tokens * num_chosen)


def engine_reply(
    reply: SglangReply,
    sent: SentIds | None = None,
    *,
    show_logprobs: bool = False,
    experts_shape: tuple[int, int] | None = None,
) -> EngineReply:
    """
    sent: exact ids of the request.
    show_logprobs: the client asked for log-probs of its own.
    experts_shape: layers, and experts of each; None leaves experts out.
    Raises: EngineMalformed where ids are none; ValueError, msgspec.ValidationError where log-probs, experts or masks
    cannot be read.
    """
    prompts = (ids_from_json(choice.prompt_token_ids, sent) for choice in reply.choices)
    return EngineReply(
        prompt_ids=next((ids for ids in prompts if ids is not None), None),
        choices=tuple(_choice(choice, show_logprobs, experts_shape) for choice in reply.choices),
        usage=usage_of(reply.usage),
    )


def _choice(choice: _Choice, show_logprobs: bool, experts_shape: tuple[int, int] | None) -> EngineChoice:
    meta = choice.meta_info or _Meta()
    meta_values, meta_ids = _of_meta(meta)
    ids = choice.response_token_ids if choice.response_token_ids is not None else meta_ids
    values = meta_values if meta_values is not None else logprob_values(choice.logprobs)
    experts = None
    if experts_shape is not None and meta.routed_experts is not None:
        experts = experts_of_numbers(meta.routed_experts, meta.routed_experts_dtype, *experts_shape)
    mask, among_kept = sglang_mask(meta.output_token_sampling_mask, meta.output_token_sampling_logprobs)
    if mask is not None:
        values = among_kept
    return EngineChoice(
        index=choice.index,
        message=message_of(choice.message),
        finish_reason=choice.finish_reason,
        # A matched id is the end of turn, which is how a reply ends by itself; a matched string was cut away.
        stop_reason=choice.matched_stop if isinstance(choice.matched_stop, str) else None,
        sampled_ids=ids_of(ids),
        logprobs=None if values is None else logprobs(values),
        version_spans=version_spans(_spans(meta, len(ids or ()))),
        token_logprobs=token_logprobs(choice.logprobs) if show_logprobs else (),
        experts=experts,
        sampling_mask=mask,
    )


def _of_meta(meta: _Meta) -> tuple[list[float] | None, list[int] | None]:
    """Log-probs and ids [T] of `output_token_logprobs`. Raises: ValueError when an entry is no pair."""
    entries = meta.output_token_logprobs
    if entries is None:
        return None, None
    pairs = msgspec.convert([entry[:2] for entry in entries], list[tuple[float | None, TokenId]])
    return [np.nan if value is None else value for value, _ in pairs], [token for _, token in pairs]


def _spans(meta: _Meta, num_sampled: int) -> list[WireSpan] | None:
    """One version for all of the reply where the engine reports no spans."""
    if meta.weight_versions is not None or meta.weight_version is None:
        return meta.weight_versions
    return [WireSpan(meta.weight_version, 0, num_sampled)]
