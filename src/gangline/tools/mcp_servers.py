"""Tools of MCP servers: programs in the sandbox (`mcp_pipe`), or URLs that the node's operator has named (`mcp_http`).

The session with a server is the official SDK's (extra `gangline[mcp]`). All its answers are claims: descriptions and
results are bounded, and every call has a time limit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from gangline.domain.errors import InvalidRequest, ToolUnavailable
from gangline.domain.task import McpServer
from gangline.installation import extra_command
from gangline.tools.contract import NoConfig, Observation, Tool, ToolContext, ToolFailed
from gangline.tools.mcp_http import ByUrl
from gangline.tools.mcp_pipe import Pipe

if TYPE_CHECKING:  # it needs the extra `mcp`
    from mcp import ClientSession
    from mcp import types as protocol

__all__ = ["mcp_tools"]

_START_S = 60.0
_END_S = 5.0
_MAX_TOOLS = 128
_MAX_DESCRIPTION_CHARS = 4096
_MAX_SAID = 500
_MAX_NAME_CHARS = 64


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
    """Start a task's servers in its sandbox, or connect with them, and yield their tools.

    Raises: ToolUnavailable when a server does not start, has no usable tools, or has a URL that is not allowed.
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
        self._way: Pipe | ByUrl | None = None
        self._session: ClientSession | None = None
        self._living: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def start(self, server: McpServer, context: ToolContext) -> list[protocol.Tool]:
        """Its tools. Raises: ToolUnavailable."""
        try:
            self._way = await Pipe.start(server, context) if not server.url else ByUrl(self.name, server.url, context)
        except InvalidRequest as error:
            raise ToolUnavailable(f"MCP server {self.name!r} cannot be used: {error}") from error
        ready: asyncio.Future[list[protocol.Tool]] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(self._way, ready))
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
        """End the session, and a server in the sandbox. Idempotent."""
        self._over.set()
        if self._way is not None:
            await self._way.close()
        if self._living is not None:
            await asyncio.wait({self._living}, timeout=_END_S)
            self._living.cancel()
            await asyncio.wait({self._living})
            if not self._living.cancelled():
                self._living.exception()  # its calls have reported it

    async def _live(self, way: Pipe | ByUrl, ready: asyncio.Future[list[protocol.Tool]]) -> None:
        try:
            from mcp import ClientSession  # noqa: PLC0415 - of the extra `mcp`
        except ModuleNotFoundError as error:
            raise ToolUnavailable(f"{error.name} is not installed. Run: {extra_command('mcp')}") from error
        async with (
            way.opened(self._over) as (from_server, to_server),
            ClientSession(from_server, to_server) as self._session,
        ):
            await self._session.initialize()
            ready.set_result((await self._session.list_tools()).tools[:_MAX_TOOLS])
            await self._over.wait()

    async def _end(self) -> str:
        assert self._way is not None
        return await self._way.end()
