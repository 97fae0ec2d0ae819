"""The session with one MCP server, over a pipe or HTTP, using the official SDK (extra `gangline[mcp]`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from gangline.agents.tools.contract import ToolFailed
from gangline.domain.errors import ToolUnavailable
from gangline.settings.installation import extra_command

if TYPE_CHECKING:  # it needs the extra `mcp`
    from mcp import ClientSession
    from mcp import types as protocol

_START_S = 60.0
_END_S = 5.0
_MAX_SAID = 500
_MAX_NAME_CHARS = 64
_INTERNAL_ERROR = -32603
"""A JSON-RPC error code."""


class ServerFailed(ToolFailed):
    """A tool's server has ended, does not answer, or reports an internal error."""


def name_for_models(server: str, tool: str) -> str:
    """`server__tool`, restricted to the characters that model APIs accept."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{tool}")[:_MAX_NAME_CHARS]


def shown(blocks: Sequence[Mapping[str, Any]]) -> str:
    """The text of a result's content blocks, for the model."""
    texts = [block["text"] for block in blocks if block.get("type") == "text"]
    if num_others := len(blocks) - len(texts):
        texts.append(f"[{num_others} part{'s' if num_others > 1 else ''} left out that are not text]")
    return "\n".join(texts)


class Way(Protocol):
    """Transport of a session's messages: see `Pipe`, `ByUrl`."""

    def opened(self, over: asyncio.Event) -> AbstractAsyncContextManager[tuple[Any, Any]]: ...

    async def end(self) -> str: ...

    async def close(self) -> None: ...


class McpConnection:
    """A server and its session, in a separate task as the SDK's task groups require."""

    def __init__(self, name: str, *, start_s: float = _START_S) -> None:
        self.name = name
        self.tools: list[protocol.Tool] = []
        self.instructions = ""
        """The server's instructions for the model."""
        self._start_s = start_s
        self._way: Way | None = None
        self._session: ClientSession | None = None
        self._living: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._over.is_set()

    async def start(self, way: Way) -> None:
        """Start the session and list the server's tools. Raises: ToolUnavailable."""
        self._way = way
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(way, ready))
        await asyncio.wait((self._living, ready), return_when=asyncio.FIRST_COMPLETED, timeout=self._start_s)
        if ready.done():
            return
        if not self._living.done():
            raise ToolUnavailable(f"MCP server {self.name!r} did not start within {self._start_s:g} s")
        if isinstance(error := self._living.exception(), ToolUnavailable):
            raise error
        raise ToolUnavailable(f"MCP server {self.name!r} did not start: {await self._end()}")

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> protocol.CallToolResult:
        """Raises: ServerFailed; ToolFailed if the server rejects the call."""
        import anyio  # noqa: PLC0415 - the extra is there by now
        from mcp import MCPError  # noqa: PLC0415

        assert self._session is not None
        if self._over.is_set():
            raise ServerFailed(f"the server of this tool has ended: {await self._end()}")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._session.call_tool(tool, arguments)
        except TimeoutError:
            raise ServerFailed(f"the tool gave no answer within {timeout_s:g} s") from None
        except (MCPError, RuntimeError, ValueError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            is_refusal = isinstance(error, MCPError) and error.code != _INTERNAL_ERROR and not self._over.is_set()
            why = await self._end() if self._over.is_set() else str(error)[:_MAX_SAID]
            raise (ToolFailed if is_refusal else ServerFailed)(f"the server of this tool failed: {why}") from None

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
                self._living.exception()  # already reported by its calls

    async def _live(self, way: Way, ready: asyncio.Future[None]) -> None:
        try:
            from mcp import ClientSession  # noqa: PLC0415 - of the extra `mcp`
        except ModuleNotFoundError as error:
            raise ToolUnavailable(f"{error.name} is not installed. Run: {extra_command('mcp')}") from error
        async with (
            way.opened(self._over) as (from_server, to_server),
            ClientSession(from_server, to_server) as self._session,
        ):
            self.instructions = (await self._session.initialize()).instructions or ""
            self.tools = (await self._session.list_tools()).tools
            ready.set_result(None)
            await self._over.wait()

    async def _end(self) -> str:
        assert self._way is not None
        return await self._way.end()
