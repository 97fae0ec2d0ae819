"""Harbor's own runner judges tasks of eight kinds of shell work: oracle and nothing earn the same there and here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peers.test_steps_by_harbor import ours, python, theirs
from support.compared import same
from support.service.field_tasks import write

__all__ = ["python"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "families"
PUZZLES = """
import json
from families import FAMILIES, make_puzzle
puzzles = {name: make_puzzle(name, 0, 3) for name in FAMILIES}
print(json.dumps({name: {"instruction": one.instruction, "files": one.files, "commands": one.commands,
                         "answer": one.answer, "changed": one.changed} for name, one in puzzles.items()}))
"""
TOML = """
[agent]
timeout_sec = 60
[environment]
network_mode = "no-network"
[[steps]]
name = "only"
"""
TEST = """#!/bin/bash
python3 -I - <<'END'
import json, pathlib
expected = json.load(open("/tests/expected.json"))
def read(name):
    path = pathlib.Path("/app", name)
    return path.read_text() if path.is_file() else None
right = (read("answer.txt") or "").strip() == expected["answer"]
right = right and all(read(name) == text for name, text in expected["changed"].items())
kept = all(read(name) == text for name, text in expected["files"].items() if name not in expected["changed"])
json.dump({"reward": float(right), "kept": float(kept)}, open("/logs/verifier/reward.json", "w"))
END
"""


def puzzles() -> dict[str, dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", PUZZLES], cwd=EXAMPLE, capture_output=True, check=True)
    return json.loads(done.stdout)


def harbor_task(folder: Path, puzzle: dict[str, Any]) -> Path:
    solve = [*puzzle["commands"], f"printf %s {shlex.quote(puzzle['answer'])} > answer.txt"]
    own = folder / "steps" / "only"
    write(folder / "task.toml", TOML)
    write(folder / "environment" / "Dockerfile", "FROM debian:12\nWORKDIR /app\n")
    write(own / "instruction.md", puzzle["instruction"])
    write(own / "solution" / "solve.sh", "\n".join(["#!/bin/bash", *solve, ""]), 0o755)
    write(own / "tests" / "test.sh", TEST, 0o755)
    write(own / "tests" / "expected.json", json.dumps(puzzle))
    for name, text in puzzle["files"].items():
        write(own / "workdir" / name, text)
    return folder


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("family", ["read", "find", "count", "sort", "edit", "rename", "fix", "log"])
async def test_shell_work_earns_what_harbors_runner_gives(tmp_path: Path, python: str, family: str, agent: str) -> None:
    task = harbor_task(tmp_path / "task", puzzles()[family])
    wanted = await theirs(python, task, tmp_path / "harbor", agent)
    assert (wanted["error"], wanted["rewards"]["reward"]) == (None, float(agent == "oracle"))
    found = await ours(task, tmp_path / "gangline", agent)
    key = (f"shell work: {family}", agent)
    same("Harbor, its Trial", {key: wanted["rewards"]["reward"]}, {key: found.reward})
    assert found.reward_details["kept"] == wanted["rewards"]["kept"]
