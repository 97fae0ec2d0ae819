"""OpenAI Chat: the reply -> one JSON body, or the chunks of its stream.

A stream is: role delta, content / reasoning / tool_calls deltas, a finish chunk per choice, the usage chunk if
requested, `[DONE]`. A tool call's id, type and name are only in its first delta. Thinking is sent under both names in
use, `reasoning_content` and `reasoning`. One field is an extension: a choice has `parse_status`, `partial` or `failed`,
if tool calls of the model could not be parsed and are part of the content. A whole reply has vLLM's `prompt_token_ids`
and `token_ids` if the request has its `return_token_ids`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import (
    ContextOverflow,
    EngineRefused,
    GanglineError,
    LimitExceeded,
    NotFound,
    SessionOver,
    TooMany,
    Unauthorized,
)
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.wire.dialects.chat.tools import custom_names, tool_call_fields
from gangline.wire.dialects.contract import ErrorAnswer

_FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})


def chat_reply_body(call: ModelCall, reply: Reply) -> bytes:
    body: dict[str, Any] = {
        "id": f"chatcmpl-{reply.reply_id}",
        "object": "chat.completion",
        "created": reply.created_at,
        "model": reply.model,
        "choices": [_choice(call, choice) for choice in reply.choices],
        "usage": _usage(reply.usage),
    }
    if reply.prompt_ids is not None:
        body["prompt_token_ids"] = reply.prompt_ids
    return msgspec.json.encode(body)


def _choice(call: ModelCall, choice: ReplyChoice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": _message(choice.message, custom_names(call.tools)),
        "logprobs": _logprobs(choice.logprobs or ()) if call.num_top_logprobs is not None else None,
        "finish_reason": _finish_reason(choice.finish_reason),
        **({} if choice.sampled_ids is None else {"token_ids": choice.sampled_ids}),
        **_parse_status(choice),
    }


def _parse_status(choice: ReplyChoice) -> dict[str, Any]:
    return {} if choice.parse == "ok" else {"parse_status": choice.parse}


def _message(message: Message, customs: frozenset[str]) -> dict[str, Any]:
    text = "".join(part.text for part in message.parts if isinstance(part, Text))
    thought = "".join(part.text for part in message.parts if isinstance(part, Thinking))
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    fields: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thought:
        fields["reasoning_content"] = fields["reasoning"] = thought
    if calls:
        fields["tool_calls"] = [tool_call_fields(call, customs) for call in calls]
    return fields


def _finish_reason(reason: str) -> str:
    """Engines have reasons that clients' types lack; `abort` means that the reply was cut short."""
    if reason in _FINISH_REASONS:
        return reason
    return "length" if reason == "abort" else "stop"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_sampled_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_thinking_tokens},
    }


def _logprobs(entries: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    content = [
        _token_logprob(entry) | {"top_logprobs": [_token_logprob(top) for top in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token_logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.utf8}


class ChatEventWriter:
    """Writes one stream. Call deltas, then `finish` or `error`, once."""

    media_type = "text/event-stream"

    def __init__(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> None:
        self._call = call
        object_kind = "chat.completion.chunk"
        self._head = {"id": f"chatcmpl-{reply_id}", "object": object_kind, "created": created_at, "model": model}
        self._begun: set[int] = set()
        self._customs = custom_names(call.tools)
        self._held: set[tuple[int, int]] = set()
        """(choice, call) of custom calls, whose text is known only when the call is complete."""

    def start(self, num_prompt_tokens: int) -> bytes:
        """The role of the first choice; other choices begin with their first delta."""
        return self._begin(0)

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def delta(self, delta: ReplyDelta) -> bytes:
        begin = self._begin(delta.choice_index)
        if delta.shows_nothing:
            return begin
        fields: dict[str, Any] = {}
        if delta.thinking:
            fields["reasoning_content"] = fields["reasoning"] = delta.thinking
        if delta.text:
            fields["content"] = delta.text
        pieces = [piece for piece in delta.tool_calls if not self._is_held(delta.choice_index, piece)]
        if pieces:
            fields["tool_calls"] = [_tool_call_delta(piece) for piece in pieces]
        if not fields and not delta.logprobs:
            return begin
        return begin + self._choice_chunk(delta.choice_index, fields, logprobs=delta.logprobs)

    def finish(self, reply: Reply) -> bytes:
        pieces: list[bytes] = []
        for choice in reply.choices:
            pieces.append(self._begin(choice.index))
            pieces += self._whole_customs(choice)
            pieces.append(self._finish_chunk(choice))
        if self._call.include_usage:
            pieces.append(_event(self._head | {"choices": [], "usage": _usage(reply.usage)}))
        return b"".join((*pieces, b"data: [DONE]\n\n"))

    def _is_held(self, choice_index: int, piece: ToolCallDelta) -> bool:
        if piece.name is not None and piece.name in self._customs:
            self._held.add((choice_index, piece.index))
        return (choice_index, piece.index) in self._held

    def _whole_customs(self, choice: ReplyChoice) -> list[bytes]:
        calls = [part for part in choice.message.parts if isinstance(part, ToolCall)]
        return [
            self._choice_chunk(choice.index, {"tool_calls": [{"index": i} | tool_call_fields(call, self._customs)]})
            for i, call in enumerate(calls)
            if call.name in self._customs
        ]

    @property
    def error_stands_alone(self) -> bool:
        return False

    def error(self, error: GanglineError) -> bytes:
        """`[DONE]` is not sent: a client that overlooks the error must not take the reply for complete.

        A stream has no status, and the SDKs pass on only the message, so it must contain the words on which an agent
        retries.
        """
        body = _error_body(error, f"server_error: {error.message}" if error.retryable else error.message)
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _begin(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._choice_chunk(index, {"role": "assistant", "content": ""})

    def _choice_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(logprobs) if logprobs and self._call.num_top_logprobs is not None else None,
            "finish_reason": None,
        }
        return _event(self._head | {"choices": [choice]})

    def _finish_chunk(self, choice: ReplyChoice) -> bytes:
        reason = _finish_reason(choice.finish_reason)
        fields: dict[str, Any] = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": reason}
        return _event(self._head | {"choices": [fields | _parse_status(choice)]})


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _tool_call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.index, "function": function}
    return {
        "index": piece.index,
        "id": piece.call_id,
        "type": "function",
        "function": {"name": piece.name} | function,
    }


def chat_error(error: GanglineError) -> ErrorAnswer:
    status, _, _ = _error_class(error)
    # By default the SDKs retry 409 and every 5xx, which would waste minutes on a permanent error.
    headers = {} if error.retryable or (status < 500 and status != 409) else {"x-should-retry": "false"}
    return ErrorAnswer(status, msgspec.json.encode(_error_body(error, error.message)), headers)


def _error_body(error: GanglineError, message: str) -> dict[str, Any]:
    _, kind, code = _error_class(error)
    return {"error": {"message": message, "type": kind, "param": error.details.get("param"), "code": code}}


def _error_class(error: GanglineError) -> tuple[int, str, str]:
    """(HTTP status, type, code)"""
    match error:
        case Unauthorized():
            return 401, "invalid_request_error", "invalid_api_key"
        case SessionOver():
            return 403, "permission_error", error.code
        case NotFound():
            return 404, "invalid_request_error", error.code
        case TooMany():
            return 429, "requests", "rate_limit_exceeded"
        case LimitExceeded():
            return 413, "invalid_request_error", "request_too_large"
        case ContextOverflow():
            return 400, "invalid_request_error", "context_length_exceeded"
        case EngineRefused():
            # An engine's 4xx about the body is the caller's to fix; about us (401, 404 ...) it is ours.
            about_body = error.details.get("status") in (400, 413, 422)
            return (400, "invalid_request_error", error.code) if about_body else (502, "server_error", error.code)
        case _ if error.boundary == "caller":
            return error.status, "invalid_request_error", error.code
        case _:
            return max(error.status, 500), "server_error", error.code
