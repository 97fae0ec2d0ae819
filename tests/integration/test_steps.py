"""Tasks with steps: real agents, run and graded several times in one sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.node.sessions.attempt import Attempt
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from support.node.attempt import lease_of, node_parts
from support.service.cli_process import processes_with

AGENT = """
import json, os, subprocess, sys, urllib.request
for _ in range(int(os.environ.get("CALLS", "1"))):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    urllib.request.urlopen(request).read()
sys.exit(subprocess.run(sys.argv[1], shell=True).returncode)
"""
"""Does what its instruction, a shell command, says."""
HARNESS: dict[str, Any] = {"harness": "shell", "settings": {"command": "python3 ~/agent.py {instruction}"}}
WRITE_AGENT = {"type": "exec", "command": f"cat > ~/agent.py <<'EOF'\n{AGENT}\nEOF"}


@pytest.fixture(params=["process", "sandbox"])
async def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "sandbox":
        try:
            await BubblewrapRuntime().check()
        except RuntimeUnavailable as error:
            pytest.skip(error.message)
    return request.param


def step(name: str, does: str, command: str = "echo 1 > out/reward.txt", **fields: Any) -> dict[str, Any]:
    """A step whose agent runs the shell command `does`, graded by another in the agent's sandbox."""
    config = {
        "command": command,
        "files": {"tests/hidden": name},
        "clear": ["tests", "out"],
        "reward_file": ["out/reward.json", "out/reward.txt"],
    }
    return {"name": name, "instruction": does, "evaluator": {"strategy": "script", "config": config}, **fields}


def fields_of(backend: str, steps: list[dict[str, Any]], **task: Any) -> dict[str, Any]:
    runtime = {"backend": backend, "prepare": [WRITE_AGENT]}
    return {"runtime": runtime, "agent": HARNESS, "steps": steps, **task}


async def ended(tmp_path: Path, backend: str, *steps: dict[str, Any], **task: Any) -> SessionResult:
    async with node_parts(tmp_path) as parts, asyncio.timeout(120):
        result = await Attempt(lease_of(**fields_of(backend, list(steps), **task)), parts).live()
        assert not parts.serves("s1")
    assert list((tmp_path / "runtimes").iterdir()) == []
    return result


def rewards(result: SessionResult) -> list[float | None]:
    return [one["reward"] for one in result.reward_details["steps"]]


async def test_each_step_begins_with_what_the_agent_left_and_sees_nothing_of_the_grading(
    tmp_path: Path, backend: str
) -> None:
    result = await ended(
        tmp_path,
        backend,
        step("one", "test -e seed && echo a > left", prepare=[{"type": "write", "path": "seed", "content": "x"}]),
        step("two", "ls tests/hidden out/reward.txt .gangline; cat left made", "grep -q two tests/hidden && "
             "echo 0.5 > out/reward.txt", prepare=[{"type": "exec", "command": "cat left left > made"}]),
    )  # fmt: skip
    assert (result.outcome, result.failure, result.reward) == ("completed", None, 0.75)
    assert rewards(result) == [1.0, 0.5]
    assert result.artifacts["harness.stdout"] == b"a\na\na\n"
    assert b"tests/hidden" in result.artifacts["harness.stderr"], "what the first step's grader had is gone"
    assert "step-1/harness.stdout" in result.artifacts
    assert [one.stage for one in result.timings] == ["init", "ready", "run", "postrun"] * 2


async def test_rows_of_all_steps_have_the_sessions_reward_and_turns_the_steps(tmp_path: Path) -> None:
    result = await ended(tmp_path, "process", step("one", "true"), step("two", "true", "echo 0 > out/reward.txt"))
    assert result.trajectory is not None
    assert [call.prompt_messages[-1].parts[0].text for call in result.trajectory.traces] == ["true", "true"]  # type: ignore[union-attr]
    assert [trace.reward for trace in result.trajectory.traces] == [0.5, 0.5]
    assert [span.score for trace in result.trajectory.traces for span in trace.spans] == [1.0, 0.0]
    assert len(result.completions) == 2


async def test_a_step_below_its_minimum_is_the_last(tmp_path: Path) -> None:
    low = step("one", "true", "echo 0.4 > out/reward.txt", min_reward=0.5)
    result = await ended(tmp_path, "process", low, step("two", "touch reached"))
    assert (result.outcome, result.reward, rewards(result)) == ("completed", 0.4, [0.4])
    assert result.reward_details["ended_early"] == "step 'one': reward 0.4 is below min_reward 0.5"


async def test_named_numbers_are_compared_and_averaged_one_by_one(tmp_path: Path) -> None:
    def numbers(text: str) -> str:
        return f"echo '{text}' > out/reward.json"

    result = await ended(
        tmp_path,
        "process",
        step("one", "true", numbers('{"reward": 1, "style": 0.5}'), min_reward={"style": 0.5}),
        step("two", "true", numbers('{"reward": 0.5}'), min_reward={"style": 0}),
        step("three", "true"),
    )
    assert result.reward_details["values"] == {"reward": 0.75, "style": 0.25}
    assert "the grader gave no style" in result.reward_details["ended_early"]


async def test_the_final_step_alone_can_count(tmp_path: Path) -> None:
    last = step("two", "true", "echo 0.25 > out/reward.txt")
    result = await ended(tmp_path, "process", step("one", "true"), last, step_reward="final")
    assert result.reward == 0.25


async def test_a_step_whose_agent_failed_or_was_late_is_graded_and_the_next_one_begins(
    tmp_path: Path, backend: str
) -> None:
    result = await ended(
        tmp_path,
        backend,
        step("fails", "exit 3"),
        step("late", "echo a > b; exec sleep 600", "grep -q a b && echo 1 > out/reward.txt", timeout_seconds=4),
        step("well", "true"),
    )
    assert [one["outcome"] for one in result.reward_details["steps"]] == ["agent_error", "agent_timeout", "completed"]
    assert (result.outcome, result.reward) == ("completed", 1.0)


async def test_processes_that_an_agent_left_are_dead_while_it_is_graded_and_in_the_next_step(
    tmp_path: Path, backend: str
) -> None:
    busy = "(while :; do date +%s%N > beat; sleep 0.01; done) >/dev/null 2>&1 & sleep 0.3"
    still = "cp beat b; sleep 0.3; cmp beat b && echo 1 > out/reward.txt || echo 0 > out/reward.txt"
    left = f"{still}; (while :; do date +%s%N > beat; sleep 0.01; done) >/dev/null 2>&1 & sleep 0.1"
    result = await ended(tmp_path, backend, step("one", busy, left), step("two", "cp beat c; sleep 0.3; cmp beat c"))
    assert (result.outcome, rewards(result)) == ("completed", [1.0, 1.0])


async def test_limits_are_each_steps_own(tmp_path: Path) -> None:
    agent = HARNESS | {"max_turns": 2, "env": {"CALLS": "2"}}
    result = await ended(tmp_path, "process", step("one", "true"), step("two", "true"), agent=agent)
    assert (result.outcome, len(result.completions)) == ("completed", 4)
    agent["env"] = {"CALLS": "3"}
    result = await ended(tmp_path / "more", "process", step("one", "true"), step("two", "true"), agent=agent)
    assert [one["outcome"] for one in result.reward_details["steps"]] == ["turn_limit"] * 2


async def test_a_step_without_a_call_leaves_the_session_without_a_reward(tmp_path: Path) -> None:
    silent = step("two", "true", settings={"command": "true"})
    result = await ended(tmp_path, "process", step("one", "true"), silent)
    assert (result.outcome, result.reward) == ("no_model_call", None)
    assert result.trajectory is not None
    assert [trace.reward for trace in result.trajectory.traces] == [None]


async def test_a_preparation_that_fails_is_tried_again_as_a_whole(tmp_path: Path) -> None:
    broken = step("two", "true", prepare=[{"type": "exec", "command": "exit 4"}])
    result = await ended(tmp_path, "process", step("one", "true"), broken)
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.code, result.failure.retryable) == ("prepare_failed", True)


async def test_each_step_can_be_graded_in_a_clean_runtime(tmp_path: Path, backend: str) -> None:
    def clean(name: str, reward: str) -> dict[str, Any]:
        given = step(name, f"echo {name} > answer", f"test ! -e seed; cat answer; echo {reward} > out/reward.txt")
        given["evaluator"]["config"]["collect"] = ["answer"]
        given["evaluator"]["refresh_runtime"] = True
        return given | {"prepare": [{"type": "write", "path": "seed", "content": "x"}]}

    result = await ended(tmp_path, backend, clean("one", "1"), clean("two", "0"))
    assert (result.outcome, result.reward, rewards(result)) == ("completed", 0.5, [1.0, 0.0])
    said = [one["details"]["output"] for one in result.reward_details["steps"]]
    assert said == ["one", "two"]


async def test_a_session_that_is_cancelled_in_its_second_step_leaves_nothing(tmp_path: Path, backend: str) -> None:
    mark = f"sleep 600.{abs(hash(str(tmp_path))) % 10**8}"
    steps = [step("one", "true"), step("two", f"touch begun; {mark} & {mark}")]
    async with node_parts(tmp_path) as parts:
        attempt = Attempt(lease_of(**fields_of(backend, steps)), parts)
        life = asyncio.create_task(attempt.live(), name="session.s1")
        async with asyncio.timeout(60):
            while not processes_with(mark.partition(" ")[2]):
                await asyncio.sleep(0.02)
        life.cancel()
        with pytest.raises(asyncio.CancelledError):
            await life
        assert not parts.serves("s1")
    assert not processes_with(mark.partition(" ")[2])
    assert list((tmp_path / "runtimes").iterdir()) == []
