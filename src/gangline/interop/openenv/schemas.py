"""JSON Schemas of actions, observations and states, and the description of the HTTP routes.

Source: `openenv` 0.10.0 (`core/env_server/mcp_types.py`, `types.py`, `http_server.py`).
"""

from __future__ import annotations

from typing import Any

from gangline import __version__
from gangline.interop.openenv.episode import Seen, Tool

_METADATA: dict[str, Any] = {"type": "object", "additionalProperties": True, "default": {}}

ACTION: dict[str, Any] = {
    "title": "Action",
    "oneOf": [
        {
            "title": "CallToolAction",
            "type": "object",
            "additionalProperties": False,
            "required": ["type", "tool_name"],
            "properties": {
                "type": {"const": "call_tool"},
                "tool_name": {"type": "string", "description": "One of the tools; `submit` ends the episode."},
                "arguments": {"type": "object", "default": {}},
                "metadata": _METADATA,
            },
        },
        {
            "title": "ListToolsAction",
            "type": "object",
            "additionalProperties": False,
            "required": ["type"],
            "properties": {"type": {"const": "list_tools"}, "metadata": _METADATA},
        },
    ],
}

OBSERVATION: dict[str, Any] = {
    "title": "Observation",
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "After reset: the task's instruction."},
        "tool_name": {"type": "string", "description": "After a call: the tool."},
        "result": {"type": "string", "description": "After a call: its result."},
        "tools": {"type": "array", "items": {"type": "object"}, "description": "After reset and list_tools."},
        "done": {"type": "boolean", "default": False},
        "reward": {
            "type": ["number", "null"],
            "default": None,
            "description": "At the end of the episode; null before, and where the task could not be graded.",
        },
        "metadata": _METADATA,
    },
}

STATE: dict[str, Any] = {
    "title": "State",
    "type": "object",
    "properties": {
        "episode_id": {"type": ["string", "null"], "default": None},
        "step_count": {"type": "integer", "minimum": 0, "default": 0},
        "task": {"type": ["string", "null"], "default": None},
    },
}


def observation(seen: Seen, **fields: Any) -> dict[str, Any]:
    """The answer to reset and step. fields: the observation's. `metadata` appears both inside and outside it, as in
    OpenEnv.
    """
    answer = {"observation": {**fields, "metadata": seen.metadata}, "reward": seen.reward, "done": seen.done}
    return {**answer, "metadata": seen.metadata} if seen.metadata else answer


def tool_list(tools: list[Tool]) -> list[dict[str, Any]]:
    return [{"name": tool.name, "description": tool.description, "input_schema": tool.input_schema} for tool in tools]


def openapi(title: str, paths: dict[str, list[str]]) -> dict[str, Any]:
    """paths: path -> methods in lower case."""
    answers = {"200": {"description": "JSON"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": {path: {method: {"responses": answers} for method in methods} for path, methods in paths.items()},
    }
