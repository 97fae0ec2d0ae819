"""Converts a task's agent between Polar's fields and ours; pure.

Source: Polar, 3.2.1 (MCP servers); its published `AgentSpec` and harness `shell`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.agents.harnesses.shared.environment import PLACEHOLDERS, mentions
from gangline.domain.errors import InvalidRequest
from gangline.interop.polar.commands import added, surrounded
from gangline.interop.polar.runtimes import given_fields

_SHELL = ["bash", "-lc"]
"""The shell with which a gateway runs commands."""
_COMMAND = "POLAR_SHELL_COMMAND"
"""Carries a command that contains the placeholders that harness `shell` would replace."""
_HTTP_TRANSPORTS = ("http", "streamable-http", "streamable_http")
_FIELDS = ("harness", "model_name", "settings", "env")


def agent_from_polar(given: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    agent = given_fields(given)
    if "import_path" in agent:
        raise InvalidRequest(
            "agent.import_path: a task brings no code to our nodes. Publish the class as a harness plug-in "
            "(docs/guides/plugins.md) and name it in agent.harness, or run its program by harness `shell`."
        )
    if agent.get("harness") == "shell" and isinstance(shell := agent.get("custom_shell"), dict):
        del agent["custom_shell"]
        _set_program(agent, cast("dict[str, Any]", shell))
    if isinstance(settings := agent.get("settings"), dict):
        agent["settings"] = _settings(agent, cast("dict[str, Any]", settings))
    if isinstance(servers := agent.get("mcp_servers"), list):
        named = [_mcp_server(index, server) for index, server in enumerate(cast("list[Any]", servers))]
        agent["mcp_servers"] = dict(named)
        if len(agent["mcp_servers"]) < len(named):
            raise InvalidRequest("agent.mcp_servers: two servers have the same name.")
    return agent


def agent_for_gateway(agent: Mapping[str, Any]) -> dict[str, Any]:
    """agent: an `AgentSpec`, as JSON data. Fields unknown to Polar are omitted."""
    words = {name: agent[name] for name in _FIELDS if agent.get(name)}
    servers: dict[str, dict[str, Any]] = agent.get("mcp_servers") or {}
    if servers:
        words["mcp_servers"] = [_server_in_words(name, server) for name, server in servers.items()]
    if words.get("harness") == "shell":
        match words.get("settings", {}).get("command"):
            case ["bash", "-lc", str(command)]:
                words["custom_shell"] = {"command": command}
                words["settings"] = {name: value for name, value in words["settings"].items() if name != "command"}
            case _:
                pass
    return words


def _settings(agent: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts settings of Polar's harnesses to ours; some become fields of the agent. Raises: InvalidRequest."""
    settings = dict(given)
    if "response_token_budget" in settings:
        raise InvalidRequest(
            "agent.settings.response_token_budget: is not supported; write agent.max_sampled_tokens instead."
        )
    if agent.get("harness") == "mini_swe_agent":
        if settings.pop("cost_limit", 0) != 0:
            raise InvalidRequest(
                "agent.settings.cost_limit: calls to your engine have no price; leave it out, or limit agent.max_turns."
            )
        if (attempts := settings.pop("model_retry_attempts", None)) is not None:
            added(agent, "env", {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(attempts)})
    if agent.get("harness") == "codex" and (summary := settings.pop("reasoning_summary", None)) is not None:
        added(settings, "config", {"model_reasoning_summary": summary})
    return settings


def _set_program(agent: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Raises: InvalidRequest."""
    command, env = given.get("command"), cast("Any", given.get("env") or {})
    if not isinstance(command, str) or not isinstance(env, dict):
        raise InvalidRequest("agent.custom_shell: must have a `command`, and its `env` must be an object.")
    command = surrounded(command, given.get("cwd"), cast("dict[str, Any]", env))
    if any(mentions(command, name) for name in PLACEHOLDERS):  # there it is ordinary text
        added(agent, "env", {_COMMAND: command}, wins=True)
        command = f'eval "${_COMMAND}"'
    added(agent, "settings", {"command": [*_SHELL, command]}, wins=True)


def _mcp_server(index: int, given: Any) -> tuple[str, Any]:
    """Converts a server of a list, which contains its own name and has a command's arguments in a separate field.

    Raises: InvalidRequest.
    """
    where = f"agent.mcp_servers.{index}"
    if not isinstance(given, dict) or not isinstance(cast("dict[str, Any]", given).get("name"), str):
        raise InvalidRequest(f"{where}: must be an object with a `name`.")
    server = given_fields(cast("dict[str, Any]", given))
    name = server.pop("name")
    transport = server.pop("transport", server.pop("type", None))
    if transport not in (None, "stdio", *_HTTP_TRANSPORTS):
        raise InvalidRequest(f"{where}: transport must be stdio or http (streamable HTTP), got {transport!r:.40}.")
    args = server.pop("args", [])
    if isinstance(command := server.get("command"), str) and isinstance(args, list):
        server["command"] = [command, *cast("list[Any]", args)]
    elif args:
        server["args"] = args  # refused by name
    return name, server


def _server_in_words(name: str, server: Mapping[str, Any]) -> dict[str, Any]:
    if server.get("url") is not None:
        return {"name": name, "transport": "streamable-http", "url": server["url"]}
    program, *args = server["command"]
    return {"name": name, "transport": "stdio", "command": program, "args": args}
