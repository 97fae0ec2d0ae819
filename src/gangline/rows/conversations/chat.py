"""A conversation as OpenAI's `messages` and `tools`, with text content: the input of trainers' chat templates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from gangline.domain.conversation import Message, ToolDefinition
from gangline.models.engines.fields import messages_fields
from gangline.models.language.tools import tool_fields

_MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Content is always a text, empty with tool calls; arguments are JSON text. Fields without a value are None.

    In the form that engines use: text parts joined by newlines, `developer` as `system`, a tool's error as its text.
    """
    return [_message(fields) for fields in messages_fields(messages)]


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    content = fields["content"]
    if not isinstance(content, str):
        parts = cast("list[dict[str, Any]]", content or [])
        content = "\n".join(part["text"] for part in parts)
    return {name: content if name == "content" else fields.get(name) for name in _MESSAGE}


def chat_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    return [tool_fields(tool) for tool in tools]


def conversation_digest(messages: Sequence[dict[str, Any]]) -> bytes:
    """Returns equal digests for equal conversations, ignoring the random ids of tool calls."""
    turns: list[object] = []
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"] or ()]
        turns.append((message["role"], message["content"], message["reasoning_content"], calls))
    return hashlib.sha256(msgspec.msgpack.encode(turns)).digest()
