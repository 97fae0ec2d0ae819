"""Tools of MCP servers: programs in the sandbox (`pipe`), or URLs that the node's operator allows.

Sessions use the official SDK (extra `gangline[mcp]`). All answers are untrusted: descriptions and results are bounded,
and every call has a time limit.

A server over streamable HTTP is contacted by the node. That is a way out of the sandbox, into any network of the node.
The URL must therefore be allowed by the node's operator. The server gets the key configured for it, and nothing of the
session except the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from gangline.agents.tools.contract import NoConfig, Observation, Tool, ToolContext
from gangline.agents.tools.mcp.connection import McpConnection, name_for_models, shown
from gangline.agents.tools.mcp.pipe import Pipe
from gangline.domain.errors import InvalidRequest, ToolUnavailable
from gangline.domain.mcp_source import McpSource
from gangline.domain.task import McpServer
from gangline.settings.machine import read_secret

if TYPE_CHECKING:
    from mcp import types as protocol

_MAX_TOOLS = 128
_MAX_DESCRIPTION_CHARS = 4096

_CONNECT_S = 10.0


class ByUrl:
    """The server keeps a session for us until `opened` ends."""

    def __init__(self, name: str, server: McpServer, context: ToolContext) -> None:
        """Raises: ToolUnavailable if the session may not use the URL; InvalidRequest if the key is missing."""
        assert server.url is not None
        source = _allowed(name, server.url, context)
        self._url = server.url
        key = None if source.key_env is None else read_secret(source.key_env)
        self._headers = server.headers | ({} if key is None else {"Authorization": f"Bearer {key}"})

    @asynccontextmanager
    async def opened(self, over: asyncio.Event) -> AsyncGenerator[tuple[Any, Any]]:
        """See `Pipe.opened`. `over` is never set, since an unreachable server may come back."""
        import httpx2  # noqa: PLC0415 - of the extra `mcp`
        from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

        timeout = httpx2.Timeout(None, connect=_CONNECT_S)  # a call has its own
        async with (
            httpx2.AsyncClient(headers=self._headers, timeout=timeout, trust_env=False) as http,
            streamable_http_client(self._url, http_client=http) as streams,
        ):
            yield streams[0], streams[1]

    async def end(self) -> str:
        return f"{self._url} speaks no MCP, or does not let this node in"

    async def close(self) -> None:
        """Does nothing: only the session has to be ended."""


def _allowed(name: str, url: str, context: ToolContext) -> McpSource:
    """Raises: ToolUnavailable."""
    source = next((source for source in context.mcp_sources.values() if source.url == url), None)
    if source is None:
        raise ToolUnavailable(
            f"MCP server {name!r}: an agent in the node uses commands in its sandbox, and URLs that the node's operator"
            f" has named. Add {url} to the node's `mcp_servers`."
        )
    if context.network != "full" and not source.for_offline_tasks:
        raise ToolUnavailable(
            f"MCP server {name!r} is outside of the sandbox, and the task's network is `{context.network}`. Give the"
            " task network `full`, or set `for_offline_tasks` in the node's `mcp_servers`."
        )
    return source


class McpTool(Tool):
    """One tool of a server."""

    Config: ClassVar[type[BaseModel]] = NoConfig

    def __init__(self, server: McpConnection, tool: protocol.Tool) -> None:
        self._server = server
        self._tool = tool.name
        self.name = name_for_models(server.name, tool.name)
        self.description = (tool.description or tool.title or "")[:_MAX_DESCRIPTION_CHARS]
        self.parameters = tool.input_schema

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        result = await self._server.call(self._tool, dict(arguments), context.command_timeout_s)
        return Observation(content=shown([block.model_dump() for block in result.content]), is_error=result.is_error)


@asynccontextmanager
async def mcp_tools(servers: Mapping[str, McpServer], context: ToolContext) -> AsyncGenerator[list[Tool]]:
    """Start a task's servers in its sandbox, or connect to them, and yield their tools.

    Raises: ToolUnavailable if a server does not start, has no usable tools, or has a URL that is not allowed.
    """
    async with AsyncExitStack() as running:
        tools: list[Tool] = []
        for name, server in servers.items():
            connection = McpConnection(name)
            running.push_async_callback(connection.close)
            await connection.start(await _way_to(name, server, context))
            tools += [McpTool(connection, tool) for tool in connection.tools[:_MAX_TOOLS]]
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ToolUnavailable(f"two tools of MCP servers would have the name {twice[0]!r}")
        yield tools


async def _way_to(name: str, server: McpServer, context: ToolContext) -> Pipe | ByUrl:
    """Raises: ToolUnavailable."""
    try:
        if server.url is not None:
            return ByUrl(name, server, context)
        return await Pipe.start(context.runtime, server.command, {**context.env, **server.env})
    except InvalidRequest as error:
        raise ToolUnavailable(f"MCP server {name!r} cannot be used: {error}") from error
