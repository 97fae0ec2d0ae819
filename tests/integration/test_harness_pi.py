"""The real pi, where it is installed, against a chat server on loopback that plays a script.

Set GANGLINE_TOOLS, or install it in `.tools`: make tools
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from gangline.agents.harnesses.pi import PiConfig, PiHarness
from gangline.domain.contracts import HarnessContext, HarnessVerdict
from gangline.domain.errors import HarnessError, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import ExecResult, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.settings.machine import Settings
from support.node.folder_runtime import FolderRuntime

REPOSITORY = Path(__file__).parents[2]
TOOLS = Path(os.environ.get("GANGLINE_TOOLS", REPOSITORY / ".tools")) / "node_modules" / ".bin"
PATH = f"{TOOLS}:{os.environ['PATH']}"
needs_pi = pytest.mark.skipif(not (TOOLS / "pi").exists(), reason="pi is not installed")

Reply = list[dict[str, Any]] | int
"""Chunks' choices, or an HTTP error."""


def tool_call(call_id: str, command: str) -> Reply:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"index": 0, "id": call_id, "type": "function", "function": function}
    return [{"delta": {"role": "assistant", "tool_calls": [call]}}, {"delta": {}, "finish_reason": "tool_calls"}]


def text(*pieces: str) -> Reply:
    return [*({"delta": {"content": piece}} for piece in pieces), {"delta": {}, "finish_reason": "stop"}]


@asynccontextmanager
async def chat_server(replies: list[Reply]) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """A server that plays `replies` in turn; its base URL, and the requests it got (their `["body"]` is parsed)."""
    requests: list[web.Request] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        request["body"] = await request.json()
        requests.append(request)
        reply = replies[len(requests) - 1]
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for choice in reply:
            choices = [{"index": 0, "finish_reason": None, **choice}]
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/s/s1/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/s/s1", requests
    finally:
        await runner.cleanup()


@pytest.fixture
def runtime(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "r1", path=PATH)


async def run_pi(
    runtime: Sandbox, base_url: str, instruction: str, **settings: Any
) -> tuple[ExecResult, HarnessVerdict]:
    harness = PiHarness(PiConfig(**settings))
    launch = await harness.prepare(
        HarnessContext(
            session_id="s1",
            task_id="t1",
            instruction=instruction,
            model="org/model:1",
            base_url=base_url,
            api_key="key-1",
            runtime=runtime,
            env={},
        )
    )
    result = await runtime.exec(launch.command, env=launch.env, stdin=launch.stdin, timeout_s=120)
    return result, harness.judge(result)


def kinds(result: ExecResult) -> list[str]:
    return [json.loads(line)["type"] for line in result.stdout.splitlines()]


@needs_pi
async def test_pi_does_a_task_of_three_tool_calls(runtime: FolderRuntime) -> None:
    script = [tool_call("c1", "echo one > a.txt"), tool_call("c2", "cat a.txt"), tool_call("c3", "false")]
    async with chat_server([*script, text("all ", "done")]) as (url, requests):
        result, verdict = await run_pi(runtime, url, "--write @a 'file'")
    assert verdict == HarnessVerdict(True)
    assert runtime.file("a.txt").read_text() == "one\n"
    assert [request.headers["Authorization"] for request in requests] == ["Bearer key-1"] * 4
    first, last = requests[0]["body"], requests[-1]["body"]
    assert first["model"] == "org/model:1"
    assert first["stream"] is True
    assert first["messages"][-1]["content"] == [{"type": "text", "text": "--write @a 'file'"}]
    assert [message["role"] for message in last["messages"]] == ["system", "user"] + ["assistant", "tool"] * 3
    assert set(kinds(result)) == {"session", "agent_start", "turn_start", "message_end", "agent_end"}
    assert kinds(result)[-1] == "agent_end"


@needs_pi
async def test_the_sessions_key_is_in_no_file(runtime: FolderRuntime) -> None:
    async with chat_server([text("hi")]) as (url, _):
        await run_pi(runtime, url, "hello")
    written = [path for path in Path(runtime.home).rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if b"key-1" in path.read_bytes()]


@needs_pi
async def test_pi_that_exits_with_0_after_its_api_failed_is_judged_failed(runtime: FolderRuntime) -> None:
    async with chat_server([tool_call("c1", "true"), 400]) as (url, _):
        result, verdict = await run_pi(runtime, url, "hello")
    assert result.exit_code == 0
    assert not verdict.ok
    assert "scripted failure" in verdict.reason


@needs_pi
async def test_settings_reach_pi(runtime: FolderRuntime) -> None:
    settings = {"tools": ("read", "grep"), "system_prompt": "You are brief.", "max_tokens": 77}
    async with chat_server([text("hi")]) as (url, requests):
        await run_pi(runtime, url, "hello", **settings)
    body = requests[0]["body"]
    assert {tool["function"]["name"] for tool in body["tools"]} == {"read", "grep"}
    assert body["messages"][0]["content"].startswith("You are brief.")
    assert body["max_completion_tokens"] == 77


@needs_pi
async def test_another_version_than_the_tasks_is_refused_with_the_line_that_installs_it(
    runtime: FolderRuntime,
) -> None:
    with pytest.raises(
        HarnessError, match=r"0\.73\.1 is installed, the task wants 0\.1\.0.*install pi --version 0\.1\.0"
    ):
        await run_pi(runtime, "http://127.0.0.1:1", "hello", version="0.1.0")


async def test_a_missing_pi_is_refused_with_the_line_that_installs_it(tmp_path: Path) -> None:
    bare = FolderRuntime(tmp_path / "bare", path="/usr/bin:/bin")
    with pytest.raises(
        HarnessError, match=r"Run: gangline harness install pi .*npm install .* @mariozechner/pi-coding-agent@0\.73\.1"
    ):
        await run_pi(bare, "http://127.0.0.1:1", "hello")


async def test_a_pi_that_does_not_start_is_told_apart_from_a_missing_one(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "pi").write_text("#!/bin/sh\necho node: not found >&2\nexit 1\n")
    (tools / "pi").chmod(0o755)
    broken = FolderRuntime(tmp_path / "broken", path=f"{tools}:/usr/bin:/bin")
    with pytest.raises(HarnessError, match=r"does not start.*node: not found"):
        await run_pi(broken, "http://127.0.0.1:1", "hello")


async def test_the_launch_filter_keeps_pis_exit_code(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    events = ['{"type":"message_update","x":1}', '{"type":"agent_end","messages":[1]}', '{"type":"other"}']
    lines = "\n".join(f"echo '{event}'" for event in events)
    (tools / "pi").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 0.73.1 >&2 && exit\n{lines}\nexit 5\n')
    (tools / "pi").chmod(0o755)
    runtime = FolderRuntime(tmp_path / "r1", path=f"{tools}:/usr/bin:/bin")
    result, verdict = await run_pi(runtime, "http://127.0.0.1:1", "hello")
    assert result.exit_code == 5
    assert result.stdout == b'{"type":"agent_end"}\n{"type":"other"}\n'
    assert not verdict.ok


@needs_pi
async def test_pi_works_in_a_sandbox_whose_only_network_is_the_proxy(tmp_path: Path) -> None:
    settings = Settings.from_environ({"GANGLINE_TOOLS": str(TOOLS.parents[1])})
    sandboxes = BubblewrapRuntime(settings)
    try:
        await sandboxes.check()
    except RuntimeUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "r1").mkdir()
    async with chat_server([tool_call("c1", "echo one > a.txt"), text("done")]) as (url, _):
        start = RuntimeStart(
            runtime_id="r1",
            owner=new_id("pi"),
            spec=RuntimeSpec(),
            folder=tmp_path / "r1",
            proxy_port=URL(url).port,
        )
        sandbox = await sandboxes.start(start)
        try:
            _, verdict = await run_pi(sandbox, f"{sandbox.proxy_url}/s/s1", "write a file")
            assert verdict == HarnessVerdict(True)
            assert await sandbox.download("a.txt") == b"one\n"
        finally:
            await sandbox.stop()
