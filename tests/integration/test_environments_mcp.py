"""MCP servers as environments: a real one, made with the official SDK, and the official client on the agent's side."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.environment import CallResult, OfferedTool
from gangline.domain.errors import EnvironmentFailed, InvalidRequest, UnknownPlugin
from gangline.domain.task import TaskRequest
from gangline.settings.plugins import check_task
from support.node.environments import calls_of, played, step_rewards, using
from support.node.proxy import proxied
from support.requirements import need_command, need_module

SERVER = """
import os, sys
from mcp.server import MCPServer
from mcp.types import CallToolResult, TextContent

server = MCPServer("vault", instructions="The vault has three digits.")
tries = []

def said(text, **step):
    return CallToolResult(content=[TextContent(type="text", text=text)], _meta={"gangline/step": step})

@server.tool(description="Try a number.")
def turn(number: int) -> CallToolResult:
    tries.append(number)
    if number == 13:
        os._exit(3)
    if number == 14:
        return said("odd", reward="much")
    return said("open" if number == 417 else "shut", reward=0.5 if number == 417 else -0.125, done=number == 417)

@server.tool()
def secret() -> str:
    return "417"

@server.tool()
def score(answer: str, bonus: float = 0.0) -> dict:
    return {"reward": bonus + (answer.strip() == "417"), "tries": tries}

server.run()
"""
COMMAND = [sys.executable, "server.py"]


@pytest.fixture(autouse=True)
def _needed() -> None:
    need_module("mcp", "pip install 'gangline[mcp]'")
    need_command("bwrap", "apt-get install bubblewrap")


def vault(**fields: Any) -> dict[str, Any]:
    prepare = [{"type": "write", "path": "server.py", "content": SERVER}]
    runtime = {"backend": "sandbox", "network": "none", "prepare": prepare}
    hidden = {"hidden_tools": ["secret", "score"], "runtime": runtime}
    return {"kind": "mcp", "config": {"command": COMMAND}, **hidden, **fields}


def graded(**arguments: Any) -> dict[str, Any]:
    return {"strategy": "environment", "config": {"finish": {"tool": "score", "arguments": arguments}}}


async def test_hidden_tools_are_the_graders_and_every_call_is_in_the_record(tmp_path: Path) -> None:
    rules = using([{"number": 1}, {"number": 417}], "417")
    rules[0]["tool_calls"][0]["name"] = rules[1]["tool_calls"][0]["name"] = "game__turn"
    rules.insert(2, {"turn": 2, "pattern": ".", "tool_calls": [{"name": "game__secret", "arguments": {}}]})
    result = await played(tmp_path, vault(), rules, evaluator=graded(bonus=0.25))
    assert result.outcome == "completed", result.failure
    assert [(call.tool, dict(call.arguments), call.text) for call in calls_of(result)] == [
        ("turn", {"number": 1}, "shut"),
        ("turn", {"number": 417}, "open"),
    ]
    assert step_rewards(result) == [-0.125, 0.5]
    assert result.reward == -0.125 + 0.5 + 1.25
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert [span.score for span in trace.spans] == [-0.125, 0.5, None, 1.25]
    assert [tool.name for tool in trace.tools] == ["game__turn"], "the model is not shown hidden tools"
    first = str(trace.prompt_messages)
    assert "The vault has three digits." in first
    assert "there is no tool 'game__secret'" in str(trace.response_messages)
    (finish,) = result.reward_details["finish"]
    assert finish["reward"] == 1.25


async def test_turn_scores_reach_traces_by_per_turn(tmp_path: Path) -> None:
    rules = using([{"number": 1}, {"number": 417}], "417", tool="game__turn")
    evaluator = {"strategy": "per_turn", "config": {"evaluator": graded(), "turns": "sum", "turns_weight": 2.0}}
    result = await played(tmp_path, vault(), rules, evaluator=evaluator)
    assert result.trajectory is not None, result.failure
    (trace,) = result.trajectory.traces
    assert result.reward == 1.375
    assert trace.reward == 1.375 + 2 * 1.375


@pytest.mark.parametrize("number", [13, 14], ids=["ends", "lies"])
async def test_a_server_that_fails_gives_no_reward(tmp_path: Path, number: int) -> None:
    rules = using([{"number": number}], tool="game__turn")
    result = await played(tmp_path, vault(), rules, evaluator=graded())
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert "environment 'game' failed" in result.failure.message
    assert (result.failure.code, result.failure.retryable) == ("environment_failed", True)
    (call,) = calls_of(result)
    assert (call.is_error, call.reward) == (True, None)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"config": {"command": ["sh", "-c", "echo broken >&2; exit 4"]}}, r"exit code 4 \(broken\)"),
        ({"hidden_tools": ["no_such"]}, "the server has no tool 'no_such'"),
        ({"config": {"command": ["sleep", "60"]}, "start_timeout_seconds": 0.3}, "did not start within 0.3 s"),
        ({"place": "inside", "runtime": None}, "grader"),
    ],
    ids=["broken", "unknown", "late", "no-grader"],
)
async def test_a_server_that_is_of_no_use_fails_the_session_and_is_named(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    result = await played(tmp_path, vault(**fields), using([]))
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert re.search(why, result.failure.message), result.failure.message


NOTES = """
import json, os, sys
path = "/workspace/notes.txt"
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    text = lambda said: {"content": [{"type": "text", "text": said}]}
    schema = {"type": "object", "properties": {}}
    match asked["method"]:
        case "initialize":
            result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                      "serverInfo": {"name": "notes", "version": "1"}}
        case "tools/list":
            result = {"tools": [{"name": name, "inputSchema": schema} for name in ("read", "score")]}
        case "tools/call" if asked["params"]["name"] == "read":
            result = text(open(path).read())
        case "tools/call":
            result = text(str(float(open(path).read() == "written")))
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_a_server_in_the_agents_sandbox_is_the_graders_and_sees_the_agents_files(tmp_path: Path) -> None:
    """It dies with the agent's processes, and is started again over the files that are left."""
    command = ["python3", "-c", NOTES]
    environment = {"kind": "mcp", "place": "inside", "config": {"command": command}, "hidden_tools": ["score"]}
    seen = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\\\0' ' ' | grep -c notes.txt; printf written > notes.txt"
    rules = [
        {"turn": 0, "pattern": ".", "tool_calls": [{"name": "shell", "arguments": {"command": seen}}]},
        {"turn": 1, "pattern": ".", "tool_calls": [{"name": "game__read", "arguments": {}}]},
        {"pattern": ".", "text": "done"},
    ]
    agent = {"harness": "native", "settings": {"tools": ["shell"]}}
    runtime = {"backend": "sandbox", "network": "none"}
    result = await played(tmp_path, environment, rules, evaluator=graded(), agent=agent, runtime=runtime)
    assert (result.outcome, result.reward) == ("completed", 1.0), result.failure
    assert [call.text for call in calls_of(result)] == ["written"]


class Room:
    """An environment of one tool, and the calls that it got."""

    tools = (OfferedTool(name="look", description="Look around.", parameters={"type": "object", "properties": {}}),)

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        self.calls.append((tool, arguments))
        if tool != "look":
            raise InvalidRequest(f"there is no tool {tool!r}")
        if arguments:
            raise EnvironmentFailed("it has ended")
        picture = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
        return CallResult(content=[{"type": "text", "text": "a door"}, picture], structured={"doors": 1}, reward=3.0)

    async def fence(self) -> None:
        """Takes calls as long as the test does."""


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_calls_the_tools_of_a_session(mode: Any) -> None:
    import httpx2
    from mcp import Client, MCPError
    from mcp.client.streamable_http import streamable_http_client

    async with proxied({"rules": [{"pattern": ".", "text": "hi"}]}) as running:
        room = Room()
        running.session.environments = {"room": room}
        headers = {"Authorization": f"Bearer {running.session.key}"}
        async with httpx2.AsyncClient(headers=headers, trust_env=False) as http:
            transport = streamable_http_client(f"{running.url}/s/s1/mcp/room", http_client=http)
            async with Client(transport, mode=mode) as client:
                assert [tool.name for tool in (await client.list_tools()).tools] == ["look"]
                result = await client.call_tool("look", {})
                assert [block.type for block in result.content] == ["text", "image"]
                assert (result.structured_content, result.is_error, result.meta) == ({"doors": 1}, False, None)
                failed = await client.call_tool("look", {"far": True})
                assert (failed.is_error, "it has ended" in str(failed.content)) == (True, True)
                with pytest.raises(MCPError, match="no tool 'steal'"):
                    await client.call_tool("steal", {})
    assert room.calls == [("look", {}), ("look", {"far": True}), ("steal", {})]


async def test_the_tools_of_a_session_need_its_key() -> None:
    async with proxied({"rules": [{"pattern": ".", "text": "hi"}]}) as running, aiohttp.ClientSession() as http:
        running.session.environments = {"room": Room()}
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}

        async def status(path: str, key: str | None, method: str = "POST", body: Any = ping) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with http.request(method, running.url + path, json=body, headers=headers) as response:
                return response.status

        key = running.session.key
        assert await status("/s/s1/mcp/room", key) == 200
        assert await status("/s/s1/mcp/room", "gls-wrong") == 401
        assert await status("/s/s1/mcp/room", None) == 401
        assert await status("/s/s2/mcp/room", key) == 401
        assert await status("/s/s1/mcp/hall", key) == 404
        assert await status("/s/s1/mcp/room", key, "GET", None) == 405
        assert await status("/s/s1/mcp/room", key, body={"jsonrpc": "2.0", "method": "notifications/x"}) == 202
        assert await status("/s/s1/mcp/room", key, body=[ping]) == 400


def task(**fields: Any) -> TaskRequest:
    return TaskRequest.model_validate({"instruction": "x", "agent": {"harness": "native"}, **fields})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"environments": {"g": {"kind": "gymnasium"}}}, "environments.g: .*id"),
        ({"environments": {"g": {"kind": "gimnasium"}}}, "gymnasium"),
        ({"environments": {"g": {"kind": "textarena", "config": {"id": "x", "num_players": 2}}}}, "opponent"),
        (
            {"environments": {"g": vault()}, "agent": {"harness": "mini_swe_agent"}},
            "'mini_swe_agent' has no way",
        ),
    ],
)
def test_mistakes_are_named_at_submit(fields: dict[str, Any], why: str) -> None:
    with pytest.raises((InvalidRequest, UnknownPlugin), match=why):
        check_task(task(**fields))


def test_a_question_needs_no_tools_of_the_harness() -> None:
    question = {"kind": "reasoning_gym", "config": {"dataset": "basic_arithmetic"}}
    check_task(task(environments={"q": question}, agent={"harness": "shell", "settings": {"command": "true"}}))


def test_a_program_of_your_own_may_have_an_environment_with_tools() -> None:
    check_task(task(environments={"g": vault()}, agent={"harness": "shell", "settings": {"command": "true"}}))


async def test_calls_that_run_at_the_agents_end_are_ended(tmp_path: Path) -> None:
    slow = SERVER.replace("tries.append(number)", "tries.append(number); __import__('time').sleep(60)")
    prepare = [{"type": "write", "path": "server.py", "content": slow}]
    runtime = {"backend": "sandbox", "network": "none", "prepare": prepare}
    environment = vault(runtime=runtime, call_timeout_seconds=3)
    result = await played(
        tmp_path, environment, using([{"number": 1}], tool="game__turn"), timeout_seconds=1, evaluator=graded()
    )
    assert result.outcome in ("agent_timeout", "infra_error"), result.failure
    (call,) = calls_of(result)
    assert result.failure is None or result.failure.code == "environment_failed"
    assert (call.text, call.reward, call.is_error) == ("cancelled", None, True)
