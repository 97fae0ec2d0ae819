"""One environment of one session: its server, and each call of its tools.

The agent reaches the server only through this class. So it can call no hidden tool, change no reward, and make no
unrecorded call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gangline.agents.tools.contract import ToolFailed
from gangline.agents.tools.mcp.connection import McpConnection, ServerFailed
from gangline.agents.tools.mcp.pipe import Pipe
from gangline.domain.environment import CallResult, EnvironmentCall, EnvironmentKind, HasOpening, OfferedTool
from gangline.domain.errors import EnvironmentFailed, InvalidRequest, RuntimeFailed, SessionOver, ToolUnavailable
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import EnvironmentSpec

if TYPE_CHECKING:  # needs the extra `mcp`
    from mcp import types as protocol

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
