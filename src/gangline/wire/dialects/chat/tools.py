"""OpenAI Chat: tools, tool choice, and tool calls in both directions.

Engines only have functions: a `custom` tool becomes a function with one string, `input`, with its grammar described in
the text, and its calls are converted back to the client's form. Tools that run at the provider are dropped by name.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec

from gangline.domain.conversation import ToolCall, ToolChoice, ToolDefinition
from gangline.domain.errors import InvalidRequest

_HOSTED = ("code_interpreter", "computer", "file_search", "image_generation", "mcp", "web_search", "local_shell")


class ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolCustom(msgspec.Struct):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ChatTool(msgspec.Struct):
    type: str = "function"
    function: ToolFunction | None = None
    custom: ToolCustom | None = None


def read_tools(tools: list[ChatTool]) -> tuple[tuple[ToolDefinition, ...], list[str]]:
    """(tools, names of the dropped ones). Raises: InvalidRequest."""
    read: list[ToolDefinition] = []
    left_out: list[str] = []
    for i, tool in enumerate(tools):
        if tool.type.startswith(_HOSTED):
            left_out.append(f"tools[{i}]: {tool.type}")
        else:
            read.append(_tool(tool, f"tools[{i}]"))
    return tuple(read), left_out


def _tool(tool: ChatTool, where: str) -> ToolDefinition:
    known = {"function": tool.function, "custom": tool.custom}.get(tool.type)
    if known is None:
        raise InvalidRequest(f"{where} of type {tool.type!r} is neither a function nor a custom tool.", param=where)
    if not known.name:
        raise InvalidRequest(f"{where}.{tool.type}.name is empty.", param=f"{where}.{tool.type}.name")
    if isinstance(known, ToolCustom):
        shim = _shim_schema(known.format)
        return ToolDefinition(known.name, known.description, shim, None, "custom", known.format)
    return ToolDefinition(known.name, known.description, known.parameters, known.strict)


def _shim_schema(grammar: dict[str, Any] | None) -> dict[str, Any]:
    what = "The whole input of the tool, as free text."
    inner: object = (grammar or {}).get("grammar")
    if isinstance(inner, dict):
        definition = cast("dict[str, Any]", inner)
        what += f" It must match this {definition.get('syntax')} grammar:\n{definition.get('definition')}"
    properties = {"input": {"type": "string", "description": what}}
    return {"type": "object", "properties": properties, "required": ["input"], "additionalProperties": False}


def read_allowed(
    choice: str | dict[str, Any] | None, tools: tuple[ToolDefinition, ...]
) -> tuple[tuple[ToolDefinition, ...], ToolChoice] | None:
    """The tools left by `allowed_tools` and the choice among them; None for any other choice.

    Raises: InvalidRequest.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    try:
        allowed = msgspec.convert(choice.get("allowed_tools"), _Allowed)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tool_choice.allowed_tools: {error}", param="tool_choice.allowed_tools") from None
    names = {tool.name for tool in read_tools(allowed.tools)[0]}
    if not names or not names <= {tool.name for tool in tools}:
        raise InvalidRequest(
            "tool_choice.allowed_tools.tools must name tools that are offered.", param="tool_choice.allowed_tools.tools"
        )
    return tuple(tool for tool in tools if tool.name in names), ToolChoice(allowed.mode)


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[ChatTool]


def read_tool_choice(choice: str | dict[str, Any] | None, tools: tuple[ToolDefinition, ...]) -> ToolChoice | None:
    """Raises: InvalidRequest."""
    if choice is None:
        return None
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return _offered(ToolChoice(choice), tools)
    kind = choice.get("type", "function") if isinstance(choice, dict) else None
    named: object = choice.get(kind) if isinstance(choice, dict) and kind in ("function", "custom") else None
    name: object = cast("dict[str, Any]", named).get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice must be auto, none, required or name a tool.", param="tool_choice")
    return _offered(ToolChoice("named", name), tools)


def _offered(choice: ToolChoice, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    """Raises: InvalidRequest for a forced choice without tools, as the provider does."""
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequest(
            "'tool_choice' is only allowed when 'tools' are specified: functions or custom tools.", param="tool_choice"
        )
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequest(f"tool_choice: {choice.name!r} is not one of 'tools'.", param="tool_choice")
    return choice


def shimmed(text: str) -> str:
    """The free text of a custom call -> arguments of the function that replaces it."""
    return msgspec.json.encode({"input": text}).decode()


def custom_names(tools: tuple[ToolDefinition, ...]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools if tool.kind == "custom")


def tool_call_fields(call: ToolCall, customs: frozenset[str]) -> dict[str, Any]:
    if call.name in customs:
        return {
            "id": call.call_id,
            "type": "custom",
            "custom": {"name": call.name, "input": _free_text(call.arguments)},
        }
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _free_text(arguments: str) -> str:
    """The text in the function's arguments; arguments in another form are returned unchanged."""
    try:
        return msgspec.json.decode(arguments, type=_Shim).input
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments


class _Shim(msgspec.Struct):
    input: str
