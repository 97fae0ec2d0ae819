"""OpenAI Responses: recorded messages -> the corresponding items of a client."""

from __future__ import annotations

from typing import Any

from gangline.domain.conversation import Message, Text, Thinking, ToolCall, ToolResult, message_text
from gangline.domain.errors import InvalidRequest


def message_items(message: Message, reply_id: str = "") -> list[dict[str, Any]]:
    """Items of one message. reply_id: a reply's id; its items are complete.

    Raises: InvalidRequest for images and documents.
    """
    items: list[dict[str, Any]] = []
    for part in message.parts:
        match part:
            case Text(text=text) if reply_id:
                content: list[dict[str, Any]] = [{"type": "output_text", "text": text, "annotations": []}]
                items.append({"type": "message", "role": "assistant", "status": "completed", "content": content})
            case Text(text=text) if items and "role" in items[-1]:
                items[-1]["content"].append({"type": "input_text", "text": text})
            case Text(text=text):
                items.append({"role": message.role, "content": [{"type": "input_text", "text": text}]})
            case Thinking(text=text):
                items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]})
            case ToolCall():
                call = {"call_id": part.call_id, "name": part.name, "arguments": part.arguments}
                items.append({"type": "function_call", **call})
            case ToolResult() if all(isinstance(one, Text) for one in part.content):
                output = message_text(Message(message.role, part.content))
                items.append({"type": "function_call_output", "call_id": part.call_id, "output": output})
            case _:
                raise InvalidRequest("items of text alone can be made of it, and it has images or documents.")
    return [{**item, "id": f"item_{reply_id}_{at}"} for at, item in enumerate(items)] if reply_id else items
