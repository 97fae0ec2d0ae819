"""Evaluations by Inspect's own command in our sandboxes, to their end, interrupted and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import EvalLog, read_eval_log

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver
from inspect_ai.tool import bash
from inspect_ai.util import sandbox

@solver
def runs(command: list[str]):
    async def solve(state, generate):
        state.metadata["said"] = (await sandbox().exec(command)).stdout
        return state
    return solve

@scorer(metrics=[accuracy()])
def the_file_is_right():
    async def score(state, target):
        made = await sandbox().read_file("answer.txt")
        return Score(value=1 if made == target.text and "gangline" in state.metadata["said"] else 0)
    return score

@task
def small():
    sample = Sample(input="go", target="made\\n42", files={"given/number.txt": "42"}, setup="echo made >setup.txt")
    command = "cat setup.txt given/number.txt >answer.txt && uname -n"
    return Task(dataset=[sample], solver=runs(["sh", "-c", command]), scorer=the_file_is_right())

@task
def endless():
    return Task(dataset=[Sample(input="go", target="42")], solver=runs(["sleep", "600"]), scorer=the_file_is_right())
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def inspect(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "inspect_ai", *arguments],
        cwd=place,
        env={**os.environ, "TMPDIR": str(place), "INSPECT_DISPLAY": "plain"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )


def evaluating(place: Path, task: str, sandbox: str = "gangline") -> subprocess.Popen[str]:
    model = ("--model", "mockllm/model", "--log-dir", "logs")
    return inspect(place, "eval", f"tasks.py@{task}", "--sandbox", sandbox, *model)


def log_of(place: Path) -> EvalLog:
    (found,) = (place / "logs").iterdir()
    return read_eval_log(str(found))


def sandboxes(place: Path) -> list[Path]:
    return [folder for root in place.glob("gangline-inspect-*") for folder in root.iterdir()]


def sleepers(folder: Path) -> list[str]:
    """Processes of a sandbox that sleep."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder.name in (process / "mountinfo").read_text():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return [line for line in found if line.startswith("sleep\0")]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_sample_has_its_files_and_setup_and_is_scored_in_its_sandbox(place: Path) -> None:
    (place / "runtime.json").write_text(json.dumps({"limits": {"memory_bytes": 1 << 30}}))
    running = evaluating(place, "small", "gangline:runtime.json")
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 0, output
    log = log_of(place)
    assert log.status == "success", log.error
    assert [score.value for score in log.samples[0].scores.values()] == [1]
    assert sandboxes(place) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_evaluation_that_is_interrupted_or_killed_leaves_no_process(place: Path, how: signal.Signals) -> None:
    running = evaluating(place, "endless")
    try:
        wait_until(lambda: running.poll() is not None or any(map(sleepers, sandboxes(place))))
        assert running.poll() is None, running.stdout.read()
        (folder,) = sandboxes(place)
        running.send_signal(how)
        running.communicate(timeout=60)
    finally:
        running.kill()
    wait_until(lambda: not sleepers(folder))
    if how == signal.SIGKILL:
        cleaning = inspect(place, "sandbox", "cleanup", "gangline")
        assert "1 sandboxes removed" in cleaning.communicate(timeout=60)[0]
    assert sandboxes(place) == []
