"""All environments of one session, from INIT to the end of POSTRUN. They end with the node: see `adoption`.

Each call of an environment is matched to the model's turn that made it. A harness gives a tool its own name
(`mcp__game__step`, `game__step`) and calls it after the turn that asked for it. So a call belongs to the latest turn
that began before it and has a call of the tool with the same arguments that no earlier call was matched to. If there is
none, it belongs to the last turn that had ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.conversation import ToolCall
from gangline.domain.environment import EnvironmentCall
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import McpServer, RuntimeSpec, TaskRequest
from gangline.node.environments.world import World
from gangline.settings import plugins

RECORD = "environment.jsonl"
"""Artifact with the agent's calls."""
_MAX_RECORD_BYTES = 4 << 20


def with_turns(calls: Iterable[EnvironmentCall], completions: Sequence[Completion]) -> list[EnvironmentCall]:
    """Returns the calls with their turns. completions: in commit order."""
    asked = [(completion, _asked(completion)) for completion in completions]
    found: list[EnvironmentCall] = []
    for call in calls:
        turn = _turn_of(call, asked)
        found.append(msgspec.structs.replace(call, completion_id=None if turn is None else turn.completion_id))
    return found


def _turn_of(
    call: EnvironmentCall, asked: Sequence[tuple[Completion, list[tuple[str, Mapping[str, Any]]]]]
) -> Completion | None:
    """Returns the turn of a call. Removes the matching tool call from `asked`."""
    for completion, tool_calls in reversed(asked):
        if completion.started_at > call.began_at:
            continue
        for tool_call in tool_calls:
            name, arguments = tool_call
            if name.endswith(call.tool) and arguments == call.arguments:
                tool_calls.remove(tool_call)
                return completion
    ended = [completion for completion, _ in asked if completion.finished_at <= call.began_at]
    return max(ended, key=lambda completion: completion.finished_at, default=None)


def _asked(completion: Completion) -> list[tuple[str, Mapping[str, Any]]]:
    return [(part.name, _arguments(part.arguments)) for part in completion.response.parts if isinstance(part, ToolCall)]


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


class SessionEnvironments:
    """Call `start` to start them and `close` to end them all."""

    def __init__(self, task: TaskRequest, start_beside: Callable[[str, RuntimeSpec], Awaitable[Sandbox]]) -> None:
        """start_beside: starts a sandbox for a role; the caller stops it."""
        self._task = task
        self._start_beside = start_beside
        self._environments: dict[str, World] = {}

    async def start(self, agent: Sandbox, session_id: str, key: str | None) -> None:
        """Start all environments.

        agent: the agent's sandbox.
        session_id, key: for the environments' own model calls.

        Raises: EnvironmentFailed, InvalidRequest, PrepareFailed, and a runtime's errors.
        """
        for name, spec in self._task.environments.items():
            kind = plugins.make_environment(spec.kind, spec.config)
            beside = spec.runtime or _like(self._task.runtime)
            runtime = agent if spec.place == "inside" else await self._start_beside(f"world.{name}", beside)
            environment = self._environments[name] = World(
                name, spec, kind, runtime, _model_access(runtime, session_id, key)
            )
            await environment.start()

    @property
    def offered(self) -> Mapping[str, World]:
        """Environments with tools for the agent."""
        return {name: environment for name, environment in self._environments.items() if environment.tools}

    @property
    def all(self) -> Mapping[str, World]:
        return self._environments

    @property
    def instruction(self) -> str:
        """The task's instruction, followed by the environments' instructions."""
        shown = [
            environment.instructions
            for name, environment in self._environments.items()
            if self._task.environments[name].show_instructions and environment.instructions
        ]
        return "\n\n".join([text for text in (self._task.instruction, *shown) if text])

    def servers(self, base_url: str | None, key: str) -> dict[str, McpServer]:
        """Returns their tools as MCP servers for a program in the agent's sandbox.

        base_url: the session's, as seen from the sandbox; None if the sandbox does not reach the node, so that nothing
        in it could use them.
        """
        if not base_url:
            return {}
        headers = {"Authorization": f"Bearer {key}"}
        return {name: McpServer(url=f"{base_url}/mcp/{name}", headers=headers) for name in self.offered}

    async def fence(self) -> None:
        """Refuse further calls from the agent."""
        for environment in self._environments.values():
            await environment.fence()

    def record(self, completions: Sequence[Completion]) -> dict[str, bytes]:
        """Returns the artifact with all calls. Beyond 4 MiB, texts of results are left out."""
        calls = sorted(
            (call for environment in self._environments.values() for call in environment.calls), key=_ended_at
        )
        lines: list[bytes] = []
        num_bytes = 0
        for call in with_turns(calls, completions):
            line = msgspec.json.encode(call)
            if num_bytes + len(line) > _MAX_RECORD_BYTES:
                line = msgspec.json.encode(msgspec.structs.replace(call, text=""))
            lines.append(line + b"\n")
            num_bytes += len(line)
        return {RECORD: b"".join(lines)}

    async def close(self) -> None:
        for environment in self._environments.values():
            await environment.close()


def recorded_calls(artifacts: Mapping[str, bytes]) -> tuple[EnvironmentCall, ...]:
    """Returns the calls in a session's artifacts."""
    lines = artifacts.get(RECORD, b"").splitlines()
    return tuple(msgspec.json.decode(line, type=EnvironmentCall) for line in lines)


def _model_access(runtime: Sandbox, session_id: str, key: str | None) -> dict[str, str]:
    """Returns variables for an environment that calls models. Empty if its sandbox does not reach the node."""
    if not runtime.proxy_url or key is None:
        return {}
    return {"GANGLINE_BASE_URL": f"{runtime.proxy_url}/s/{session_id}", "GANGLINE_API_KEY": key}


def _ended_at(call: EnvironmentCall) -> float:
    return call.began_at + call.duration_s


def _like(agent: RuntimeSpec) -> RuntimeSpec:
    return agent.model_copy(update={"network": "none", "network_allow": (), "services": {}})
