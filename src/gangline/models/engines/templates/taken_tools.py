"""Probes whether a template accepts tools as clients define them: some without parameters or a description, some with
unions and nested values in their schemas. Templates that translate schemas into another language fail for some of
these."""

from __future__ import annotations

import asyncio

from gangline.domain.conversation import Message, Text, ToolDefinition
from gangline.domain.errors import EngineError
from gangline.models.engines.templates.renderings import Renderings, Renders
from gangline.models.engines.templates.taken_messages import PROBE_TOOL

_USER = (Message("user", (Text("x"),)),)
_TOOLS = (
    ToolDefinition("probe_without_parameters", "Do it."),
    ToolDefinition("probe_empty", "Do it.", {"type": "object", "properties": {}}),
    ToolDefinition("probe_without_description", None, PROBE_TOOL.parameters),
    ToolDefinition(
        "probe_rich",
        "Do it.",
        {
            "type": "object",
            "properties": {
                "one": {"type": ["string", "null"]},
                "two": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]},
                "three": {"type": "object", "properties": {"of": {"enum": ["a", 1]}}, "additionalProperties": False},
                "four": {"type": "array", "items": {"type": "object", "properties": {"of": {"type": "number"}}}},
                "five": {"type": "object", "additionalProperties": {"type": "string"}},
                "six": {},
            },
            "required": ["one"],
            "oneOf": [{"required": ["two"]}, {"required": ["three"]}],
        },
    ),
)


async def refusal_of_some_tools(engine: Renders, rendered: Renderings) -> str:
    """The template's error for the first refused tool; empty if it accepts all, or refuses all. Raises: like
    `Renderings`."""
    taken = await asyncio.gather(*(rendered.ids(_USER, (tool,)) for tool in (PROBE_TOOL, *_TOOLS)))
    refused = next((tool for tool, ids in zip(_TOOLS, taken[1:], strict=True) if ids is None), None)
    if taken[0] is None or refused is None:
        return ""
    try:
        await engine.render(_USER, (refused,))
    except EngineError as error:
        return error.message
    return ""
