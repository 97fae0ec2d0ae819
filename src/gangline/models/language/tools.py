"""A tool definition in the form of chat templates and OpenAI's chat request."""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.conversation import ToolDefinition

_CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


def tool_fields(tool: ToolDefinition) -> dict[str, Any]:
    optional = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    if tool.kind == "custom" and tool.parameters is None:
        optional |= {"description": _with_grammar(tool), "parameters": _CUSTOM_INPUT}
    function = {"name": tool.name} | {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": function}


def _with_grammar(tool: ToolDefinition) -> str | None:
    if not tool.grammar:
        return tool.description
    syntax = str(tool.grammar.get("syntax") or "a")
    definition = tool.grammar.get("definition")
    rule = definition if isinstance(definition, str) else msgspec.json.encode(tool.grammar).decode()
    return f"{tool.description or ''}\n\n`input` must match this {syntax} grammar:\n{rule}".strip()
