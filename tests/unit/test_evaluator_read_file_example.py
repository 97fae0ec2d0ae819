"""The file-reading example: its grader on its own, and its tasks."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline import plugins
from gangline.domain.task import TaskRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "read_file"
build_tasks = runpy.run_path(str(EXAMPLE / "tasks.py"))["build_tasks"]


def grade(folder: Path, *traces: tuple[str, ...]) -> dict[str, Any]:
    """What the grader writes for traces in which the model said these things, with the harness's words in between."""
    (folder / ".gangline").mkdir()
    (folder / "expected.json").write_text(json.dumps({"file": "lamp42.txt", "word": "river"}))
    said = [
        {"response_messages": [part for text in texts for part in (role("assistant", text), role("user", "Output: x"))]}
        for texts in traces
    ]
    (folder / ".gangline" / "trajectory.json").write_text(json.dumps({"traces": said}))
    subprocess.run([sys.executable, "-I", str(EXAMPLE / "grade.py")], cwd=folder, check=True)
    return json.loads((folder / "reward.json").read_text())


def role(name: str, text: str) -> dict[str, str]:
    return {"role": name, "content": text}


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (("cat lamp42.txt", "river"), 1.0),
        ((" tail 'lamp42.txt'\n", " river\n"), 1.0),
        (("cat lamp42.txt", "River"), 0.5),
        (("cat lamp42.txt", "the word is river"), 0.5),
        (("cat lamp24.txt", "river"), 0.5),
        (("cat lamp42.txt; ls", "river"), 0.5),
        (("cat lamp42.txt lamp42.txt", "river"), 0.5),
        (("rm lamp42.txt", "no"), 0.0),
        (("cat 'lamp42.txt", "no"), 0.0),
        (("cat lamp42.txt",), 0.5),
        ((), 0.0),
    ],
)
def test_half_for_the_command_and_half_for_the_word(tmp_path: Path, said: tuple[str, ...], reward: float) -> None:
    assert grade(tmp_path, said)["reward"] == reward


def test_the_turns_count_in_order_also_when_each_is_a_trace(tmp_path: Path) -> None:
    assert grade(tmp_path, ("cat lamp42.txt",), ("river",))["reward"] == 1.0


def test_its_tasks_are_ones_that_a_server_accepts() -> None:
    tasks = [TaskRequest.model_validate(task) for task in build_tasks(3, seed=7)]
    for task in tasks:
        plugins.make_harness(task.agent.harness, task.agent.settings)
        plugins.make_evaluator(task.evaluator.strategy, task.evaluator.config)
    assert len({task.task_id for task in tasks}) == 3
    assert {task.num_samples for task in tasks} == {8}


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert list(build_tasks(3, seed=7)) == list(build_tasks(3, seed=7))
    assert [task["instruction"] for task in build_tasks(3, seed=7)] != [
        task["instruction"] for task in build_tasks(3, seed=8)
    ]


def test_the_agent_never_holds_the_answer_but_in_the_file() -> None:
    (task,) = build_tasks(1)
    word = json.loads(task["evaluator"]["config"]["files"]["expected.json"])["word"]
    agent = json.dumps(task["agent"]) + task["instruction"]
    assert word not in agent
    assert [action["path"] for action in task["runtime"]["prepare"] if action["content"] == f"{word}\n"]
