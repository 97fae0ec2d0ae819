"""The families of shell tasks: every one is sound, and the agent program reads its model's replies in every style."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "families"
sys.path.insert(0, str(EXAMPLE))
try:
    build_tasks = runpy.run_path(str(EXAMPLE / "tasks.py"))["build_tasks"]
    families = runpy.run_path(str(EXAMPLE / "families.py"))
    agent = runpy.run_path(str(EXAMPLE / "agent.py"))
finally:
    sys.path.remove(str(EXAMPLE))

FAMILIES, make_puzzle = families["FAMILIES"], families["make_puzzle"]


def laid_out(folder: Path, puzzle: Any) -> Path:
    workdir = folder / "work"
    workdir.mkdir(parents=True)
    for path, content in puzzle.files.items():
        (workdir / path).write_text(content)
    return workdir


def graded(folder: Path, workdir: Path, puzzle: Any) -> float:
    """What the grader of the task says, run as its task has it run."""
    (task,) = build_tasks(1)
    hidden: Mapping[str, str] = task["evaluator"]["config"]["files"]
    home = folder / "grader"
    home.mkdir()
    (home / "grade.py").write_text(hidden["grade.py"])
    (home / "expected.json").write_text(json.dumps({"answer": puzzle.answer, "changed": dict(puzzle.changed)}))
    env = {"GANGLINE_WORKDIR": str(workdir), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "grade.py"], cwd=home, env=env, check=True)
    return json.loads((home / "reward.json").read_text())["reward"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_earns_1_and_doing_nothing_0(tmp_path: Path, family: str) -> None:
    for number in range(8):
        puzzle = make_puzzle(family, 0, number)
        folder = tmp_path / str(number)
        workdir = laid_out(folder / "oracle", puzzle)
        shown = [
            subprocess.run(["sh", "-c", command], cwd=workdir, capture_output=True, text=True, check=True).stdout
            for command in puzzle.commands
        ]
        assert puzzle.answer in shown[-1].replace(",", " ").replace("=", " ").split(), "the answer is there to be seen"
        assert all(len(one) <= agent["MAX_SHOWN_CHARS"] for one in shown), "the agent sees all of it"
        assert 2 <= len(puzzle.commands) <= 5
        (workdir / "answer.txt").write_text(puzzle.answer)
        assert graded(folder / "oracle", workdir, puzzle) == 1.0
        assert graded(folder / "nothing", laid_out(folder / "nothing", puzzle), puzzle) == 0.0


def test_a_right_answer_over_wrong_files_earns_nothing(tmp_path: Path) -> None:
    puzzle = make_puzzle("edit", 0, 0)
    workdir = laid_out(tmp_path, puzzle)
    (workdir / "answer.txt").write_text(puzzle.answer)
    assert graded(tmp_path, workdir, puzzle) == 0.0


def test_a_link_is_no_file_of_the_agents(tmp_path: Path) -> None:
    puzzle = make_puzzle("read", 0, 0)
    workdir = laid_out(tmp_path, puzzle)
    (tmp_path / "elsewhere").write_text(puzzle.answer)
    (workdir / "answer.txt").symlink_to(tmp_path / "elsewhere")
    assert graded(tmp_path, workdir, puzzle) == 0.0


def test_the_same_options_give_the_same_tasks_and_others_follow_them() -> None:
    tasks = list(build_tasks(24, num_samples=2))
    assert tasks == list(build_tasks(24, num_samples=2))
    assert tasks[16:] == list(build_tasks(8, first=16, num_samples=2))
    assert [task["metadata"]["family"] for task in tasks[:8]] == list(FAMILIES)
    held_out = list(build_tasks(4, families=["fix", "log"]))
    assert [task["metadata"]["family"] for task in held_out] == ["fix", "log", "fix", "log"]
    texts = [json.dumps(task["runtime"]["prepare"]) + task["instruction"] for task in tasks]
    assert len(set(texts)) == 24, "no two are the same"


@pytest.mark.parametrize(
    ("style", "text", "read"),
    [
        ("plain", "cat a.txt\n", ("run", "cat a.txt")),
        ("plain", "answer river", ("answer", "river")),
        ("plain", "step 1\ncat a.txt", ("run", "cat a.txt")),
        ("plain", " ", ("wrong", "error: an empty reply")),
        ("fenced", "Look.\n```bash\ncat a.txt\n```", ("run", "cat a.txt")),
        ("fenced", "```bash\necho ANSWER river\n```", ("answer", "river")),
        ("fenced", "cat a.txt", ("wrong", "error: one block of bash, please")),
        ("fenced", "```bash\nls\n```\n```bash\nls\n```", ("wrong", "error: one block of bash, please")),
        ("react", "I look. Action: cat a.txt", ("run", "cat a.txt")),
        ("react", "Final: river", ("answer", "river")),
        ("react", "cat a.txt", ("wrong", "error: Action: or Final:, please")),
    ],
)
def test_a_reply_is_read_in_its_style(style: str, text: str, read: tuple[str, str]) -> None:
    assert agent["read_reply"](style, text) == read


def test_a_runtime_without_a_second_user_grades_where_the_agent_worked(tmp_path: Path) -> None:
    (task,) = build_tasks(1, runtime="process")
    assert not task["evaluator"]["config"]["separate"]
    assert next(build_tasks(1))["evaluator"]["config"]["separate"]
    puzzle = make_puzzle("read", 0, 0)
    workdir = laid_out(tmp_path, puzzle)
    for name, content in task["evaluator"]["config"]["files"].items():
        (workdir / name).write_text(content)
    (workdir / "answer.txt").write_text(puzzle.answer)
    subprocess.run([sys.executable, "grade.py"], cwd=workdir, env={"PATH": "/usr/bin:/bin"}, check=True)
    assert json.loads((workdir / "reward.json").read_text())["reward"] == 1.0
