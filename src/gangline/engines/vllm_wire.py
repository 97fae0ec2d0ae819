"""vLLM's OpenAI routes as bytes: request bodies, reply bodies, server-sent events. Pure.

Source: vLLM 0.32/0.33 `entrypoints/openai` protocols; run against 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from gangline.domain.completion import VersionSpan
from gangline.domain.conversation import (
    Message,
    ModelCall,
    Text,
    Thinking,
    ToolCall,
    ToolDefinition,
    ToolResult,
    Usage,
)
from gangline.domain.errors import EngineUnavailable
from gangline.domain.reply import ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.domain.tokens import TokenIds, logprobs, token_ids
from gangline.engines.contract import EngineChoice, EngineDelta, EngineReply, EngineRequest, assistant_message

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

WireT = TypeVar("WireT")


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _TopLogprob(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class _TokenLogprob(_TopLogprob):
    top_logprobs: list[_TopLogprob] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[_Span] | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _CachedTokens | None = None


class WireReply(msgspec.Struct):
    """A whole reply, one chunk of a stream, or the error that either may turn out to be."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: dict[str, Any] | str | None = None


class ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class Rendered(msgspec.Struct):
    tokens: list[int]


def chat_body(request: EngineRequest, model: str, *, stream: bool) -> bytes:
    """The body of `POST /v1/chat/completions`: the call, and everything asked for that makes it trainable."""
    call = request.call
    body = _call_fields(call) | {
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
    if request.prompt_ids is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": request.prompt_ids.tolist()}
    return msgspec.json.encode(body)


def _call_fields(call: ModelCall) -> dict[str, Any]:
    sampling = call.sampling
    fields: dict[str, Any] = {
        "messages": [message_fields(message) for message in call.messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n": call.num_choices if call.num_choices > 1 else None,
        "response_format": call.response_format,
        "chat_template_kwargs": call.template_kwargs or None,
    }
    if call.tools:
        fields["tools"] = [_tool_fields(tool) for tool in call.tools]
        fields["parallel_tool_calls"] = call.parallel_tool_calls
        if call.tool_choice is not None:
            named = {"type": "function", "function": {"name": call.tool_choice.name}}
            fields["tool_choice"] = named if call.tool_choice.mode == "named" else call.tool_choice.mode
    return {name: value for name, value in fields.items() if value is not None}


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
        "messages": [message_fields(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
    }
    if tools:
        body["tools"] = [_tool_fields(tool) for tool in tools]
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    return msgspec.json.encode(body)


def message_fields(message: Message) -> dict[str, Any]:
    """A message as vLLM reads it. `developer` becomes `system`: some templates drop what they do not know."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role}
    texts = [part for part in message.parts if isinstance(part, Text)]
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    thoughts = [part.text for part in message.parts if isinstance(part, Thinking)]
    for part in message.parts:
        if isinstance(part, ToolResult):
            fields["tool_call_id"] = part.call_id
            texts.extend(part.content)
    fields["content"] = None if calls and not texts else _content(texts)
    if calls:
        fields["tool_calls"] = [_tool_call_fields(call) for call in calls]
    if thoughts:
        # Both names: servers and templates differ in which they read.
        fields["reasoning"] = fields["reasoning_content"] = "".join(thoughts)
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _content(texts: Sequence[Text]) -> str | list[dict[str, str]]:
    if len(texts) > 1:
        return [{"type": "text", "text": piece.text} for piece in texts]
    return texts[0].text if texts else ""


def _tool_call_fields(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _tool_fields(tool: ToolDefinition) -> dict[str, Any]:
    optional = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function = {"name": tool.name} | {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": function}


def decode(body: bytes, kind: type[WireT], url: str) -> WireT:
    """Raises: EngineUnavailable when the body is not what was asked for."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # Python servers write NaN, which is no JSON; one such log-prob must not cost the whole reply.
            return msgspec.convert(json.loads(body), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        start = body[:120].decode("utf-8", "replace")
        raise EngineUnavailable(f"engine {url} answered what is no reply of vLLM's: {error}; got {start!r}") from error


def engine_reply(reply: WireReply, *, show_logprobs: bool = False) -> EngineReply:
    """`show_logprobs`: the client asked for log-probs of its own."""
    return EngineReply(
        prompt_ids=_ids(reply.prompt_token_ids),
        choices=tuple(_choice(choice, show_logprobs) for choice in reply.choices),
        usage=_usage(reply.usage),
    )


def _choice(choice: _Choice, show_logprobs: bool) -> EngineChoice:
    message = choice.message or _Message()
    values = _logprob_values(choice)
    calls = [
        ToolCall(call.id or "", call.function.name or "", call.function.arguments or "")
        for call in message.tool_calls or ()
    ]
    return EngineChoice(
        index=choice.index,
        message=assistant_message(_thinking(message), message.content or "", calls),
        finish_reason=choice.finish_reason,
        stop_reason=_stop_reason(choice),
        sampled_ids=_ids(choice.token_ids),
        logprobs=None if values is None else logprobs(values),
        version_spans=_version_spans(choice.weight_versions),
        token_logprobs=_token_logprobs(choice) if show_logprobs else (),
    )


def engine_deltas(chunk: WireReply, *, show_logprobs: bool = False) -> list[EngineDelta]:
    """One per choice in the chunk; a chunk without choices (the usage at the end) is one of its own."""
    common: dict[str, Any] = {"prompt_ids": _ids(chunk.prompt_token_ids), "usage": _usage(chunk.usage)}
    if not chunk.choices:
        return [EngineDelta(**common)]
    return [_delta(choice, common, show_logprobs) for choice in chunk.choices]


def _delta(choice: _Choice, common: dict[str, Any], show_logprobs: bool) -> EngineDelta:
    message = choice.delta or _Message()
    shown = ReplyDelta(
        choice_index=choice.index,
        thinking=_thinking(message),
        text=message.content or "",
        tool_calls=tuple(
            ToolCallDelta(call.index, call.function.arguments or "", call.id, call.function.name)
            for call in message.tool_calls or ()
        ),
        logprobs=_token_logprobs(choice) if show_logprobs else (),
    )
    return EngineDelta(
        shown=shown,
        sampled_ids=choice.token_ids,
        logprobs=_logprob_values(choice),
        version_spans=_version_spans(choice.weight_versions),
        finish_reason=choice.finish_reason,
        stop_reason=_stop_reason(choice),
        **common,
    )


def _thinking(message: _Message) -> str:
    return message.reasoning or message.reasoning_content or ""


def _ids(values: list[int] | None) -> TokenIds | None:
    return None if values is None else token_ids(values)


def _stop_reason(choice: _Choice) -> str | None:
    return None if choice.stop_reason is None else str(choice.stop_reason)


def _logprob_values(choice: _Choice) -> list[float] | None:
    content = choice.logprobs.content if choice.logprobs is not None else None
    if content is None:
        return None
    return [np.nan if entry.logprob is None else entry.logprob for entry in content]


def _token_logprobs(choice: _Choice) -> tuple[TokenLogprob, ...]:
    content = choice.logprobs.content if choice.logprobs is not None else None
    return tuple(
        TokenLogprob(*_shown(entry), tuple(TokenLogprob(*_shown(top)) for top in entry.top_logprobs or ()))
        for entry in content or ()
    )


def _shown(entry: _TopLogprob) -> tuple[str, float, tuple[int, ...] | None]:
    # As OpenAI writes "very unlikely": a client must get a number.
    value = -9999.0 if entry.logprob is None or not np.isfinite(entry.logprob) else entry.logprob
    return entry.token, value, None if entry.bytes is None else tuple(entry.bytes)


def _version_spans(spans: list[_Span] | None) -> tuple[VersionSpan, ...]:
    """Versions that are no numbers (`v7` counts as 7) are left out: unknown."""
    numbered = [(str(span.version).removeprefix("v"), span) for span in spans or ()]
    return tuple(VersionSpan(int(text), span.start, span.end) for text, span in numbered if text.isdecimal())


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    return Usage(
        num_prompt_tokens=usage.prompt_tokens,
        num_sampled_tokens=usage.completion_tokens or 0,
        num_cached_tokens=cached or 0,
    )


class SseLines:
    """Bytes in any cut -> the data of server-sent events, in order. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._open = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        self._open += piece
        if b"\n" not in piece:
            return []
        *lines, rest = bytes(self._open).split(b"\n")
        self._open = bytearray(rest)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
