"""A node process that may open no more files: it names the cause, spends no attempt, and waits for better times."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.requirements import need_command
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment

TOKEN = "gl-control-test"
SPARE = 4
"""For connections to the server; a sandbox takes about eight."""


def leave_few_files(pid: int) -> tuple[int, int]:
    """Let the process open `SPARE` files more; returns its limits before."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    limit, free = 0, 0
    while free < SPARE:
        free += limit not in taken
        limit += 1
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    return before


def keeper_of(node_folder: Path) -> int:
    """The process that keeps the sandboxes of the node with this folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"keeper" in command and bytes(node_folder) in command:
                return int(folder.name)
    raise AssertionError("no keeper runs")


@pytest.mark.parametrize("starved", ["node", "keeper"])
async def test_a_session_that_finds_no_file_to_open_goes_back_with_its_attempt(tmp_path: Path, starved: str) -> None:
    agent = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
    backend = "sandbox" if starved == "keeper" else "process"
    if starved == "keeper":
        need_command("bwrap", "apt-get install bubblewrap")
    task = {"instruction": "do it", "runtime": {"backend": backend}, "agent": agent, "max_attempts": 1}
    async with (
        scripted_server({"default": {"text": "hi"}}) as engine,
        serving(data_dir=tmp_path / "server", control_token=TOKEN) as served,
        ServerClient(served.url, TOKEN) as server,
    ):
        where = ("--data", tmp_path / "node", "--server", served.url, "--engine", engine)
        options = ("--adopt-grace", "60" if starved == "keeper" else "0", "--breaker-pause", "0.2", "--json")
        log = tmp_path / "node.log"
        with log.open("wb") as errors:
            node = subprocess.Popen(
                list(map(str, (*COMMAND, "node", "--id", "n1", *where, *options))),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=clean_environment(GANGLINE_TOKEN=TOKEN),
            )
        try:
            assert node.stdout is not None
            assert "node_url" in json.loads(await asyncio.to_thread(node.stdout.readline))
            pid = node.pid
            if starved == "keeper":  # it is started with the first sandbox
                first = await server.submit(task)
                assert (await server.wait(first.task_id, timeout_s=GIVE_UP_S)).outcomes == {"completed": 1}
                pid = keeper_of(tmp_path / "node")
            limits = leave_few_files(pid)
            submitted = await server.submit(task)
            async with asyncio.timeout(GIVE_UP_S):
                async for event in server.events(after=0, task_id=submitted.task_id):
                    assert event.kind != "session.ended", event.data
                    if event.kind == "session.released":
                        break
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            view = await server.wait(submitted.task_id, timeout_s=GIVE_UP_S)
            assert view.outcomes == {"completed": 1}
            assert view.sessions[0].attempt == 1
        finally:
            node.terminate()
            await asyncio.to_thread(node.communicate)
    told = log.read_text()
    (failed, *_) = [line for line in told.splitlines() if " session.failed " in line]
    assert "boundary=node code=too_many_open_files" in failed
    assert "`ulimit -n 65536`" in failed
    assert " session.given_back " in told
    assert " breaker.opened boundary=node code=too_many_open_files faults=1 " in told
