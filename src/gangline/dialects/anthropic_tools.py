"""Anthropic Messages: tools and tool choice -> canonical.

Three kinds of tools: the client's own, with a schema; hosted ones, which the provider would run (left out, named);
and client-run ones whose schema is inside the provider's models (refused: another model cannot know it).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.dialects.anthropic_wire import ToolChoiceParam, ToolParam
from gangline.domain.conversation import ToolChoice, ToolDefinition
from gangline.domain.errors import InvalidRequest

__all__ = ["recordable", "tool_choice", "tool_definitions"]

_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset", "advisor")

_DATE = re.compile(r"_\d{8}$")


def tool_definitions(params: Sequence[ToolParam]) -> tuple[tuple[ToolDefinition, ...], list[str]]:
    """The tools, and what was left out. Raises: InvalidRequest."""
    tools: list[ToolDefinition] = []
    dropped: list[str] = []
    for i, param in enumerate(params):
        if param.type is not None and param.type.startswith(_HOSTED):
            dropped.append(f"tools[{i}]: {_DATE.sub('', param.type)}")
            continue
        tools.append(_definition(param, f"tools.{i}"))
        hints = (("defer_loading", param.defer_loading), ("input_examples", param.input_examples))
        dropped += [f"tools[{i}].{name}" for name, value in hints if value]
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("tools: Tool names must be unique.", param="tools")
    return tuple(tools), dropped


def _definition(param: ToolParam, where: str) -> ToolDefinition:
    if param.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where}.type: {param.type!r} is known to the provider's models only; "
            "send it as a tool with a name, a description and an input_schema",
            param=f"{where}.type",
        )
    if not param.name:
        raise InvalidRequest(f"{where}.name: Field required", param=f"{where}.name")
    if param.input_schema is None:
        raise InvalidRequest(f"{where}.input_schema: Field required", param=f"{where}.input_schema")
    schema = recordable(param.input_schema, f"{where}.input_schema")
    return ToolDefinition(param.name, param.description, schema, param.strict)


def recordable(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """A schema that can be recorded. Raises: InvalidRequest for numbers beyond 64 bits: MessagePack has none."""
    try:
        msgspec.msgpack.encode(schema)
    except (OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None
    return schema


def tool_choice(
    param: ToolChoiceParam | None, tools: Sequence[ToolDefinition]
) -> tuple[ToolChoice | None, bool | None]:
    """(choice, whether calls may be parallel). Raises: InvalidRequest when it asks for a tool that is not there."""
    if param is None:
        return None, None
    parallel = None if param.disable_parallel_tool_use is None else not param.disable_parallel_tool_use
    match param.type:
        case "tool":
            if param.name not in {tool.name for tool in tools}:
                raise InvalidRequest(
                    f"tool_choice.name: Tool {param.name!r} not found in the provided tools, hosted ones left out",
                    param="tool_choice.name",
                )
            return ToolChoice("named", param.name), parallel
        case "any":
            if not tools:
                raise InvalidRequest("tool_choice: 'any' needs a tool that is not hosted", param="tool_choice")
            return ToolChoice("required"), parallel
        case "auto" | "none":
            return ToolChoice(param.type) if tools else None, parallel if tools else None
