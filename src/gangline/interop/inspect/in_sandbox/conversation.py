"""Converts a session's conversation to Inspect's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def said(session: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages of the last main trace (of all traces if there are no main ones), and the last answer.

    If the program called no model, such as a reference solution, its standard output is the answer.
    """
    main_line = [trace for trace in session["traces"] if trace["role"] == "main"] or list(session["traces"])
    if not main_line:
        return [], session["harness_stdout"]
    answers = main_line[-1]["response_messages"]
    last = next((answer for answer in reversed(answers) if answer["role"] == "assistant"), None)
    return [*main_line[-1]["prompt_messages"], *answers], "" if last is None else _submitted(last) or _text(last)


def _submitted(message: Mapping[str, Any]) -> str:
    """The answer in the first readable call of `submit`."""
    for call in message.get("tool_calls", ()):
        try:
            answer: Any = json.loads(call["function"]["arguments"])["answer"]
        except (ValueError, TypeError, KeyError):
            continue
        if call["function"]["name"] == "submit" and isinstance(answer, str):
            return answer
    return ""


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Converts messages in OpenAI's form. Documents are omitted; unreadable arguments become the call's error."""
    model: Any = import_module("inspect_ai.model")
    kinds = {"user": model.ChatMessageUser, "assistant": model.ChatMessageAssistant, "tool": model.ChatMessageTool}
    found: list[Any] = []
    for message in messages:
        own: dict[str, Any] = {"content": _content(message["content"])}
        if message.get("tool_calls"):
            own["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        if "tool_call_id" in message:
            own["tool_call_id"] = message["tool_call_id"]
        found.append(kinds.get(message["role"], model.ChatMessageSystem)(**own))
    return found


def _content(content: str | list[Mapping[str, Any]]) -> Any:
    if isinstance(content, str):
        return content
    model: Any = import_module("inspect_ai.model")
    parts: list[Any] = []
    for part in content:
        if part["type"] == "text":
            parts.append(model.ContentText(text=part["text"]))
        elif part["type"] == "image_url":
            parts.append(model.ContentImage(image=part["image_url"]["url"]))
    return parts


def _tool_call(call: Mapping[str, Any]) -> Any:
    name, given = call["function"]["name"], call["function"]["arguments"]
    tool_call: Any = import_module("inspect_ai.tool").ToolCall
    try:
        arguments: Any = json.loads(given)
    except ValueError as error:
        return tool_call(id=call["id"], function=name, arguments={}, parse_error=str(error))
    return tool_call(id=call["id"], function=name, arguments=arguments if isinstance(arguments, dict) else {})
