"""What a session made is freed when it is over, without the collector of cycles: a node's looks at an object once, and
a session lives longer than that.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import RuntimeSpec
from gangline.interop.handlers import jobs
from gangline.node.sessions.attempt import Attempt
from gangline.sandbox.keeper.kept import Keeper
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.garbage import counted_cycles
from support.node.attempt import lease_of, node_parts
from support.node.handlers import install_handlers
from support.node.node import TOKEN, running_node
from support.requirements import need_command

_AGENT = f"""{sys.executable} - <<'PROGRAM'
import json, os, urllib.request

def call(**fields):
    body = {{"model": "m", "messages": [{{"role": "user", "content": "hi"}}], **fields}}
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))

call().read()
call(stream=True).read()
call(stream=True, seed=1).close()
try:
    call(temperature="hot")
except urllib.error.HTTPError:
    pass
PROGRAM
"""
_GRADER = """echo '{"reward": 1}' > reward.json"""


def _shell(command: str, **more: Any) -> dict[str, Any]:
    return {"agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True, **more}}


def _script(command: str, **more: Any) -> dict[str, Any]:
    return {"evaluator": {"strategy": "script", "config": {"command": command}, **more}}


_SANDBOX = {"runtime": {"backend": "sandbox"}}
_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("completed", {}),
    "calls": ("completed", _shell(_AGENT)),
    "calls from a sandbox": ("completed", _shell(_AGENT) | _SANDBOX),
    "a failure": ("agent_error", _shell(f"{_AGENT}\nexit 3")),
    "no preparation": (
        "infra_error",
        {"runtime": {"backend": "process", "prepare": [{"type": "exec", "command": "exit 1"}]}},
    ),
    "out of time": ("agent_timeout", {**_shell("sleep 60"), "timeout_seconds": 0.5}),
    "out of turns": ("turn_limit", _shell(_AGENT, max_turns=1)),
    "an agent in the node": ("completed", {"agent": {"harness": "native"}}),
    "a grader": ("completed", _script(_GRADER)),
    "a grader in a clean sandbox": ("completed", _script(_GRADER, refresh_runtime=True)),
    "a broken grader": ("infra_error", _script("exit 1")),
    "a handler": (
        "completed",
        {
            "agent": {
                "harness": "handler",
                "settings": {
                    "handler": "ported-math",
                    "instance": {
                        "prompt": [{"role": "user", "content": "What is 40 + 2?"}],
                        "reward_model": {"ground_truth": "hi"},
                    },
                },
                "max_turns": 2,
            },
            "evaluator": {"strategy": "handler"},
        },
    ),
    "steps": (
        "completed",
        {
            "steps": [
                {"name": "first", "instruction": "say hi", "evaluator": {"strategy": "session_completed"}},
                {"name": "second", "instruction": "say it again", "evaluator": {"strategy": "session_completed"}},
            ]
        },
    ),
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_handlers(tmp_path / "site", monkeypatch)


@pytest.mark.parametrize("name", _TASKS)
async def test_an_attempt_leaves_nothing_that_only_the_collector_frees(name: str, tmp_path: Path) -> None:
    outcome, task = _TASKS[name]
    async with node_parts(tmp_path / "node") as parts:
        with counted_cycles() as found:
            result = await Attempt(lease_of(**task), parts).live()
            assert result.outcome == outcome, result.failure
            del result
            for _ in range(3):  # the loop forgets what it ran last
                await asyncio.sleep(0)
    assert found == {}
    assert list(jobs._JOBS) == []


_FAULTS: dict[str, dict[str, Any]] = {
    "refuses": {"status": 400},
    "is overloaded": {"status": 503},
    "answers junk": {"garbage": True},
    "hangs up": {"drop_connection": 0},
    "hangs": {"hang": True},
}


@pytest.mark.parametrize("name", _FAULTS)
async def test_nor_does_one_whose_engine_fails(name: str, tmp_path: Path) -> None:
    always = {"times": None, **_FAULTS[name]}
    script = {"rules": [{"pattern": "^hi$", "text": "ho", "faults": always}, {"pattern": ".", "text": "hi"}]}
    task = {**_shell(_AGENT), "timeout_seconds": 3.0}
    async with node_parts(tmp_path / "node", script=script) as parts:
        with counted_cycles() as found:
            result = await Attempt(lease_of(**task), parts).live()
            del result
            for _ in range(3):
                await asyncio.sleep(0)
    assert found == {}


async def test_neither_does_a_whole_service(tmp_path: Path) -> None:
    script = {"rules": [{"pattern": ".", "text": "hi"}]}
    async with (
        scripted_server(script) as engine,
        serving(data_dir=tmp_path / "server", control_token=TOKEN) as server,
        running_node(tmp_path / "node", engine, server_url=server.url),
        ServerClient(server.url, TOKEN) as client,
    ):
        with counted_cycles() as found:
            for number, (_, task) in enumerate(_TASKS.values()):
                request = lease_of(**task).task
                await client.submit({"task_id": f"t{number}", **request})
            for number in range(len(_TASKS)):
                await client.wait(f"t{number}")
            await asyncio.sleep(0)
    assert found == {}


async def test_nor_does_a_question_about_a_sandbox_that_has_ended(tmp_path: Path) -> None:
    """A node asks each second what its sandboxes take: whoever asked would live as long as the error."""
    need_command("bwrap", "apt-get install bubblewrap")
    (tmp_path / "runtimes").mkdir()
    keeper = Keeper(tmp_path / "keeper", owner=new_id("freed"), runtimes_folder=tmp_path / "runtimes", grace_s=60.0)
    agents = await keeper.join(lambda: socket.create_server(("127.0.0.1", 0)))
    spec = RuntimeSpec(backend="sandbox", network="none")
    try:
        start = RuntimeStart(runtime_id="r", owner=new_id("freed"), spec=spec, folder=tmp_path / "runtimes" / "r")
        handle = await keeper.start("sandbox", start)
        await handle.stop()
        with counted_cycles() as found:
            with pytest.raises(RuntimeFailed):
                await handle.usage()
            await asyncio.sleep(0)
    finally:
        await keeper.close()
        agents.close()
    assert found == {}
