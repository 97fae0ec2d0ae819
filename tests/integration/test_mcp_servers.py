"""Tools of a real MCP server, made with the official SDK, in a sandbox without a network."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from gangline.agents.tools.calls import observe
from gangline.agents.tools.contract import Observation, ToolContext
from gangline.agents.tools.mcp.servers import mcp_tools
from gangline.domain.errors import ToolUnavailable
from gangline.domain.task import McpServer
from support.node.tools import tool_context
from support.requirements import need_module

SERVER = """
import os, sys, time
from mcp.server import MCPServer
from mcp.types import ImageContent, TextContent

server = MCPServer("notes")
notes = []

@server.tool(description="Write a note down.")
def add(text: str, times: int = 1) -> str:
    notes.extend([text] * times)
    return f"{len(notes)} notes, {os.environ.get('COLOR')}, {os.getcwd() == os.environ['HOME']}"

@server.tool(name="long.text")
def long_text(size: int) -> str:
    return "x" * size

@server.tool()
def fail() -> str:
    raise ValueError("no such note")

@server.tool()
def picture() -> list[TextContent | ImageContent]:
    image = ImageContent(type="image", data="aGk=", mime_type="image/png")
    return [TextContent(type="text", text="see"), image]

@server.tool()
def stop(how: str) -> str:
    if how == "sleep":
        time.sleep(1000)
    os._exit(3)

server.run()
"""


@pytest_asyncio.fixture
async def context(tmp_path: Path) -> AsyncGenerator[ToolContext]:
    need_module("mcp", "pip install 'gangline[mcp]'")
    async with tool_context(tmp_path) as context:
        await context.runtime.upload("server.py", SERVER.encode())
        yield context


NOTES = McpServer(command=(sys.executable, "server.py"), env={"COLOR": "red"})


async def test_tools_of_a_server_are_offered_and_called(context: ToolContext) -> None:
    async with mcp_tools({"notes": NOTES}, context) as tools:
        by_name = {tool.name: tool for tool in tools}

        async def call(name: str, **arguments: object) -> Observation:
            return await observe(by_name[f"notes__{name}"], arguments, context)

        assert list(by_name) == [f"notes__{name}" for name in ("add", "long_text", "fail", "picture", "stop")]
        add = by_name["notes__add"]
        assert add.description == "Write a note down."
        assert add.parameters["properties"]["text"]["type"] == "string"
        assert add.parameters["required"] == ["text"]
        assert (await call("add", text="a")).content.startswith("1 notes, red")
        assert (await call("add", text="b", times=2)).content.startswith("3 notes, red")
        wrong = await call("add", times="many")
        assert wrong.is_error
        assert "text" in wrong.content
        seen = await call("fail")
        assert (seen.is_error, "fail" in seen.content) == (True, True)
        long = (await call("long_text", size=1 << 20)).content
        assert len(long) < context.max_output_bytes + 100
        assert " bytes left out]" in long
        assert (await call("picture")).content == "see\n[1 part left out that are not text]"
        ended = await call("stop", how="exit")
        assert ended.is_error
        again = await call("add", text="c")
        assert again.content.startswith("error: the server of this tool has ended: exit code 3")


async def test_a_server_that_does_not_answer_is_given_up_and_killed(context: ToolContext) -> None:
    short = msgspec.structs.replace(context, command_timeout_s=0.2)
    async with mcp_tools({"notes": NOTES}, context) as tools:
        seen = await observe(tools[-1], {"how": "sleep"}, short)
    assert (seen.content, seen.is_error) == ("error: the tool gave no answer within 0.2 s", True)
    left = await context.runtime.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])
    assert b"server.py" not in left.stdout


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (McpServer(command=("no-such-program",)), "did not start"),
        (McpServer(command=("sh", "-c", "echo broken >&2; exit 4")), r"exit code 4 \(broken\)"),
        (McpServer(url="http://127.0.0.1/mcp"), "Add http://127.0.0.1/mcp to the node's `mcp_servers`"),
    ],
)
async def test_a_server_that_does_not_start_is_named(context: ToolContext, server: McpServer, why: str) -> None:
    with pytest.raises(ToolUnavailable, match=why):
        async with mcp_tools({"broken": server}, context):
            pass
