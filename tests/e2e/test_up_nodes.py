"""`gangline up --nodes 2`: two nodes on one machine, each with a proxy, a journal and its own slots."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gangline.wire.client.server import ServerClient
from support.service.cli_process import UpProcess, gangline, processes_with

CALL = """
import json, os, sys, time, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.fixture
def up(tmp_path: Path) -> Generator[UpProcess]:
    service = UpProcess(tmp_path, "--nodes", 2, "--run-slots", 1, "--ready-slots", 0)
    try:
        assert service.ready()
        yield service
    finally:
        service.close()


def task(go: Path, **changes: Any) -> dict[str, Any]:
    """One model call, and then it waits for the file."""
    return {
        "instruction": "do it",
        "runtime": {"backend": "process", "prepare": [{"type": "write", "path": "call.py", "content": CALL}]},
        "agent": {"harness": "shell", "settings": {"command": ["python3", "call.py", str(go)]}},
        **changes,
    }


async def test_two_nodes_share_the_work_of_one_service(up: UpProcess, tmp_path: Path) -> None:
    running, go = up.running(), tmp_path / "go"
    assert len(running["node_urls"]) == 2
    assert {"node", "node-2"} <= running["pids"].keys()
    async with ServerClient(running["server_url"], running["control_token"]) as client, asyncio.timeout(120):
        both = await client.submit(task(go, num_samples=2))
        while (await client.task(both.task_id)).states != {"leased": 2}:  # a slot each
            await asyncio.sleep(0.05)
        go.touch()
        await client.wait(both.task_id)
        results = await client.result(both.task_id)
        assert [one.outcome for one in results] == ["completed", "completed"]
        assert {one.node_id for one in results} == {"node-1", "node-2"}
        assert all(len(one.completions) == 1 for one in results)
        assert all((up.data / "nodes" / one / "journal").is_dir() for one in ("node-1", "node-2"))

        assert gangline("drain", "--data", up.data, "--node", running["node_urls"][0]).returncode == 0
        os.kill(up.running()["pids"]["node-2"], signal.SIGKILL)
        later = await client.submit(task(go, num_samples=2))
        await client.wait(later.task_id)
        assert {one.node_id for one in await client.result(later.task_id)} == {"node-2"}, "one drained, one came back"
    assert up.end()[0] == 0
    assert not processes_with(str(up.data))


def test_nodes_of_one_machine_have_no_url_in_common(tmp_path: Path) -> None:
    config = tmp_path / "gangline.toml"
    config.write_text('[node]\npublic_url = "http://proxy.example"\n')
    refused = gangline("up", "--nodes", 2, "--data", tmp_path / "data", "--config", config)
    assert refused.returncode != 0
    assert "node.public_url is the URL of one node" in refused.stderr
