"""One session with an OpenEnv server, over the `/ws` route of the package's own client.

If the server has its own tools (an MCP environment), those are offered. Otherwise there is one tool `step`, whose
arguments are the fields of the action. `state` and `finish` are for the grader.
"""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from typing import Any

from .episode import over
from .protocol import Refused, Result, Tool
from .server import Http, start

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_LIST, _CALL = "list_tools", "call_tool"


class OpenEnvSession:
    """Starts the server if a command is configured, and begins an episode."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._url: str = config["url"].rstrip("/")
        if config["command"]:
            start(config["command"])
        schema = Http(self._url, config["start_seconds"]).ask_first("/schema")["action"]
        client = import_module("openenv.core.generic_client").GenericEnvClient
        self._env: Any = client(base_url=self._url).sync()
        self._env.connect()
        begun = self._env.reset(seed=config["seed"], **config["reset_options"])
        self.is_over = bool(begun.done)
        self._before: float | None = _sum(None, begun.reward)
        """The reward of `reset`, which is added to the first step's."""
        self.instructions = f"You act in an environment by its tools.\nYou see: {_text(begun.observation)}"
        self.tools = (*self._offered(schema), *self._for_grader())

    def _offered(self, schema: dict[str, Any]) -> list[Tool]:
        fields = set(schema.get("properties", {}))
        if not {"tool_name", "arguments"} <= fields and schema.get("title") not in (
            "CallToolAction",
            "ListToolsAction",
        ):
            return [Tool("step", "Take one step.", _without_metadata(schema), self._step)]
        found = self._env.step({"type": _LIST}).observation.get("tools", [])
        return [
            Tool(tool["name"], tool["description"], tool["input_schema"] or _NOTHING, partial(self._use, tool["name"]))
            for tool in found
        ]

    def _use(self, name: str, arguments: dict[str, Any]) -> Result:
        """Raises: as `_step`."""
        return self._step({"type": _CALL, "tool_name": name, "arguments": arguments})

    def _for_grader(self) -> list[Tool]:
        return [
            Tool("state", "The state of the server.", _NOTHING, self._state),
            Tool("finish", "End the episode.", _NOTHING, self._finish),
        ]

    def _step(self, action: dict[str, Any]) -> Result:
        """Raises: Refused if the server rejects the action."""
        if self.is_over:
            raise Refused(over(""))
        try:
            found = self._env.step(action)
        except RuntimeError as error:  # an answer of type `error`
            raise Refused(str(error)) from error
        reward, self._before = _sum(self._before, found.reward), None
        self.is_over = bool(found.done)
        text = _text(found.observation)
        return Result(over(text) if found.done else text, reward, self.is_over)

    def _state(self, _: dict[str, Any]) -> Result:
        return Result(json.dumps(self._env.state()))

    def _finish(self, _: dict[str, Any]) -> Result:
        self.is_over = True
        self._env.close()
        return Result("closed", done=True)


def _sum(one: float | None, other: float | None) -> float | None:
    """The sum; None only if both are None."""
    return None if one is None and other is None else float(one or 0.0) + float(other or 0.0)


def _without_metadata(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without `metadata`, which every action has and which is meant for programs."""
    properties = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    return {**schema, "properties": properties}


def _text(observation: dict[str, Any]) -> str:
    shown = {key: value for key, value in observation.items() if key != "metadata"}
    return json.dumps(shown, ensure_ascii=False)


begin = OpenEnvSession
