"""vLLM's OpenAI routes as bytes: request bodies, reply bodies, server-sent events. Pure.

Source: vLLM 0.32/0.33 `entrypoints/openai` protocols; run against 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.tokens import logprobs
from gangline.engines.chat_fields import call_fields, has_media, message_fields, messages_fields, tool_fields
from gangline.engines.chat_replies import (
    ModelCard,
    ModelList,
    SseLines,
    WireLogprobs,
    WireMessage,
    WireSpan,
    WireUsage,
    decode,
    delta_of,
    ids_of,
    logprob_values,
    message_of,
    token_logprobs,
    usage_of,
    version_spans,
)
from gangline.engines.contract import EngineChoice, EngineDelta, EngineReply, EngineRequest
from gangline.engines.json_ids import NO_IDS, ids_from_json

__all__ = [
    "ModelCard",
    "ModelList",
    "Rendered",
    "SseLines",
    "WireReply",
    "chat_body",
    "decode",
    "engine_deltas",
    "engine_reply",
    "message_fields",
    "render_body",
]


class _Choice(msgspec.Struct):
    index: int = 0
    message: WireMessage | None = None
    delta: WireMessage | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WireSpan] | None = None


class WireReply(msgspec.Struct):
    """A whole reply, one chunk of a stream, or the error that either may turn out to be."""

    choices: list[_Choice] = []
    usage: WireUsage | None = None
    prompt_token_ids: msgspec.Raw = NO_IDS
    error: dict[str, Any] | str | None = None


class Rendered(msgspec.Struct):
    tokens: list[int]


def chat_body(request: EngineRequest, model: str, *, stream: bool) -> bytes:
    """The body of `POST /v1/chat/completions`: the call, and everything asked for that makes it trainable."""
    call = request.call
    body = call_fields(call) | {
        "model": model,
        "stream": stream,
        "logprobs": True,
        "top_logprobs": call.num_top_logprobs or 0,
        "return_token_ids": True,
        "return_weight_versions": True,
        # Without it vLLM leaves out ids and log-probs too; what a harness sees is decided on the way back.
        "include_reasoning": True,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if request.prompt_ids is not None and not has_media(call.messages):
        body["kv_transfer_params"] = {"prompt_token_ids": request.prompt_ids.tolist()}
    return msgspec.json.encode(body)


def render_body(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition],
    template_kwargs: dict[str, Any] | None,
    add_generation_prompt: bool,
) -> bytes:
    """The body of `POST /tokenize`."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages_fields(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    if tools:
        body["tools"] = [tool_fields(tool) for tool in tools]
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    return msgspec.json.encode(body)


def engine_reply(reply: WireReply, *, show_logprobs: bool = False) -> EngineReply:
    """`show_logprobs`: the client asked for log-probs of its own."""
    return EngineReply(
        prompt_ids=ids_from_json(reply.prompt_token_ids),
        choices=tuple(_choice(choice, show_logprobs) for choice in reply.choices),
        usage=usage_of(reply.usage),
    )


def _choice(choice: _Choice, show_logprobs: bool) -> EngineChoice:
    values = logprob_values(choice.logprobs)
    return EngineChoice(
        index=choice.index,
        message=message_of(choice.message),
        finish_reason=choice.finish_reason,
        stop_reason=_stop_reason(choice),
        sampled_ids=ids_of(choice.token_ids),
        logprobs=None if values is None else logprobs(values),
        version_spans=version_spans(choice.weight_versions),
        token_logprobs=token_logprobs(choice.logprobs) if show_logprobs else (),
    )


def engine_deltas(chunk: WireReply, *, show_logprobs: bool = False) -> list[EngineDelta]:
    """One per choice in the chunk; a chunk without choices (the usage at the end) is one of its own."""
    common: dict[str, Any] = {"prompt_ids": ids_from_json(chunk.prompt_token_ids), "usage": usage_of(chunk.usage)}
    if not chunk.choices:
        return [EngineDelta(**common)]
    return [_delta(choice, common, show_logprobs) for choice in chunk.choices]


def _delta(choice: _Choice, common: dict[str, Any], show_logprobs: bool) -> EngineDelta:
    shown = delta_of(choice.delta, choice.index, token_logprobs(choice.logprobs) if show_logprobs else ())
    return EngineDelta(
        shown=shown,
        sampled_ids=choice.token_ids,
        logprobs=logprob_values(choice.logprobs),
        version_spans=version_spans(choice.weight_versions),
        finish_reason=choice.finish_reason,
        stop_reason=_stop_reason(choice),
        **common,
    )


def _stop_reason(choice: _Choice) -> str | None:
    return None if choice.stop_reason is None else str(choice.stop_reason)
