"""A minimal MCP server on the standard streams: JSON-RPC 2.0, one message per line, no dependencies.

Calls are answered sequentially. An environment's own prints go to stderr, so that they cannot be mistaken for
messages. A step's reward and end are sent in its result's `_meta`, under `gangline/step`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
_STEP = "gangline/step"


class Refused(Exception):
    """The call was not carried out and the environment is unchanged. The message is for the model."""


class Result(NamedTuple):
    """The result of a call."""

    text: str
    reward: float | None = None
    """None if the call is not a step."""
    done: bool = False
    """Whether the episode is over."""


class Tool(NamedTuple):
    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""
    call: Callable[[dict[str, Any]], Result]
    """Raises: Refused."""


class World(Protocol):
    """One started episode of an environment."""

    instructions: str
    """The first observation, and instructions on how to act."""
    tools: Sequence[Tool]


def serve(begin: Callable[[], World]) -> None:
    """Answer requests until the client closes its end. begin: starts the episode."""
    requests, answers = _own_streams()
    world = begin()
    for line in requests:
        asked = json.loads(line)
        if "id" in asked and "method" in asked:
            answer = {"jsonrpc": "2.0", "id": asked["id"], **_answer(world, asked["method"], asked.get("params") or {})}
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


def _own_streams() -> tuple[Any, Any]:
    """The protocol's streams. The process's own stdin becomes empty, and its stdout becomes stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _answer(world: World, method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            asked = params.get("protocolVersion")
            return {
                "result": {
                    "protocolVersion": asked if asked in _VERSIONS else _VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "gangline-environment", "version": "1"},
                    "instructions": world.instructions,
                }
            }
        case "ping":
            return {"result": {}}
        case "tools/list":
            tools = [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
                for tool in world.tools
            ]
            return {"result": {"tools": tools}}
        case "tools/call":
            return _called(world, params)
        case _:
            return {"error": {"code": -32601, "message": f"unknown method {method!r}"}}


def _called(world: World, params: dict[str, Any]) -> dict[str, Any]:
    tool = next((tool for tool in world.tools if tool.name == params.get("name")), None)
    if tool is None:
        return {"error": {"code": -32602, "message": f"unknown tool {params.get('name')!r}"}}
    try:
        result = tool.call(params.get("arguments") or {})
    except Refused as error:
        return _said(str(error), is_error=True)
    except Exception as error:  # the environment's own: the client must learn that there was no step
        traceback.print_exc(file=sys.stderr)
        return {"error": {"code": -32603, "message": f"the environment failed: {type(error).__name__}: {error}"}}
    if result.reward is not None and not math.isfinite(result.reward):
        return {"error": {"code": -32603, "message": f"the environment gave the reward {result.reward}"}}
    response = _said(result.text)
    response["result"]["_meta"] = {_STEP: {"reward": result.reward, "done": result.done}}
    return response


def _said(text: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"result": {"content": [{"type": "text", "text": text}], "isError": is_error}}
