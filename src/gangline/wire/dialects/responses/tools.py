"""OpenAI Responses: tools and tool choice -> canonical, and a sampled call -> the client's item.

Engines only have functions. So a `custom` tool becomes a function with one string, `input`, with its grammar described
in the text; a namespace's tools are functions named `NAMESPACE__NAME`. Tools that run at the provider are dropped by
name.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from gangline.domain.conversation import ToolCall, ToolChoice, ToolDefinition
from gangline.wire.dialects.responses.fields import (
    Fields,
    flag,
    invalid,
    optional_record,
    record,
    records,
    string,
    text,
)
from gangline.wire.dialects.responses.items import MALFORMED, flat_name


def read_tools(value: object) -> tuple[tuple[ToolDefinition, ...], list[str]]:
    """(tools, names of the dropped ones). Raises: InvalidRequest."""
    tools: list[ToolDefinition] = []
    left_out: list[str] = []
    for i, fields in enumerate(records(value, "tools")):
        where = f"tools[{i}]"
        kind = text(fields, "type", where)
        if kind == "namespace":
            tools += _namespace(fields, where)
        elif kind in ("function", "custom"):
            tools.append(_tool(fields, where))
        else:
            left_out.append(f"{where}: {kind}")
    _check_names(tools)
    return tuple(tools), left_out


def _namespace(fields: Fields, where: str) -> list[ToolDefinition]:
    namespace = _name(fields, where)
    inner = records(fields.get("tools"), f"{where}.tools")
    return [_tool(tool, f"{where}.tools[{i}]", namespace) for i, tool in enumerate(inner)]


def _tool(fields: Fields, where: str, namespace: str | None = None) -> ToolDefinition:
    name, description = _name(fields, where), string(fields, "description", where)
    flat = flat_name(namespace, name)
    local = name if namespace else None
    kind = string(fields, "type", where)
    if kind == "custom":
        grammar = optional_record(fields, "format", where)
        shim = _shim_schema(grammar)
        return ToolDefinition(flat, description, shim, None, "custom", grammar, namespace, local)
    if kind != "function":
        raise invalid(f"{where}.type", f"{kind!r} is none of function, custom.")
    schema, strict = optional_record(fields, "parameters", where), flag(fields, "strict", where)
    return ToolDefinition(flat, description, schema, strict, namespace=namespace, local_name=local)


def _name(fields: Fields, where: str) -> str:
    name = text(fields, "name", where)
    if not name:
        raise invalid(f"{where}.name", "must not be empty.")
    return name


def _shim_schema(grammar: Fields | None) -> Fields:
    what = "The whole input of the tool, as free text."
    if grammar is not None and grammar.get("type") == "grammar":
        what += f" It must match this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    properties = {"input": {"type": "string", "description": what}}
    return {"type": "object", "properties": properties, "required": ["input"], "additionalProperties": False}


def _check_names(tools: list[ToolDefinition]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid("tools", f"two tools are named {tool.name!r}.")
        seen.add(tool.name)


def read_allowed(
    value: object, tools: tuple[ToolDefinition, ...]
) -> tuple[tuple[ToolDefinition, ...], ToolChoice] | None:
    """The tools left by `allowed_tools` and the choice among them; None for any other choice.

    Hosted tools are dropped here as in `tools`. Raises: InvalidRequest.
    """
    if not isinstance(value, dict) or cast("Fields", value).get("type") != "allowed_tools":
        return None
    fields = cast("Fields", value)
    mode = string(fields, "mode", "tool_choice")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.mode", f"{mode!r} is none of auto, required.")
    entries = records(fields.get("tools"), "tool_choice.tools")
    names = {_chosen(entry, tools).name for entry in entries if entry.get("type") in ("function", "custom")}
    if not names:
        raise invalid("tool_choice.tools", "must name functions or custom tools.")
    return tuple(tool for tool in tools if tool.name in names), ToolChoice(mode)


def read_tool_choice(value: object, tools: tuple[ToolDefinition, ...]) -> ToolChoice | None:
    """Raises: InvalidRequest."""
    if value is None:
        return None
    if isinstance(value, str):
        if value == "required" and not tools:
            raise invalid("tool_choice", "'required' must be specified with functions or custom tools in 'tools'.")
        if value in ("auto", "none", "required"):
            return ToolChoice(value)
        raise invalid("tool_choice", f"{value!r} is none of auto, none, required.")
    fields = record(value, "tool_choice")
    kind = string(fields, "type", "tool_choice")
    if kind not in ("function", "custom"):
        raise invalid("tool_choice.type", f"{kind!r} is not supported; name a function or a custom tool.")
    return ToolChoice("named", _chosen(fields, tools).name)


def _chosen(fields: Fields, tools: tuple[ToolDefinition, ...]) -> ToolDefinition:
    """Found by the engine's name, or by the client's name if it is unique."""
    name = text(fields, "name", "tool_choice")
    flat = flat_name(string(fields, "namespace", "tool_choice"), name)
    found = [tool for tool in tools if tool.name == flat] or [tool for tool in tools if tool.local_name == name]
    if len(found) != 1:
        raise invalid("tool_choice", f"tool choice {flat!r} not found in 'tools'.")
    return found[0]


def tool_call_item(call: ToolCall, tools: tuple[ToolDefinition, ...], item_key: str) -> dict[str, Any]:
    """The finished item, without its status. `item_key` makes its id unique."""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    named: dict[str, Any] = {"call_id": call.call_id, "name": call.name}
    if tool is not None and tool.namespace is not None:
        named |= {"name": tool.local_name, "namespace": tool.namespace}
    if tool is not None and tool.kind == "custom":
        return {"id": f"ctc_{item_key}", "type": "custom_tool_call", **named, "input": _free_text(call.arguments)}
    return {"id": f"fc_{item_key}", "type": "function_call", **named, "arguments": _json_object(call.arguments)}


def _free_text(arguments: str) -> str:
    """The text in the function's arguments; arguments in another form are returned unchanged."""
    fields = _decoded(arguments)
    value: object = fields.get("input") if fields is not None else None
    return value if isinstance(value, str) else arguments


def _json_object(arguments: str) -> str:
    """Clients parse the result. Arguments that they could not parse are wrapped: the tool rejects them, and the model
    sees the error.
    """
    if not arguments.strip():
        return "{}"
    return arguments if _decoded(arguments) is not None else msgspec.json.encode({MALFORMED: arguments}).decode()


def _decoded(arguments: str) -> Fields | None:
    try:
        fields: object = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return cast("Fields", fields) if isinstance(fields, dict) else None
