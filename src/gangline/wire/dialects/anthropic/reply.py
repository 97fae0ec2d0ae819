"""Anthropic Messages: the reply -> one JSON body, and the parts shared with the events.

A tool call whose arguments are not a JSON object is sent with the input `{}`, so that the client's own validation
reports the error to the model. The record keeps the sampled text.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from gangline.domain.conversation import ModelCall, Part, Text, Thinking, ToolCall, Usage
from gangline.domain.reply import Reply, ReplyChoice

CONSTANT_FIELDS: dict[str, dict[str, Any]] = {
    "text": {"citations": []},
    "thinking": {},
    "tool_use": {"caller": {"type": "direct"}},
}
"""Fields that the provider's specification requires for each kind of block, with constant values here."""

_STOP_REASONS = {"length": "max_tokens", "abort": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}


def messages_reply_body(call: ModelCall, reply: Reply) -> bytes:
    choice = reply.choices[0]
    blocks = [_block(part, reply.reply_id) for part in choice.message.parts if _is_shown(part)]
    fields = message_fields(reply.reply_id, reply.model) | stop_fields(call, choice)
    fields["content"] = blocks or [_block(Text(""), reply.reply_id)]
    fields["usage"] = usage_fields(reply.usage)
    return msgspec.json.encode(fields)


def message_fields(reply_id: str, model: str) -> dict[str, Any]:
    """A message before its first content."""
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }


def _is_shown(part: Part) -> bool:
    return isinstance(part, ToolCall) or (isinstance(part, Text | Thinking) and part.text != "")


def _block(part: Part, reply_id: str) -> dict[str, Any]:
    match part:
        case Thinking():
            return {"type": "thinking", "thinking": part.text, "signature": signature_of(reply_id)}
        case ToolCall():
            arguments = msgspec.Raw(input_json(part.arguments).encode())
            fields = {"id": part.call_id, "name": part.name, "input": arguments}
            return {"type": "tool_use"} | fields | CONSTANT_FIELDS["tool_use"]
        case Text():
            return {"type": "text", "text": part.text} | CONSTANT_FIELDS["text"]
        case _:
            raise AssertionError(f"a model does not reply with {type(part).__name__}")


def signature_of(reply_id: str) -> str:
    """The signature that a client echoes with the thinking: a reference to the record."""
    return base64.b64encode(f"gangline:{reply_id}".encode()).decode()


def is_whole_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def input_json(arguments: str) -> str:
    """The arguments as a JSON object, or `{}` if the model's text is not one."""
    return arguments if is_whole_object(arguments) else "{}"


def stop_fields(call: ModelCall, choice: ReplyChoice) -> dict[str, Any]:
    reason = _STOP_REASONS.get(choice.finish_reason, "end_turn")
    stopped_by = choice.stop_reason if choice.stop_reason in call.sampling.stop else None
    if reason == "end_turn":
        # Some engines report `stop` for a reply of calls if a tool was forced.
        has_calls = any(isinstance(part, ToolCall) for part in choice.message.parts)
        reason = "stop_sequence" if stopped_by is not None else "tool_use" if has_calls else reason
    return {"stop_reason": reason, "stop_sequence": stopped_by if reason == "stop_sequence" else None}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The provider does not include cached prompt tokens in `input_tokens`."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_sampled_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_thinking_tokens},
        "server_tool_use": None,
        "service_tier": None,
        "inference_geo": None,
    }
