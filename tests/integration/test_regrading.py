"""A node grades recorded sessions again: the same steps as for the first time, over the files that were kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import Conflict, InvalidRequest, RuntimeUnavailable
from gangline.domain.session import Grading, GradingRequest, SessionResult
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.replay.regrading import regrade
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from support.node.attempt import lease_of, node_parts

WRITES = "mkdir -p deep && printf 41 > deep/answer.txt && chmod 755 deep/answer.txt && rm -f given.txt"
PREPARED = [{"type": "write", "path": "given.txt", "content": "given"}]


@pytest.fixture(params=["process", "sandbox"])
async def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "sandbox":
        try:
            await BubblewrapRuntime().check()
        except RuntimeUnavailable as error:
            pytest.skip(error.message)
    return request.param


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncGenerator[NodeParts]:
    async with node_parts(tmp_path) as made:
        yield made
        assert list((tmp_path / "runtimes").iterdir()) == [], "every sandbox was stopped"


def expecting(number: int, **more: Any) -> dict[str, Any]:
    """An evaluator that reads the agent's file, and that a file which the agent removed is gone."""
    command = f"test ! -e given.txt && test $(cat deep/answer.txt) = {number}; echo $((1 - $?)) > reward.txt"
    return {"strategy": "script", "config": {"command": command, "timeout_seconds": 10}, **more}


def task(backend: str, evaluator: dict[str, Any], command: str = WRITES) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    return {"runtime": {"backend": backend, "prepare": PREPARED}, "agent": agent, "evaluator": evaluator}


async def recorded(parts: NodeParts, task: dict[str, Any]) -> SessionResult:
    return await Attempt(lease_of(**task), parts).live()


async def again(parts: NodeParts, task: dict[str, Any], result: SessionResult, evaluator: dict[str, Any]) -> Grading:
    given = lease_of(**task).task | {"evaluator": evaluator}
    return await regrade(GradingRequest(task=given, result=result), parts)


@pytest.mark.parametrize("clean", [False, True], ids=["own", "clean"])
async def test_an_evaluator_reads_the_files_that_the_agent_left(parts: NodeParts, backend: str, clean: bool) -> None:
    given = task(backend, expecting(42, keep_files=True))
    result = await recorded(parts, given)
    assert result.reward == 0.0
    mended = expecting(41)
    if clean:
        mended |= {"refresh_runtime": True}
        mended["config"] |= {"collect": ["deep/answer.txt"], "command": f"rm given.txt; {mended['config']['command']}"}
    verdict = await again(parts, given, result, mended)
    assert (verdict.outcome, verdict.failure, verdict.reward) == ("completed", None, 1.0)
    assert (await again(parts, given, result, expecting(42))).reward == 0.0


async def test_files_that_were_not_kept_are_no_reward_of_zero(parts: NodeParts) -> None:
    given = task("process", expecting(42))
    verdict = await again(parts, given, await recorded(parts, given), expecting(41))
    assert (verdict.outcome, verdict.reward) == ("infra_error", None)
    assert verdict.failure is not None
    assert verdict.failure.code == "files_not_kept"
    assert "`keep_files`" in verdict.failure.message


async def test_a_folder_that_is_too_large_says_so_later(parts: NodeParts) -> None:
    given = task("process", expecting(42, keep_files=True), "head -c 9000000 /dev/zero > large")
    result = await recorded(parts, given)
    assert result.artifacts.keys() & {"files.tar", "files.tar.missing"} == {"files.tar.missing"}
    verdict = await again(parts, given, result, expecting(41))
    assert verdict.failure is not None
    assert "more than 8388608 bytes" in verdict.failure.message


async def test_what_an_evaluator_reads_from_the_record_needs_no_files(parts: NodeParts) -> None:
    given = task("process", {}, "echo the answer is 42")
    result = await recorded(parts, given)
    right, wrong = (
        {
            "strategy": "test_on_output",
            "config": {"source": "stdout", "checks": [{"kind": "contains", "value": word}]},
        }
        for word in ("42", "43")
    )
    assert [(await again(parts, given, result, one)).reward for one in (right, wrong)] == [1.0, 0.0]


async def test_a_session_whose_grader_was_broken_is_graded_now(parts: NodeParts) -> None:
    broken = {"strategy": "script", "config": {"command": "exit 3"}, "keep_files": True}
    given = task("process", broken)
    result = await recorded(parts, given)
    assert (result.outcome, result.run_outcome, result.reward) == ("infra_error", "completed", None)
    verdict = await again(parts, given, result, expecting(41))
    assert (verdict.outcome, verdict.failure, verdict.reward) == ("completed", None, 1.0)
    still = await again(parts, given, result, broken)
    assert (still.outcome, still.reward) == ("infra_error", None)


async def test_what_never_reached_grading_is_refused_with_its_reason(parts: NodeParts) -> None:
    given = task("process", {})
    result = await recorded(parts, given)
    failed = msgspec.structs.replace(result, outcome="cancelled")
    with pytest.raises(Conflict, match="s1 ended as cancelled before it was graded"):
        await again(parts, given, failed, {})
    with pytest.raises(InvalidRequest, match="evaluator"):
        await again(parts, given, result, {"strategy": "script", "config": {}})
