"""Sessions that run out of memory, in a real sandbox: the agent's act is the agent's outcome, the grader's is not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions
from gangline.domain.errors import ActionServerFailed, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.lifecycle import is_infrastructure_fault, may_retry
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.session import SessionResult
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.node.sessions.attempt import Attempt
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from support.node.attempt import lease_of, node_parts

MEMORY_BYTES = 128 << 20
HOG = shlex.join(["python3", "-c", f"x = bytearray({MEMORY_BYTES * 2}); x[::4096] = b'1' * len(x[::4096])"])


async def ended(tmp_path: Path, command: str, **task: Any) -> SessionResult:
    runtime = {"backend": "sandbox", "limits": {"memory_bytes": MEMORY_BYTES}, **task.pop("runtime", {})}
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    async with node_parts(tmp_path / "node") as parts:
        result = await Attempt(lease_of(runtime=runtime, agent=agent, **task), parts).live()
    if "cgroup" not in (told := result.limits["memory_bytes"]):
        pytest.skip(f"does not apply: memory is limited by {told}")
    return result


@pytest.mark.parametrize("command", [HOG, f"echo begins; {HOG}", f"{HOG}; exit $?"])
async def test_an_agent_killed_by_its_limit_ends_as_such_is_graded_and_not_retried(
    tmp_path: Path, command: str
) -> None:
    result = await ended(tmp_path, command, evaluator={"strategy": "session_completed", "config": {}}, max_attempts=3)
    assert (result.outcome, result.reward) == ("memory_limit", 0.0)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code) == ("harness", "memory_limit")
    assert result.failure.message == "the agent was killed: more than 128 MiB of memory (limits.memory_bytes)"
    assert not is_infrastructure_fault(result.failure)
    assert not may_retry(result.failure, 1, 3)


@pytest.mark.parametrize(
    ("command", "outcome"),
    [(f"{HOG}; echo lives", "completed"), (f"{HOG}; exit 3", "agent_error"), ("kill -9 $$", "agent_error")],
)
async def test_an_agent_that_survives_its_child_or_dies_otherwise_is_not_marked(
    tmp_path: Path, command: str, outcome: str
) -> None:
    result = await ended(tmp_path, command)
    assert result.outcome == outcome


@pytest.mark.parametrize("refresh", [False, True])
async def test_a_grader_killed_by_the_limit_is_the_evaluators_failure(tmp_path: Path, refresh: bool) -> None:
    evaluator = {"strategy": "script", "refresh_runtime": refresh, "config": {"command": HOG}}
    result = await ended(tmp_path, "true", evaluator=evaluator)
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert result.failure.boundary == "evaluator"
    assert "the grading command was killed: more than 128 MiB of memory" in result.failure.message


async def test_a_prepare_action_killed_by_the_limit_says_so(tmp_path: Path) -> None:
    result = await ended(tmp_path, "true", runtime={"prepare": [{"type": "exec", "command": HOG}]})
    assert result.failure is not None
    assert (result.outcome, result.failure.code) == ("infra_error", "prepare_failed")
    assert "was killed: more than 128 MiB of memory" in result.failure.message


async def test_a_tool_process_killed_by_the_limit_says_so(tmp_path: Path) -> None:
    """A server of the agent's tools, which is a channel's command."""
    runtime = BubblewrapRuntime()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    spec = RuntimeSpec(network="none", limits=LimitsSpec(memory_bytes=MEMORY_BYTES))
    handle = await runtime.start(RuntimeStart(runtime_id="r", owner=new_id("test"), spec=spec, folder=tmp_path / "r"))
    try:
        if "cgroup" not in (told := handle.limits()["memory_bytes"]):
            pytest.skip(f"does not apply: memory is limited by {told}")
        await handle.upload("python", f"#!/bin/sh\nexec {HOG}\n".encode(), mode=0o755)
        with pytest.raises(ActionServerFailed, match="it was killed: more than 128 MiB of memory"):
            await ActionServer.start(handle, options=ActionServerOptions(python=f"{handle.workdir}/python"))
    finally:
        await handle.stop()
