"""What needs no Linux, with what macOS and Windows lack taken away: only imports are judged; nothing ran on either."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gangline.cli.commands import COMMANDS, is_installed
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin
from support.store.recorded import session, task, write_data
from support.training.recorded_runs import TASKS, write_run

PROGRAM = Path(__file__).parents[1] / "support" / "other_system.py"
SYSTEMS = ("darwin", "win32")
WORDS = "Find the dog — “Grün” 🐕"
"""No code page of Windows has all of its letters."""
READING = [
    ["show", "task-1"],
    ["show", "task-1.0", "--full"],
    ["show", "task-1.0", "--json"],
    ["show", "task-1.0", "--tokens"],
    ["show", "task-1.0", "--html", "session.html"],
    ["logs", "task-1.0", "--json"],
    ["audit", "task-1"],
    ["drift", "task-1"],
    *(
        ["export", "task-1", "--format", form, "--out", "rows"]
        for form in ("jsonl", "msgpack", "parquet", "atif", "csv")
    ),
    ["check-rows", "rows/task-1.jsonl"],
    ["check-rows", "rows/task-1.parquet", "--json"],
    ["check-rows", "rows/task-1.msgpack"],
    ["data", "task-1", "--out", "dataset"],
    ["config", "show"],
    ["runs", "list"],
    ["runs", "show", "learned"],
    ["init", "my-agent"],
]
CLIENT = """
import asyncio
from gangline import ServerClient, find_service
service = find_service()
with service.sync_client() as client:
    task = client.wait("task-1")
    print(task.ended, [one.reward for one in client.result("task-1")])
async def ask():
    async with ServerClient(service.server_url, service.control_token) as client:
        print((await client.session("task-1.0")).outcome)
asyncio.run(ask())
"""


class Done(NamedTuple):
    code: int
    out: str
    errors: str


async def ran(system: str, commands: list[list[str]], folder: Path, **env: str) -> list[Done]:
    """What each command did, one after another in one process; a text file of no named encoding is an error."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GANGLINE_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "warn_default_encoding", PROGRAM, system),
        cwd=folder,
        env={**ours, "COLUMNS": "120", **env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate(json.dumps(commands).encode())
    assert process.returncode == 0, errors.decode()
    return [Done(*one) for one in json.loads(out)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a service and a training leave."""
    made = tmp_path_factory.mktemp("made")
    sessions = [session("task-1", number, float(number), instruction=WORDS) for number in range(2)]
    write_data(made, [task("task-1")], sessions)
    (write_run(made, "learned", [1.0] * TASKS) / "run.lock").touch()
    return made


@pytest.fixture(scope="module")
def on_linux(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Done], dict[str, bytes]]:
    return read_all("linux", data, tmp_path_factory.mktemp("linux"))


def read_all(system: str, data: Path, folder: Path) -> tuple[list[Done], dict[str, bytes]]:
    """All reading commands, and the files that they wrote."""
    shutil.copytree(data, folder / ".gangline")
    done = asyncio.run(ran(system, READING, folder))
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".gangline" not in path.parts)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in found}
    return [Done(one.code, one.out.replace(str(folder), "."), one.errors) for one in done], files


@pytest.mark.parametrize("system", SYSTEMS)
def test_sessions_and_rows_are_read_as_on_linux(
    system: str, data: Path, tmp_path: Path, on_linux: tuple[list[Done], dict[str, bytes]]
) -> None:
    done, files = read_all(system, data, tmp_path)
    for command, here, there in zip(READING, done, on_linux[0], strict=True):
        assert here == there, command
        assert there.code == 0, there
    assert any("🐕" in one.out for one in done)
    assert files.keys() == on_linux[1].keys()


@pytest.mark.parametrize("system", SYSTEMS)
async def test_a_service_on_linux_is_used(system: str, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text(json.dumps(task("task-2").model_dump(mode="json") | {"instruction": WORDS}))
    commands = [
        ["python", CLIENT],
        ["submit", "task.json"],
        *(["submit", "--task-id", "task-3", "--instruction", WORDS, "--command", "true"], ["cancel", "task-3"]),
        *(["status"], ["status", "task-1"], ["list", "tasks"], ["list", "sessions", "--json"], ["open"]),
        *(["show", "task-1.0"], ["export", "task-1", "--format", "jsonl"], ["audit", "task-1"]),
    ]
    async with (
        serving(data_dir=tmp_path / "elsewhere", control_token="secret", check_task=any_plugin) as server,
        ServerClient(server.url, "secret") as client,
    ):
        await client.submit(task("task-1"))
        for lease in await FakeNode(client).lease():
            changes = {"node_id": "n1", "fence": lease.fence}
            await client.post_result(await asyncio.to_thread(session, "task-1", lease.sample_index, 1.0, **changes))
        done = await ran(system, commands, tmp_path, GANGLINE_SERVER=server.url, GANGLINE_TOKEN="secret")
        submitted: Any = (await client.task("task-2")).request
    for command, one in zip(commands, done, strict=True):
        assert one.code == 0, (command, one)
    assert done[0].out == "True [1.0, 1.0, 1.0, 1.0]\ncompleted\n"
    assert submitted["instruction"] == WORDS


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_needs_linux_says_so_in_one_line(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.cli.commands.sys.platform", system)
    names = list(COMMANDS)
    refused = [name for name in names if not is_installed(name)]
    monkeypatch.undo()
    commands = [*([name, "--help"] for name in names), []]
    *helps, alone = asyncio.run(ran(system, commands, tmp_path))
    done = dict(zip(names, helps, strict=True))
    assert alone.code == 0
    assert not any(f"gangline {name}" in alone.out for name in refused), alone
    assert {"up", "node", "demo"} <= set(refused)
    for name, one in done.items():
        if name in refused:
            assert (one.code, one.out) == (2, ""), one
            assert one.errors.startswith(f"gangline: `gangline {name}` runs on Linux only. Start the service"), one
            assert one.errors.count("\n") == 1, one
        else:
            assert (one.code, one.errors) == (0, ""), one


def test_on_windows_what_cannot_be_told_safe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gangline.toml").write_text("")
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "task.json").write_text('{"instruction": {"from_file": "agent.py"}, "agent": {"harness": "shell"}}')
    (config,) = asyncio.run(ran("win32", [["config", "show"]], tmp_path))
    assert config.code == 2
    assert "may belong to another user" in config.errors
    commands = [["config", "show"], ["submit", "task.json", "--dry-run"]]
    config, sent = asyncio.run(ran("win32", commands, tmp_path, GANGLINE_CONFIG="gangline.toml"))
    assert (config.code, sent.code) == (0, 2)
    assert "read on Linux and macOS only" in sent.errors, sent.errors
