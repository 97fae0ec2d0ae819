"""The file-reading example: its grader on its own, and its tasks."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.task import TaskRequest
from gangline.settings import plugins
from gangline.train.run.experiment import read_experiment

EXAMPLE = Path(__file__).parents[2] / "examples" / "read_file"
build_tasks = runpy.run_path(str(EXAMPLE / "tasks.py"))["build_tasks"]
EVERY_HARNESS = pytest.mark.parametrize("harness", ["shell", "pi"])


Said = str | tuple[tuple[str, str], ...]
"""Of one answer: its text, or its tool calls by name and arguments."""


def grade(folder: Path, *traces: tuple[Said, ...], reads_by: str = "command") -> dict[str, Any]:
    """What the grader writes for traces in which the model said these things, with the harness's words in between."""
    (folder / ".gangline").mkdir()
    (folder / "expected.json").write_text(json.dumps({"file": "lamp42.txt", "word": "river", "reads_by": reads_by}))
    written = [
        {
            "response_messages": [
                part for one in said for part in (answer(one), {"role": "user", "content": "Output: x"})
            ]
        }
        for said in traces
    ]
    (folder / ".gangline" / "trajectory.json").write_text(json.dumps({"traces": written}))
    subprocess.run([sys.executable, "-I", str(EXAMPLE / "grade.py")], cwd=folder, check=True)
    return json.loads((folder / "reward.json").read_text())


def answer(said: Said) -> dict[str, Any]:
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    calls = [{"id": "c", "type": "function", "function": {"name": name, "arguments": text}} for name, text in said]
    return {"role": "assistant", "content": "", "tool_calls": calls}


READ = ("read", '{"path": "lamp42.txt"}')


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


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (((READ,), "river"), 1.0),
        (((READ,), " river\n"), 1.0),
        (((READ,), "River"), 0.5),
        (((READ,),), 0.5),
        (((READ,), (READ,)), 0.5),
        (((READ, READ), "river"), 0.5),
        (((("bash", '{"path": "lamp42.txt"}'),), "river"), 0.5),
        (((("read", '{"path": "lamp24.txt"}'),), "no"), 0.0),
        (((("read", '{"file": "lamp42.txt"}'),), "no"), 0.0),
        (((("read", '["lamp42.txt"]'),), "no"), 0.0),
        (((("read", '{"path": '),), "no"), 0.0),
        (("cat lamp42.txt", "no"), 0.0),
        (("river",), 0.0),
    ],
)
def test_half_for_the_tool_call_where_the_model_has_tools(
    tmp_path: Path, said: tuple[Said, ...], reward: float
) -> None:
    assert grade(tmp_path, said, reads_by="tool")["reward"] == reward


def test_a_tool_call_is_no_command(tmp_path: Path) -> None:
    assert grade(tmp_path, ((READ,), "no"))["reward"] == 0.0


def test_the_turns_count_in_order_also_when_each_is_a_trace(tmp_path: Path) -> None:
    assert grade(tmp_path, ("cat lamp42.txt",), ("river",))["reward"] == 1.0


@EVERY_HARNESS
def test_its_tasks_are_ones_that_a_server_accepts(harness: str) -> None:
    tasks = [TaskRequest.model_validate(task) for task in build_tasks(3, harness=harness, seed=7)]
    for task in tasks:
        plugins.make_harness(task.agent.harness, task.agent.settings)
        plugins.make_evaluator(task.evaluator.strategy, task.evaluator.config)
        assert task.agent.harness == harness
    assert len({task.task_id for task in tasks}) == 3
    assert {task.num_samples for task in tasks} == {8}


@pytest.mark.parametrize("path", sorted((EXAMPLE / "experiments").glob("*.yaml")), ids=lambda path: path.name)
def test_its_experiments_are_ones_that_a_trainer_accepts(path: Path) -> None:
    experiment = read_experiment(path)
    assert experiment.data.tasks.parent == path.parent
    assert experiment.evaluation is not None
    assert experiment.evaluation.tasks.parent == path.parent
    assert experiment.data.tasks.name in path.read_text().partition("name:")[0], "it says how its tasks are made"


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert list(build_tasks(3, seed=7)) == list(build_tasks(3, seed=7))
    assert [task["instruction"] for task in build_tasks(3, seed=7)] != [
        task["instruction"] for task in build_tasks(3, seed=8)
    ]


def test_more_tasks_go_on_from_fewer_and_every_one_is_about_another_file() -> None:
    tasks = list(build_tasks(96))
    assert tasks[:64] == list(build_tasks(64))
    assert len({task["instruction"] for task in tasks}) == 96


def test_every_harness_is_asked_the_same_under_ids_of_its_own() -> None:
    by_script, by_pi = (list(build_tasks(3, harness=harness, seed=7)) for harness in ("shell", "pi"))
    assert [task["instruction"] for task in by_script] == [task["instruction"] for task in by_pi]
    assert not {task["task_id"] for task in by_script} & {task["task_id"] for task in by_pi}


@EVERY_HARNESS
def test_the_agent_never_holds_the_answer_but_in_the_file(harness: str) -> None:
    (task,) = build_tasks(1, harness=harness)
    word = json.loads(task["evaluator"]["config"]["files"]["expected.json"])["word"]
    agent = json.dumps(task["agent"]) + task["instruction"]
    assert word not in agent
    assert [action["path"] for action in task["runtime"]["prepare"] if action["content"] == f"{word}\n"]
