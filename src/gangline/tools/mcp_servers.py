"""Tools of MCP servers: programs in the sandbox that speak the Model Context Protocol over their standard streams.

A server runs as the agent's user behind a channel of the runtime, which is its stdin and stdout. The session with it is
the official SDK's (extra `gangline[mcp]`), over our channel. All its answers are the agent's claims: lines,
descriptions and results are bounded, and every call has a time limit.

Servers that a task names by URL are refused: the node would be a way out of the sandbox.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from gangline.domain.contracts import Channel
from gangline.domain.errors import RuntimeFailed, ToolUnavailable
from gangline.domain.task import McpServer
from gangline.installation import extra_command
from gangline.tools.contract import NoConfig, Observation, Tool, ToolContext, ToolFailed

if TYPE_CHECKING:  # it needs the extra `mcp`
    from mcp import ClientSession
    from mcp import types as protocol
    from mcp.shared.message import SessionMessage

__all__ = ["mcp_tools"]

_START_S = 60.0
_END_S = 5.0
_MAX_LINE_BYTES = 8 << 20
_MAX_TOOLS = 128
_MAX_DESCRIPTION_CHARS = 4096
_MAX_SAID = 500
_MAX_NAME_CHARS = 64
_ON_ITS_STREAMS = 'exec "$@" <&3 >&3 3<&-'


class McpTool(Tool):
    """One tool of a server."""

    Config: ClassVar[type[BaseModel]] = NoConfig

    def __init__(self, server: _Connection, tool: protocol.Tool) -> None:
        self._server = server
        self._tool = tool.name
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server.name}__{tool.name}")[:_MAX_NAME_CHARS]
        """`server__tool`, in the characters that model APIs take."""
        self.description = (tool.description or tool.title or "")[:_MAX_DESCRIPTION_CHARS]
        self.parameters = tool.input_schema

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        result = await self._server.call(self._tool, dict(arguments), context.command_timeout_s)
        texts = [block.text for block in result.content if block.type == "text"]
        if num_others := len(result.content) - len(texts):
            texts.append(f"[{num_others} part{'s' if num_others > 1 else ''} left out that are no text]")
        return Observation(content="\n".join(texts), is_error=bool(result.is_error))


@asynccontextmanager
async def mcp_tools(servers: Mapping[str, McpServer], context: ToolContext) -> AsyncGenerator[list[Tool]]:
    """Start a task's servers in its sandbox, and yield their tools.

    Raises: ToolUnavailable when a server does not start, has no usable tools, or is named by URL.
    """
    async with AsyncExitStack() as running:
        tools: list[Tool] = []
        for name, server in servers.items():
            connection = _Connection(name)
            running.push_async_callback(connection.close)
            tools += [McpTool(connection, tool) for tool in await connection.start(server, context)]
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ToolUnavailable(f"two tools of MCP servers would have the name {twice[0]!r}")
        yield tools


class _Connection:
    """A server, and the session with it in a task of its own, as the SDK's task groups need."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._channel: Channel | None = None
        self._session: ClientSession | None = None
        self._living: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def start(self, server: McpServer, context: ToolContext) -> list[protocol.Tool]:
        """Its tools. Raises: ToolUnavailable."""
        if server.url is not None:
            raise ToolUnavailable(f"MCP server {self.name!r}: an agent in the node uses servers with a command only")
        command = ["sh", "-c", _ON_ITS_STREAMS, "sh", *server.command]
        self._channel = await context.runtime.channel(command, env={**context.env, **server.env})
        ready: asyncio.Future[list[protocol.Tool]] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(self._channel, ready))
        await asyncio.wait((self._living, ready), return_when=asyncio.FIRST_COMPLETED, timeout=_START_S)
        if ready.done():
            return ready.result()
        if not self._living.done():
            raise ToolUnavailable(f"MCP server {self.name!r} did not start within {_START_S:g} s")
        if isinstance(error := self._living.exception(), ToolUnavailable):
            raise error
        raise ToolUnavailable(f"MCP server {self.name!r} did not start: {await self._end()}")

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> protocol.CallToolResult:
        """Raises: ToolFailed."""
        import anyio  # noqa: PLC0415 - the extra is there by now
        from mcp import MCPError  # noqa: PLC0415

        assert self._session is not None
        if self._over.is_set():
            raise ToolFailed(f"the server of this tool has ended: {await self._end()}")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._session.call_tool(tool, arguments)
        except TimeoutError:
            raise ToolFailed(f"the tool gave no answer within {timeout_s:g} s") from None
        except (MCPError, RuntimeError, ValueError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            why = await self._end() if self._over.is_set() else str(error)[:_MAX_SAID]
            raise ToolFailed(f"the server of this tool failed: {why}") from None

    async def close(self) -> None:
        """Kill the server. Idempotent."""
        self._over.set()
        if self._channel is not None:
            await self._channel.close()
        if self._living is not None:
            self._living.cancel()
            await asyncio.wait({self._living})
            if not self._living.cancelled():
                self._living.exception()  # its calls have reported it

    async def _live(self, channel: Channel, ready: asyncio.Future[list[protocol.Tool]]) -> None:
        try:
            import anyio  # noqa: PLC0415 - these need the extra `mcp`
            from mcp import ClientSession  # noqa: PLC0415
            from mcp.shared.message import SessionMessage  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ToolUnavailable(f"{error.name} is not installed. Run: {extra_command('mcp')}") from error
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        async with asyncio.TaskGroup() as pumps:
            reading = pumps.create_task(_read(channel, to_session))
            reading.add_done_callback(lambda _: self._over.set())
            writing = pumps.create_task(_write(channel, from_session))
            try:
                async with ClientSession(from_server, to_server) as self._session:
                    await self._session.initialize()
                    ready.set_result((await self._session.list_tools()).tools[:_MAX_TOOLS])
                    await self._over.wait()
            finally:
                reading.cancel()
                writing.cancel()

    async def _end(self) -> str:
        """How the server ended, with its last words on stderr."""
        assert self._channel is not None
        try:
            async with asyncio.timeout(_END_S):
                end = await self._channel.ended()
        except (TimeoutError, RuntimeFailed):
            return "it runs, and speaks no MCP"
        said = end.stderr[-_MAX_SAID:].decode(errors="replace").strip()
        return f"exit code {end.exit_code}" + (f" ({said})" if said else "")


async def _read(channel: Channel, to_session: Any) -> None:
    """Messages of the server, one a line. Returns at the stream's end, and when a line is too long."""
    import anyio  # noqa: PLC0415 - as below

    kept = bytearray()
    async with to_session:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session is over
            while (piece := await channel.read()) and len(kept) <= _MAX_LINE_BYTES:
                kept += piece
                if b"\n" not in piece:
                    continue
                *lines, rest = bytes(kept).split(b"\n")
                kept = bytearray(rest)
                for line in lines:
                    await to_session.send(_parsed(line))


def _parsed(line: bytes) -> SessionMessage | ValueError:
    from mcp import types  # noqa: PLC0415 - as below
    from mcp.shared.message import SessionMessage  # noqa: PLC0415

    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _write(channel: Channel, from_session: Any) -> None:
    async with from_session:
        async for message in from_session:
            data = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            with suppress(RuntimeFailed):  # its end is seen by the reader
                await channel.write(data.encode() + b"\n")
