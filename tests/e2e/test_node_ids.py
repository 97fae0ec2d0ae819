"""Two node processes with one id at one server: the second is refused, a restart is not."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment

TOKEN = "gl-control-test"
LEASE_S = 6.0
"""Two heartbeats of a node."""


class Nodes:
    """Starts node processes with the id `n1`."""

    def __init__(self, folder: Path, server: ServerClient, engine_url: str) -> None:
        self.folder = folder
        self.server = server
        self.engine_url = engine_url
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, data: str) -> subprocess.Popen[str]:
        where = ("--data", str(self.folder / data), "--server", self.server.url, "--engine", self.engine_url)
        process = subprocess.Popen(
            [*COMMAND, "node", "--id", "n1", *where, "--adopt-grace", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(GANGLINE_TOKEN=TOKEN),
        )
        self.processes.append(process)
        return process

    async def ready(self, data: str) -> subprocess.Popen[str]:
        process = self.start(data)
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert "node_url" in json.loads(line), line
        return process

    async def url(self) -> str:
        (node,) = (await self.server.status()).nodes
        return node.url


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncGenerator[Nodes]:
    async with (
        scripted_server({"default": {"text": "hi"}}) as engine,
        serving(data_dir=tmp_path / "server", control_token=TOKEN, lease_s=LEASE_S) as served,
        ServerClient(served.url, TOKEN) as server,
    ):
        nodes = Nodes(tmp_path, server, engine)
        try:
            yield nodes
        finally:
            for process in nodes.processes:
                if process.poll() is None:
                    process.kill()
                await asyncio.to_thread(process.communicate)


async def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = await asyncio.to_thread(process.communicate, timeout=GIVE_UP_S)
    return process.returncode, errors


async def test_a_second_node_with_the_same_id_from_another_folder_is_refused(nodes: Nodes) -> None:
    first = await nodes.ready("a")
    url = await nodes.url()
    code, errors = await outcome(nodes.start("b"))
    assert code == 5, errors
    assert "another node has the id 'n1'" in errors
    assert "--id" in errors
    assert "Traceback" not in errors
    assert first.poll() is None
    assert await nodes.url() == url, "the server still reaches the first"
    assert (nodes.folder / "a/nodes/n1/identity").stat().st_mode & 0o777 == 0o600


async def test_a_node_starts_again_from_its_folder_at_once_after_it_was_killed(nodes: Nodes) -> None:
    first = await nodes.ready("a")
    first.kill()
    await outcome(first)
    await nodes.ready("a")


async def test_a_lost_node_s_id_is_taken_elsewhere_when_its_leases_have_run_out(nodes: Nodes) -> None:
    first = await nodes.ready("a")
    first.kill()
    await outcome(first)
    second = nodes.start("b")
    assert second.stdout is not None
    line = await asyncio.to_thread(second.stdout.readline)
    if "node_url" not in line:  # else the start took longer than the lease
        code, errors = await outcome(second)
        assert code == 5, errors
        assert "its id is free in" in errors
        await asyncio.sleep(LEASE_S)
        await nodes.ready("b")
    code, errors = await outcome(nodes.start("a"))
    assert code == 5, errors
