"""The example's agent program, with the real `openai` SDK, against a chat server that plays a script."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gangline.domain.sandbox import ExecResult
from support.node.folder_runtime import FolderRuntime

AGENT = Path(__file__).parents[2] / "examples" / "read_file" / "agent.py"


@asynccontextmanager
async def chat_server(replies: list[str]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        message = {"role": "assistant", "content": replies[len(bodies) - 1]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", bodies
    finally:
        await runner.cleanup()


async def run_agent(folder: Path, replies: list[str]) -> tuple[ExecResult, list[dict[str, Any]]]:
    runtime = FolderRuntime(folder / "r1")
    await runtime.upload("agent.py", AGENT.read_bytes())
    await runtime.upload("lamp42.txt", b"river\n")
    async with chat_server(replies) as (url, bodies):
        env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key-1"}
        result = await runtime.exec([sys.executable, "agent.py", "Which?", "m"], env=env, timeout_s=120)
    return result, bodies


async def test_the_agent_runs_the_command_and_prints_the_answer(tmp_path: Path) -> None:
    result, bodies = await run_agent(tmp_path, ["cat lamp42.txt", "river"])
    assert (result.exit_code, result.stdout) == (0, b"river\n")
    first, second = bodies
    assert (first["max_tokens"], second["max_tokens"], first["temperature"]) == (12, 6, 0.7)
    assert first["messages"][-1] == {"role": "user", "content": "Which?"}
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert second["messages"][-2] == {"role": "assistant", "content": "cat lamp42.txt"}
    assert "river" in second["messages"][-1]["content"]


@pytest.mark.parametrize("command", ["rm lamp42.txt", "cat /etc/passwd", "cat lamp42.txt; ls", "cat -n", "cat 'x", ""])
async def test_a_command_off_the_list_is_not_run_and_the_answer_is_still_asked_for(
    tmp_path: Path, command: str
) -> None:
    result, bodies = await run_agent(tmp_path, [command, "no"])
    assert result.stdout == b"no\n"
    assert "error: not one of: cat FILE" in bodies[1]["messages"][-1]["content"]
    assert (tmp_path / "r1" / "work" / "lamp42.txt").exists()
