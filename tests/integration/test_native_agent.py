"""The agent in the node: what its tools tell the model, and how a session of it ends when it does not end itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeFailed
from gangline.domain.session import Lease, SessionResult
from gangline.gateway.sessions.attempt import Attempt
from gangline.harnesses.native.tools import OFFERED, Tools
from support.node.attempt import lease_of, node_parts
from support.node.folder_runtime import FolderRuntime
from support.service.cli_process import processes_with

FIRST = {"turn": 0, "pattern": "^say hi$"}
"""Not what the engine is asked when it joins."""
SLEEP = FIRST | {"tool_calls": [{"run": "touch began; sleep 600"}]}


@pytest.fixture
def runtime(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "r1")


def tools_of(runtime: FolderRuntime, **changes: Any) -> Tools:
    limits: dict[str, Any] = {"env": {"MINE": "mine"}, "command_timeout_s": 30.0, "max_output_bytes": 64}
    return Tools(runtime, **limits | changes)


def call(name: str, arguments: object) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": text}}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (call("run_command", {"command": "echo $MINE; echo wrong >&2; exit 3"}), "mine\nwrong\n\n[exit code 3]"),
        (call("run_command", {"command": "true"}), "[exit code 0]"),
        (call("run_command", {"command": "kill -9 $$"}), "[killed by signal 9]"),
        (
            call("run_command", {"command": "yes | head -c 100"}),
            "y\n" * 32 + "\n[cut off after 64 bytes]\n[exit code 0]",
        ),
        (call("run_command", {"command": "x" * 200_000}), "error: the command holds a NUL or is too long"),
        (call("run_command", {"cmd": "ls"}), "error: these arguments cannot be read: Object missing required field"),
        (call("run_command", "not json"), "error: these arguments cannot be read"),
        (call("read_file", {"path": "nowhere"}), "error: nowhere does not exist"),
        (call("read_file", {"path": "bytes"}), "error: bytes is no text in UTF-8"),
        (call("read_file", {"path": "long"}), "error: long is larger than 64 bytes"),
        (call("fly", {}), "error: there is no tool 'fly'; there are run_command, read_file, write_file"),
    ],
)
async def test_what_the_model_gets_wrong_is_told_to_it(runtime: FolderRuntime, asked: Any, told: str) -> None:
    runtime.file("bytes").write_bytes(b"\xff\xfe")
    runtime.file("long").write_text("x" * 65)
    result = await tools_of(runtime).answer(asked)
    assert (result["role"], result["tool_call_id"]) == ("tool", "call-1")
    assert result["content"].startswith(told)


async def test_a_command_that_takes_too_long_is_killed_and_that_is_told(runtime: FolderRuntime) -> None:
    result = await tools_of(runtime, command_timeout_s=0.1).answer(call("run_command", {"command": "sleep 600"}))
    assert result["content"] == "[killed after 0.1 s]"


async def test_a_file_is_written_as_it_is_and_read_back(runtime: FolderRuntime) -> None:
    tools = tools_of(runtime)
    written = await tools.answer(call("write_file", {"path": "a/b.txt", "content": "straße\n"}))
    assert written["content"] == "8 bytes written"
    assert (await tools.answer(call("read_file", {"path": "a/b.txt"})))["content"] == "straße\n"


async def test_a_runtime_that_is_gone_is_not_the_models_doing(
    runtime: FolderRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: Any, **__: Any) -> None:
        raise RuntimeFailed("the sandbox is gone")

    monkeypatch.setattr(runtime, "exec", gone)
    with pytest.raises(RuntimeFailed):
        await tools_of(runtime).answer(call("run_command", {"command": "true"}))


def test_what_is_offered_is_what_there_is() -> None:
    assert [tool["function"]["name"] for tool in OFFERED] == ["run_command", "read_file", "write_file"]


def native(**task: Any) -> Lease:
    return lease_of(agent={"harness": "native", **task.pop("agent", {})}, **task)


async def lived(folder: Path, lease: Lease, *rules: dict[str, Any]) -> SessionResult:
    script = {"rules": [*rules, {"pattern": ".", "text": "done"}]}
    async with node_parts(folder, script=script) as parts, asyncio.timeout(60):
        result = await Attempt(lease, parts).live()
        assert list(parts.runtimes_folder.iterdir()) == []
    assert processes_with(str(folder)) == {}
    return result


async def test_its_last_answer_is_what_it_said(tmp_path: Path) -> None:
    result = await lived(tmp_path, native())
    assert (result.outcome, result.artifacts["harness.stdout"]) == ("completed", b"done")


@pytest.mark.parametrize("rule", [SLEEP, FIRST | {"faults": {"hang": True}}], ids=["in a command", "in a call"])
async def test_runs_budget_ends_it_wherever_it_is(tmp_path: Path, rule: dict[str, Any]) -> None:
    result = await lived(tmp_path, native(timeout_seconds=1.5), rule)
    assert result.outcome == "agent_timeout"
    assert result.harness_exit is not None
    assert result.harness_exit.timed_out


async def test_a_limit_of_turns_ends_it(tmp_path: Path) -> None:
    again = {"tool_calls": [{"run": "true"}]}
    result = await lived(tmp_path, native(agent={"max_turns": 2}), again)
    assert (result.outcome, len(result.completions)) == ("turn_limit", 2)


async def test_an_engine_that_never_recovers_is_our_fault_not_the_agents(tmp_path: Path) -> None:
    result = await lived(tmp_path, native(), FIRST | {"faults": {"status": 500, "times": None}})
    assert result.outcome == "infra_error"
    assert result.failure is not None
    assert result.failure.boundary == "engine"


async def test_a_call_that_is_refused_is_told_with_what_was_said(tmp_path: Path) -> None:
    result = await lived(tmp_path, native(), FIRST | {"faults": {"status": 400, "times": None}})
    assert result.outcome == "agent_error"
    assert result.failure is not None
    assert "refused with 400" in result.failure.message
    assert "scripted fault" in result.failure.message


async def test_a_cancelled_session_leaves_nothing_of_it(tmp_path: Path) -> None:
    script = {"rules": [SLEEP]}
    async with node_parts(tmp_path, script=script) as parts, asyncio.timeout(60):
        living = asyncio.create_task(Attempt(native(), parts).live())
        while not list(tmp_path.rglob("began")):
            await asyncio.sleep(0.01)
        living.cancel()
        with pytest.raises(asyncio.CancelledError):
            await living
        assert list(parts.runtimes_folder.iterdir()) == []
    assert processes_with(str(tmp_path)) == {}
