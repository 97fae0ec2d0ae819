"""The control token of `gangline server` and `gangline node`: made when none is given, found by other commands."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, gangline, wait_for

Start = Callable[..., "Running"]


class Running:
    """A command that serves, and the line that it printed when it was ready."""

    def __init__(self, *arguments: object, **env: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments), "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**env),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready: dict[str, Any] = json.loads(line) if line else {}

    def end(self) -> str:
        """What it logged."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=GIVE_UP_S)[1]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Running] = []

    def begin(*arguments: object, **env: str) -> Running:
        started.append(Running(*arguments, **env))
        return started[-1]

    yield begin
    for one in reversed(started):
        if one.process.poll() is None:
            one.end()


@pytest.fixture
def engine(start: Start, tmp_path: Path) -> str:
    script = tmp_path / "script.json"
    script.write_text('{"default": {"text": "x"}}')
    return start("engine", "--scripted", script, "--tokenizer", "tiny").ready["engine_url"]


async def status_without_token(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/status") as response:
        return response.status


async def test_a_server_makes_a_token_and_commands_find_it_through_the_folder(start: Start, tmp_path: Path):
    data = tmp_path / "data"
    url = start("server", "--data", data).ready["server_url"]
    assert await status_without_token(url) == 401
    assert stat.S_IMODE((data / "control_token").stat().st_mode) == 0o600
    for where in ((), ("--server", url), ("--server", url.replace("127.0.0.1", "localhost"))):
        found = gangline("status", "--data", data, "--json", *where)
        assert found.returncode == 0, found.stderr
    stranger = gangline("status", "--data", tmp_path / "other", "--server", url)
    assert stranger.returncode == 6  # the token goes to the server of its own folder only
    given = gangline(
        "status", "--data", tmp_path / "other", "--server", url,
        env={"GANGLINE_TOKEN": (data / "control_token").read_text()},
    )  # fmt: skip
    assert given.returncode == 0, given.stderr


async def test_a_node_has_the_token_of_its_server_and_commands_reach_it(start: Start, tmp_path: Path, engine: str):
    data = tmp_path / "data"
    server = start("server", "--data", data).ready["server_url"]
    node = start("node", "--data", data, "--engine", engine, "--id", "n1").ready["node_url"]
    assert await status_without_token(node) == 401

    def joined() -> bool:
        return bool(json.loads(gangline("status", "--data", data, "--json").stdout)["status"]["nodes"])

    wait_for(joined)
    shown = gangline("gate", "show", "--data", data, "--json")
    assert shown.returncode == 0, shown.stderr
    assert list(json.loads(shown.stdout)) == [node]
    alone = gangline("node", "--data", tmp_path / "elsewhere", "--server", server, "--engine", engine, "--json")
    assert alone.returncode == 2
    assert "GANGLINE_TOKEN" in alone.stderr


async def test_no_token_has_to_be_asked_for_and_is_warned_of_at_every_start(start: Start, tmp_path: Path, engine: str):
    data = tmp_path / "data"
    for _ in range(2):
        server = start("server", "--data", data, "--no-token")
        assert await status_without_token(server.ready["server_url"]) == 200
        node = start("node", "--data", data, "--engine", engine, "--no-token")
        assert await status_without_token(node.ready["node_url"]) == 200
        assert "WARNING gangline.serving service.open kind=node" in node.end()
        assert gangline("status", "--data", data).returncode == 0
        assert "WARNING gangline.serving service.open kind=server" in server.end()
    assert not (data / "control_token").exists()


@pytest.mark.parametrize("command", [("server",), ("node", "--engine", "http://127.0.0.1:9", "--server", "http://x:1")])
def test_a_token_and_no_token_contradict_each_other(tmp_path: Path, command: tuple[str, ...]):
    both = gangline(*command, "--data", tmp_path, "--no-token", env={"GANGLINE_TOKEN": "x"})
    assert both.returncode == 2
    assert "contradicts" in both.stderr


def test_no_token_is_refused_where_others_can_connect(tmp_path: Path):
    refused = gangline("server", "--data", tmp_path, "--host", "0.0.0.0", "--port", "0", "--no-token")
    assert refused.returncode == 2
    assert "can be reached from elsewhere" in refused.stderr
