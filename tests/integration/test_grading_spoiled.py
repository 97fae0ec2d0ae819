"""Agents that try to void their own grade: they are graded all the same, or are told as those who spoiled it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.node.sessions.attempt import Attempt
from gangline.rows.measured import why_without_reward
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from support.node.attempt import lease_of, node_parts

GRADE = """
import pathlib, subprocess
if pathlib.Path("solution.py").exists():
    subprocess.run(["python3", "solution.py"])
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out/reward.txt").write_text("0.5")
"""
GRADER: dict[str, Any] = {
    "command": "python3 tests/grade.py",
    "files": {"tests/grade.py": GRADE},
    "clear": ["out"],
    "reward_file": "out/reward.txt",
    "timeout_seconds": 10,
}


@pytest.fixture(params=["process", "sandbox"])
async def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "sandbox":
        try:
            await BubblewrapRuntime().check()
        except RuntimeUnavailable as error:
            pytest.skip(error.message)
    return request.param


async def ended(tmp_path: Path, backend: str, command: str, **evaluator: Any) -> SessionResult:
    """The result of a session whose agent is a shell command."""
    spec = {"strategy": "script", "config": GRADER, **evaluator}
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    async with node_parts(tmp_path) as parts:
        return await Attempt(lease_of(runtime={"backend": backend}, agent=agent, evaluator=spec), parts).live()


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p tests/closed && touch tests/closed/a tests/grade.py && chmod 000 tests/closed tests/grade.py tests",
        "mkdir -p out/in && touch out/in/file && chmod 000 out/in && chmod 555 out",
        "mkdir -p .gangline/home/in && touch .gangline/home/in/file && chmod 000 .gangline/home/in .gangline/home",
        "ln -s /etc tests; ln -s / out; ln -s /nowhere .gangline",
        "touch tests out .gangline",
        "mkdir -p tests/grade.py/in out/reward.txt/in && chmod 555 tests/grade.py out/reward.txt",
        "chmod 555 .",
        "chmod 000 .",
        "chmod 000 ~",
        "lib=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $lib; "
        "echo 'import os; os._exit(3)' > $lib/usercustomize.py",
    ],
)
async def test_what_an_agent_leaves_in_the_way_costs_it_no_grade(tmp_path: Path, backend: str, command: str) -> None:
    result = await ended(tmp_path, backend, command)
    assert (result.outcome, result.failure, result.reward) == ("completed", None, 0.5)


SPOILERS = {
    "killed": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "endless": "while True: pass",
    "in the way": "import shutil; shutil.rmtree('out'); open('out', 'w')",
}


@pytest.mark.parametrize("clean", [False, True], ids=["own", "clean"])
@pytest.mark.parametrize("spoiler", SPOILERS)
async def test_an_agent_that_spoils_its_grading_is_told_as_having_failed(
    tmp_path: Path, backend: str, spoiler: str, clean: bool
) -> None:
    config = GRADER | {
        "timeout_seconds": 3,
        "collect": ["solution.py"],
        "command": f"mkdir -p out; {GRADER['command']}",
    }
    command = f"cat > solution.py <<'END'\n{SPOILERS[spoiler]}\nEND"
    result = await ended(tmp_path, backend, command, config=config, refresh_runtime=clean)
    assert result.outcome == "agent_error"
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code) == ("harness", "grading_spoiled")
    assert not result.failure.retryable
    assert result.reward is None, "none is the default"
    assert why_without_reward(result) == "it has no reward", "kept out of its group, and no fault of ours"


async def test_the_task_may_say_what_a_spoiled_grading_is_worth(tmp_path: Path, backend: str) -> None:
    command = f"echo '{SPOILERS['killed']}' > solution.py"
    result = await ended(tmp_path, backend, command, on_failure=-0.25)
    assert (result.outcome, result.reward) == ("agent_error", -0.25)
    assert result.failure is not None
    assert result.failure.code == "grading_spoiled"
    assert "Killed" in result.reward_details["grading_failed"]
    assert why_without_reward(result) is None


@pytest.mark.parametrize("clean", [False, True], ids=["own", "clean"])
async def test_a_grader_that_is_broken_itself_is_no_failure_of_the_agents(tmp_path: Path, clean: bool) -> None:
    config = GRADER | {"command": "echo oh no >&2; exit 3"}
    result = await ended(tmp_path, "process", "true", config=config, refresh_runtime=clean, on_failure=0.0)
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code) == ("evaluator", "evaluator_error")
    assert "oh no" in result.failure.message
