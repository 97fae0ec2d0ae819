"""A conversation as OpenAI's `messages` and `tools`, with text content: the input of trainers' chat templates.

As JSON lines they are for trainers and services without Parquet support.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.session import SessionResult
from gangline.machine.durable import replacing
from gangline.models.engines.fields import media_in, messages_fields
from gangline.models.language.tools import tool_fields
from gangline.rows.conversations.conversation import main_conversation

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


def write_messages(results: Iterable[SessionResult], path: Path) -> int:
    """Write `messages`, `tools`, ids, outcome and reward of each session as one line. Returns the number of lines.

    Sessions without an answered call and sessions with images are skipped. Message fields without a value are left out.
    """
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("wb") as file:
        for result in results:
            talk = main_conversation(result.completions)
            if talk is None or not talk.num_prompt_messages or media_in(talk.messages) is not None:
                continue
            messages = chat_messages(talk.messages)
            line = {
                "messages": [{name: one for name, one in each.items() if one is not None} for each in messages],
                "tools": chat_tools(talk.tools),
                "task_id": result.task_id,
                "session_id": result.session_id,
                "completion_id": talk.last.completion_id,
                "outcome": result.outcome,
                "reward": result.reward,
            }
            file.write(msgspec.json.encode(line) + b"\n")
            num += 1
    return num
