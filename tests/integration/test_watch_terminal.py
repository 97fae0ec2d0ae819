"""`gangline watch` in a terminal, against a real server with nodes that do as they are told."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gangline.domain.node_numbers import NodeNumbers
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN
from support.node.terminal import Terminal, terminal
from support.service.cli_process import COMMAND, clean_environment, gangline
from support.service.running import FakeNode, any_plugin, beat, engine_down, request

NUMBERS = NodeNumbers(
    **dict.fromkeys(("init", "ready", "postrun", "external_sessions", "gate_closed", "gate_calls_waiting"), 0),
    run=1,
    calls_in_flight=2,
    model_calls=3,
    prompt_tokens=30,
    sampled_tokens=20,
    contexts=3,
    init_workers=4,
    ready_slots=8,
    run_slots=16,
    postrun_workers=4,
    contexts_diverged=1,
    untrainable=0,
)


LEASE_S = 600.0
"""Longer than a screen may take on a busy machine."""


@asynccontextmanager
async def service(folder: Path, port: int = 0) -> AsyncGenerator[ServerClient]:
    async with (
        serving(data_dir=folder, control_token=TOKEN, check_task=any_plugin, port=port, lease_s=LEASE_S) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


def watching(client: ServerClient, *task: str, columns: int = 80) -> AbstractAsyncContextManager[Terminal]:
    return terminal("watch", *task, "--server", client.url, columns=columns, GANGLINE_TOKEN=TOKEN)


@asynccontextmanager
async def work(client: ServerClient) -> AsyncGenerator[None]:
    """Four sessions: one completed, one to be run again, one under way, one in the queue, on a node that is heard."""
    node = FakeNode(client, "node-1")
    await client.submit(request("sums", num_samples=4))
    done, failed, running = await node.lease(3)
    await node.finish([done], reward=0.25)
    await node.finish([failed], **engine_down())
    backend = {"url": "http://gpu-1:8000", "engine": "vllm", "state": "unhealthy", "error": "refused"}
    told = msgspec.structs.replace(
        beat([running], "node-1"), backends=(backend,), metrics=NUMBERS.as_metrics(), capacity=28
    )

    async def beating() -> None:
        while True:
            await asyncio.sleep(1)
            await client.heartbeat(told)

    await client.heartbeat(told)
    node_runs = asyncio.create_task(beating())
    try:
        yield
    finally:
        node_runs.cancel()
        await asyncio.wait([node_runs])


async def test_the_whole_service_stands_on_one_small_screen_and_ctrl_c_restores_it(tmp_path: Path):
    async with service(tmp_path) as client, watching(client) as screen:
        await screen.shows("tasks: none", "No node has joined")
        async with work(client):
            await screen.shows("queued 2", "run 1", "ended 1", "sessions/min", "66.67% exact of 3 · 1 diverged")
            await screen.shows("node-1", "1/16", "0/4", "open")
            await screen.shows("sums", "1/4", "0.250", "1 completed")
            await screen.shows("engine: engine_unavailable (runs again)", "sums.1")
            await screen.shows("http://gpu-1:8000", "unhealthy")
        screen.type(b"\x03")
        assert await screen.ended() == 130
        assert screen.restored()
        assert "Traceback" not in screen.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_restores_the_terminal_too(tmp_path: Path, number: signal.Signals):
    async with service(tmp_path) as client, watching(client) as screen:
        await screen.shows("No node has joined")
        assert screen.process is not None
        screen.process.send_signal(number)
        assert await screen.ended() == 143
        assert screen.restored()


async def test_it_follows_the_size_of_its_terminal(tmp_path: Path):
    async with service(tmp_path) as client, work(client), watching(client, columns=100) as screen:
        await screen.shows("node-1", "heard", "engine http://")
        screen.resize(40, 12)
        await screen.until(lambda text: "heard" not in text and "node-1" in text, "no column went")
        await screen.shows("1/16", "queued")


async def test_it_goes_on_when_the_server_is_restarted_and_says_so(tmp_path: Path):
    async with AsyncExitStack() as stack:
        async with service(tmp_path) as client:
            port = int(client.url.rsplit(":", 1)[1])
            async with work(client):
                screen = await stack.enter_async_context(watching(client))
                await screen.shows("queued 2", "sums")
        await screen.shows("The server has not answered", "queued 2")
        async with service(tmp_path, port) as client:
            await screen.shows("The server answers again; it was away for")
            await client.submit(request("later", num_samples=1))
            await screen.shows("later", "queued 3")


async def test_one_task_is_watched_to_its_end_and_its_last_picture_stays(tmp_path: Path):
    async with service(tmp_path) as client:
        node = FakeNode(client, "node-1")
        await client.submit(request("short", num_samples=1))
        async with watching(client, "short") as screen:
            await screen.shows("short", "0/1")
            await node.finish(await node.lease())
            assert await screen.ended() == 0
            await screen.shows("1/1", "1 completed")
            assert screen.restored()


async def test_without_a_terminal_it_writes_lines_and_tells_of_the_restart(tmp_path: Path):
    async with service(tmp_path) as client:
        port = int(client.url.rsplit(":", 1)[1])
        await client.submit(request("early", num_samples=1))
        watching = await asyncio.create_subprocess_exec(
            *(*COMMAND, "watch", "early", "--json", "--server", client.url),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(GANGLINE_TOKEN=TOKEN),
        )
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert json.loads(await watching.stdout.readline())["kind"] == "task.submitted"
    assert b"Trying again" in await watching.stderr.readline()
    async with service(tmp_path, port) as client:
        assert b"answers again" in await watching.stderr.readline()
        node = FakeNode(client)
        await node.finish(await node.lease())
        kinds = [json.loads(line)["kind"] async for line in watching.stdout]
        assert kinds[-2:] == ["session.ended", "task.ended"]
        assert await watching.wait() == 0


async def test_a_server_that_is_not_there_at_first_is_an_error():
    done = await asyncio.to_thread(gangline, "watch", "--server", "http://127.0.0.1:9")
    assert done.returncode == 3
    assert "does not answer" in done.stderr
