"""Tools of a real MCP server over streamable HTTP, made with the official SDK, for an agent in the node."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from pydantic import ValidationError

from gangline.agents.tools.calls import observe
from gangline.agents.tools.contract import ToolContext
from gangline.agents.tools.mcp.servers import mcp_tools
from gangline.domain.errors import ToolUnavailable
from gangline.domain.mcp_source import McpSource
from gangline.domain.task import McpServer
from gangline.node.sessions.attempt import Attempt
from gangline.settings.node import NodeSettings
from support.node.attempt import lease_of, node_parts
from support.node.tools import tool_context
from support.requirements import need_module

KEY = "a-key"


class Notes:
    """A server with a key, and the methods and keys of the requests that it got."""

    def __init__(self) -> None:
        from mcp.server import MCPServer

        self.seen: list[tuple[str, str]] = []
        self.url = ""
        server = MCPServer("notes")

        @server.tool(description="Write a note down.")
        def add(text: str) -> str:
            return f"noted: {text}"

        @server.tool()
        def sleep() -> str:
            time.sleep(1)
            return "late"

        assert add
        assert sleep
        self._app: Any = server.streamable_http_app()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            self.seen.append((scope["method"], given))
            if given != f"Bearer {KEY}":
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"no"})
                return
        await self._app(scope, receive, send)


@contextmanager
def running(notes: Notes) -> Generator[None]:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(notes, port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        notes.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
        yield
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Generator[Notes]:
    need_module("mcp", "pip install 'gangline[mcp]'")
    monkeypatch.setenv("NOTES_KEY", KEY)
    notes = Notes()
    with running(notes):
        yield notes


@pytest_asyncio.fixture
async def context(tmp_path: Path, notes: Notes) -> AsyncGenerator[ToolContext]:
    """Of a task without a network, on a node whose operator has named the server."""
    source = McpSource(url=notes.url, key_env="NOTES_KEY", for_offline_tasks=True)
    async with tool_context(tmp_path) as context:
        yield msgspec.structs.replace(context, mcp_sources={"any name": source})


async def test_its_tools_are_called_by_the_node_with_the_nodes_key(notes: Notes, context: ToolContext) -> None:
    async with mcp_tools({"notes": McpServer(url=notes.url)}, context) as tools:
        assert [tool.name for tool in tools] == ["notes__add", "notes__sleep"]
        assert tools[0].description == "Write a note down."
        seen = await observe(tools[0], {"text": "a"}, context)
        assert (seen.content, seen.is_error) == ("noted: a", False)
        short = msgspec.structs.replace(context, command_timeout_s=0.1)
        late = await observe(tools[1], {}, short)
        assert (late.content, late.is_error) == ("error: the tool gave no answer within 0.1 s", True)
    assert {key for _, key in notes.seen} == {f"Bearer {KEY}"}
    assert notes.seen[-1][0] == "DELETE", "the session on the server is ended too"


async def test_a_server_that_goes_away_is_an_observation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_module("mcp", "pip install 'gangline[mcp]'")
    monkeypatch.setenv("NOTES_KEY", KEY)
    notes = Notes()
    async with tool_context(tmp_path) as context:
        with running(notes):
            source = McpSource(url=notes.url, key_env="NOTES_KEY", for_offline_tasks=True)
            context = msgspec.structs.replace(context, mcp_sources={"notes": source}, command_timeout_s=5.0)
            opened = mcp_tools({"notes": McpServer(url=notes.url)}, context)
            tools = await opened.__aenter__()
        try:
            seen = await observe(tools[0], {"text": "a"}, context)
            assert seen.is_error
        finally:
            await opened.__aexit__(None, None, None)


async def test_a_session_uses_the_server_that_its_operator_has_named(tmp_path: Path, notes: Notes) -> None:
    """The whole way: the node's setting, the task's URL, the model's call."""
    agent = {"harness": "native", "mcp_servers": {"notes": {"url": notes.url}}}
    calls = [{"name": "notes__add", "arguments": {"text": "a"}}]
    rules = [
        {"turn": 0, "pattern": "^say hi$", "tool_calls": calls},
        {"pattern": "^noted: a$", "text": "it is noted"},
        {"pattern": ".", "text": "what?"},
    ]
    settings = NodeSettings.model_validate(
        {"mcp_servers": {"notes": {"url": notes.url, "key_env": "NOTES_KEY", "for_offline_tasks": True}}}
    )
    async with node_parts(tmp_path, script={"rules": rules}) as parts:
        parts = msgspec.structs.replace(parts, mcp_sources=settings.sources_of_mcp())
        result = await Attempt(lease_of(agent=agent), parts).live()
    assert (result.outcome, result.artifacts["harness.stdout"]) == ("completed", b"it is noted"), result.failure


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"url": "http://127.0.0.1:1/mcp"}, "Add http://.* to the node's `mcp_servers`"),
        ({"for_offline_tasks": False}, "the task's network is `none`"),
        ({"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"key_env": None}, "does not let this node in"),
    ],
)
async def test_a_url_that_may_not_be_used_is_named(
    notes: Notes, context: ToolContext, change: dict[str, Any], why: str
) -> None:
    source = msgspec.structs.replace(context.mcp_sources["any name"], **change)
    context = msgspec.structs.replace(context, mcp_sources={"notes": source})
    with pytest.raises(ToolUnavailable, match=why):
        async with mcp_tools({"notes": McpServer(url=notes.url)}, context):
            pass


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        ({"notes": {"url": "ftp://x"}}, "notes: url must begin with http"),
        ({"notes": {}}, "url"),
        ({"notes": {"url": "http://x", "key": "secret"}}, "key"),
    ],
)
def test_a_mistake_in_the_nodes_mcp_servers_is_named(servers: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        NodeSettings(mcp_servers=servers)
