"""JSON Schemas of actions, observations and states, and the description of the HTTP routes.

Source: `openenv` 0.10.0 (`core/env_server/mcp_types.py`, `types.py`, `http_server.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline import __version__
from gangline.interop.openenv.episode import Seen, Tool

_SCHEMAS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
ACTION, OBSERVATION, STATE = _SCHEMAS["action"], _SCHEMAS["observation"], _SCHEMAS["state"]


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
