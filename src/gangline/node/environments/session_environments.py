"""All environments of one session, from INIT to the end of POSTRUN. They end with the node: see `adoption`.

Each call of an environment is matched to the model's turn that made it. A harness gives a tool its own name
(`mcp__game__step`, `game__step`) and calls it after the turn that asked for it. So a call belongs to the latest turn
that began before it and has a call of the tool with the same arguments that no earlier call was matched to. If there is
none, it belongs to the last turn that had ended.

The agent reaches an environment's server only through `World`. So it can call no hidden tool, change no reward, and
make no unrecorded call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gangline.agents.tools.contract import ToolFailed
from gangline.agents.tools.mcp.connection import McpConnection, ServerFailed
from gangline.agents.tools.mcp.pipe import Pipe
from gangline.domain.completion import Completion
from gangline.domain.conversation import ToolCall
from gangline.domain.environment import CallResult, EnvironmentCall, EnvironmentKind, HasOpening, OfferedTool
from gangline.domain.errors import EnvironmentFailed, InvalidRequest, RuntimeFailed, SessionOver, ToolUnavailable
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import EnvironmentSpec, McpServer, RuntimeSpec, TaskRequest
from gangline.settings import plugins

if TYPE_CHECKING:
    from mcp import types as protocol


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


STEP = "gangline/step"
"""Name in `_meta` of a result: `{"reward": number or null, "done": bool}`."""
_MAX_TEXT_CHARS = 16_384


class _Step(msgspec.Struct):
    reward: float | None = None
    done: bool = False


class World:
    """Call `start`, then `call` for the agent, `fence` at its end, `ask` for the grader, and `close`."""

    def __init__(
        self,
        name: str,
        spec: EnvironmentSpec,
        kind: EnvironmentKind,
        runtime: Sandbox,
        model_access: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """runtime: where the server runs.
        model_access: variables with which the server calls models.
        """
        self.name = name
        self.instructions = ""
        self.tools: Sequence[OfferedTool] = ()
        self.hidden_tools: Mapping[str, OfferedTool] = {}
        self.failure: str | None = None
        self.calls: list[EnvironmentCall] = []
        """The agent's calls, in the order in which they ended."""
        self._spec = spec
        self._kind = kind
        self._runtime = runtime
        self._env = {**model_access, **kind.env}
        self._clock = clock
        self._server = McpConnection(name, start_s=spec.start_timeout_seconds)
        self._is_fenced = False
        self._in_flight: set[asyncio.Task[CallResult]] = set()

    async def start(self) -> None:
        """Start the server and separate hidden tools from offered ones. Raises: EnvironmentFailed."""
        await self._connect()
        hidden = {*self._spec.hidden_tools, *self._kind.hidden_tools}
        tools = [_offered(tool) for tool in self._server.tools]
        if unknown := sorted({*self._spec.hidden_tools} - {tool.name for tool in tools}):
            raise InvalidRequest(f"environments.{self.name}.hidden_tools: the server has no tool {unknown[0]!r}.")
        self.tools = [tool for tool in tools if tool.name not in hidden]
        self.hidden_tools = {tool.name: tool for tool in tools if tool.name in hidden}
        self.instructions = self._server.instructions

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """See `SessionEnvironment.call`."""
        if self._is_fenced:
            raise SessionOver("the session has ended")
        doing = asyncio.create_task(self._recorded(tool, arguments))
        self._in_flight.add(doing)
        try:
            return await doing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise SessionOver("the session has ended") from None
        finally:
            self._in_flight.discard(doing)

    async def ask(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """See `GradedEnvironment.ask`. Restarts a server that ended with the agent's processes."""
        if self._server.has_ended and self._spec.place == "inside":
            await self._server.close()
            self._server = McpConnection(self.name, start_s=self._spec.start_timeout_seconds)
            await self._connect()
        try:
            return await self._done(tool, arguments)
        except ToolFailed as error:
            raise EnvironmentFailed(f"environment {self.name!r}: {tool}: {error}") from error

    async def fence(self) -> None:
        """See `SessionEnvironment.fence`."""
        self._is_fenced = True
        for doing in self._in_flight:
            doing.cancel()
        if self._in_flight:
            await asyncio.wait(set(self._in_flight))
        if self._server.has_ended and self._spec.place == "beside":
            self.failure = self.failure or "its server has ended"

    async def close(self) -> None:
        """Stop the server. Idempotent."""
        await self.fence()
        await self._server.close()

    async def _connect(self) -> None:
        user = "grader" if self._spec.place == "inside" else "agent"
        try:
            pipe = await Pipe.start(self._runtime, self._kind.command, self._env, user)
            if isinstance(self._kind, HasOpening):
                await pipe.write(self._kind.opening)
            await self._server.start(pipe)
        except (ToolUnavailable, RuntimeFailed) as error:
            raise EnvironmentFailed(f"environment {self.name!r}: {error.message}") from error

    async def _recorded(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Raises: InvalidRequest, EnvironmentFailed."""
        began, why = self._clock(), "cancelled"
        result: CallResult | None = None
        try:
            result = await self._called_by_agent(tool, arguments)
            return result
        except (InvalidRequest, EnvironmentFailed) as error:
            why = error.message
            raise
        finally:
            self.calls.append(self._line(tool, arguments, result, why, began))

    async def _called_by_agent(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Raises: InvalidRequest, EnvironmentFailed."""
        if tool not in (offered := [one.name for one in self.tools]):
            raise InvalidRequest(f"there is no tool {tool[:100]!r}; there are: {', '.join(offered)}.")
        try:
            return await self._done(tool, arguments)
        except ServerFailed as error:
            self.failure = self.failure or str(error)
            raise EnvironmentFailed(str(error)) from error
        except ToolFailed as error:
            raise InvalidRequest(str(error)) from error

    async def _done(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Raises: ToolFailed."""
        found = await self._server.call(tool, dict(arguments), self._spec.call_timeout_seconds)
        return _result(found)

    def _line(
        self, tool: str, arguments: Mapping[str, Any], result: CallResult | None, why: str, began: float
    ) -> EnvironmentCall:
        """why: the reason for a missing result."""
        return EnvironmentCall(
            environment=self.name,
            tool=tool[:_MAX_TEXT_CHARS],
            arguments=arguments,
            text=(why if result is None else result.text)[:_MAX_TEXT_CHARS],
            is_error=result is None or result.is_error,
            reward=None if result is None else result.reward,
            done=result is not None and result.done,
            began_at=began,
            duration_s=self._clock() - began,
        )


def _offered(tool: protocol.Tool) -> OfferedTool:
    return OfferedTool(
        name=tool.name, description=tool.description or tool.title or "", parameters=dict(tool.input_schema)
    )


def _result(found: protocol.CallToolResult) -> CallResult:
    """Raises: ServerFailed when the step cannot be parsed or its reward is not finite."""
    raw: dict[str, Any] = found.model_dump(mode="json", by_alias=True, exclude_none=True)
    try:
        step = msgspec.convert((raw.get("_meta") or {}).get(STEP) or {}, _Step)
    except msgspec.ValidationError as error:
        raise ServerFailed(f"its step cannot be read: {error}") from error
    if step.reward is not None and not math.isfinite(step.reward):
        raise ServerFailed(f"its step has the reward {step.reward}, which is not finite")
    return CallResult(
        content=raw.get("content") or [],
        structured=raw.get("structuredContent"),
        is_error=bool(raw.get("isError")),
        reward=step.reward,
        done=step.done,
    )
