"""Mistakes of a task over the real ways: refused by the server, or, where only a node can know them, told with the true
cause, and never as the agent's."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.node.sessions.attempt import Attempt
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.server.run import serving
from support.node.attempt import lease_of, node_parts
from support.task_mistakes import MISTAKES, SHELL


async def test_the_server_refuses_each_mistake_with_its_field(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path, control_token=None) as running, aiohttp.ClientSession() as http:
        for field, fields in MISTAKES[::3]:
            body = json.dumps({"instruction": "Do it.", "agent": SHELL, **fields})
            headers = {"Content-Type": "application/json"}
            async with http.post(f"{running.url}/v1/tasks", data=io.BytesIO(body.encode()), headers=headers) as reply:
                told = await reply.text()
                assert reply.status in (400, 422), (fields, told)
                is_json = not any(word in body for word in ("NaN", "Infinity", "9" * 400))
                assert field in told or not is_json, (fields, told)


BACKENDS = ["process", "sandbox"]


async def ended(tmp_path: Path, runtime: dict[str, Any], command: Any = "true") -> SessionResult:
    if runtime["backend"] == "sandbox":
        try:
            await BubblewrapRuntime().check()
        except RuntimeUnavailable as error:
            pytest.skip(error.message)
    given = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    lease = lease_of(
        instruction="x" * 200_000, runtime=runtime, agent=given, evaluator={"strategy": "session_completed"}
    )
    async with node_parts(tmp_path) as parts:
        return await Attempt(lease, parts).live()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["no-such-program"], "no-such-program"),
        (["/no/such/program"], "/no/such/program"),
        (["/etc/passwd"], "/etc/passwd"),
    ],
    ids=["not in PATH", "no such path", "not a program"],
)
async def test_a_program_that_could_not_be_started_is_not_the_agents_failure(
    tmp_path: Path, backend: str, command: list[str], told: str
) -> None:
    result = await ended(tmp_path, {"backend": backend}, command)
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code) == ("runtime", "command_not_started")
    assert told in result.failure.message


@pytest.mark.parametrize("command", ["exit 127", "no-such-program", "echo 'gangline: sh: no' >&2; exit 1"])
async def test_a_program_that_ends_badly_itself_has_failed(tmp_path: Path, command: str) -> None:
    result = await ended(tmp_path, {"backend": "process"}, command)
    assert (result.outcome, result.reward) == ("agent_error", 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_largest_limits_are_taken(tmp_path: Path, backend: str) -> None:
    most = dict.fromkeys(("memory_bytes", "max_file_bytes", "disk_bytes", "max_files"), 2**63 - 1)
    limits = {**most, "max_pids": 4_194_304, "cpus": 65_536}
    result = await ended(tmp_path, {"backend": backend, "limits": limits})
    assert (result.outcome, result.failure, result.reward) == ("completed", None, 1.0)


def test_a_limit_above_the_machines_own_is_the_machines() -> None:
    program = (
        "import resource as r; from gangline.sandbox.commands.helpers.command import _confine\n"
        "r.setrlimit(r.RLIMIT_FSIZE, (1 << 20, 1 << 30))\n"
        "_confine({'uid': None, 'rlimits': {r.RLIMIT_FSIZE: 1 << 40}, 'own_namespace': False, 'filters': []})\n"
        "assert r.getrlimit(r.RLIMIT_FSIZE) == (1 << 30, 1 << 30)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_an_image_that_is_not_there_or_lies_in_the_nodes_data_is_no_failure_of_the_agents(tmp_path: Path) -> None:
    for image in ("/no/such/image", str(tmp_path / "runtimes")):
        result = await ended(tmp_path / image.strip("/").replace("/", "_"), {"backend": "sandbox", "image": image})
        assert (result.outcome, result.reward) == ("infra_error", None)
        assert result.failure is not None
        assert result.failure.boundary != "harness"
