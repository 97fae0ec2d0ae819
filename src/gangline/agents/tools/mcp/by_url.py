"""The way to an MCP server over streamable HTTP, which the node dials.

That is a way out of the sandbox, into whatever network the node has. So a URL must be one that the node's operator has
named, and the server gets the key that goes with it, and nothing of the session but the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from gangline.agents.tools.contract import ToolContext
from gangline.domain.errors import ToolUnavailable
from gangline.domain.mcp_source import McpSource
from gangline.domain.task import McpServer
from gangline.settings.machine import read_secret

__all__ = ["ByUrl"]

_CONNECT_S = 10.0


class ByUrl:
    """The server keeps a session for us until `opened` ends."""

    def __init__(self, name: str, server: McpServer, context: ToolContext) -> None:
        """Raises: ToolUnavailable when the session may not use the URL; InvalidRequest when there is no key."""
        assert server.url is not None
        source = _allowed(name, server.url, context)
        self._url = server.url
        key = None if source.key_env is None else read_secret(source.key_env)
        self._headers = server.headers | ({} if key is None else {"Authorization": f"Bearer {key}"})

    @asynccontextmanager
    async def opened(self, over: asyncio.Event) -> AsyncGenerator[tuple[Any, Any]]:
        """See `Pipe.opened`; `over` is never set, since a server that is gone may come back."""
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
        """There is nothing of it to end but the session."""


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
