"""Converts a client's chat messages to the form that chat templates expect.

As in vLLM: text parts joined by newlines, `null` content empty, call arguments parsed, thoughts under both of their
names. `developer` becomes `system`: templates do not know that role, and some drop unknown roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from gangline.domain.errors import InvalidRequest

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises: InvalidRequest for content that a text template cannot contain; its details name the field as `param`."""
    if not messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_tools(tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> None:
    """Raises: InvalidRequest for tools without a name, or a choice of a missing tool; `param` as above."""
    names = [_tool_name(tool, index) for index, tool in enumerate(tools or ())]
    if isinstance(choice, dict):
        named: object = choice.get("function")
        name: object = cast("dict[str, Any]", named).get("name") if isinstance(named, dict) else None
        if name not in names:
            raise InvalidRequest(f"tool_choice names {name!r}, tools has {names}.", param="tool_choice")
    elif choice not in (None, "none", "auto", "required"):
        raise InvalidRequest(f"tool_choice {choice!r} is not none, auto or required.", param="tool_choice")
    elif choice == "required" and not names:
        raise InvalidRequest("tool_choice is required, but tools is empty.", param="tool_choice")


def _tool_name(tool: dict[str, Any], index: int) -> str:
    function: object = tool.get("function")
    name: object = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        where = f"tools[{index}].function.name"
        raise InvalidRequest(f"{where} must be a text that is not empty.", param=where)
    return name


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role: object = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role must be a text.", param=f"{where}.role")
    plain = {**message, "role": "system" if role == "developer" else role}
    plain["content"] = _text(message.get("content"), where)
    thought: object = message.get("reasoning") or message.get("reasoning_content")
    if thought is not None:
        plain["reasoning"] = plain["reasoning_content"] = thought
    calls: object = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    else:
        plain.pop("tool_calls", None)
    return plain


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a text or a list of parts.", param=f"{where}.content")
    texts: list[str] = []
    for part in cast("list[object]", content):
        kind, text = _part(part)
        if kind not in _TEXT_PARTS or text is None:
            message = f"{where}.content has a part of type {kind!r}; this engine reads text only."
            raise InvalidRequest(message, param=f"{where}.content")
        texts.append(text)
    return "\n".join(texts)


def _part(part: object) -> tuple[object, str | None]:
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        return type(part).__name__, None
    fields = cast("dict[str, object]", part)
    text = fields.get("refusal") if fields.get("type") == "refusal" else fields.get("text")
    return fields.get("type"), text if isinstance(text, str) else None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    try:
        parsed = msgspec.convert(calls, list[_Call])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in parsed
    ]


def _arguments(arguments: str | dict[str, Any] | None) -> object:
    """Parsed if it is a JSON object, else unchanged: a template can still print the text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return arguments
