"""Tasks of Inspect as ours: the same rewards as by Inspect's own runner, and named reasons where that cannot be."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from inspect_ai import eval_async
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import value_to_float
from inspect_ai.solver import Solver, TaskState, solver
from inspect_ai.util import sandbox

from gangline.domain.contracts import EvaluationContext
from gangline.domain.errors import EvaluatorError, InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import ExecAction, RuntimeSpec, decoded
from gangline.machine.reading.imported import Choices, Imported
from gangline.settings import plugins
from gangline.tasks.importers.source import Wanted, read_source
from support.compared import same
from support.requirements import need
from support.training.evaluation_samples import a_context, a_trace, said

TASKS = """
import asyncio
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import (
    Score, accuracy, answer, choice, exact, f1, includes, match, model_graded_qa, pattern, scorer
)
from inspect_ai.solver import generate, multiple_choice, prompt_template, system_message
from inspect_ai.util import sandbox
from shared import WEIGHTS

def asks(scorer, target="42", **more):
    return Task(dataset=[Sample(input="What is 6 * 7?", target=target, **more)], scorer=scorer)

@scorer(metrics=[accuracy()])
def near(within: float):
    async def score(state, target) -> Score:
        try:
            gap = abs(float(state.output.completion.split()[-1]) - float(target.text))
        except (ValueError, IndexError):
            return Score(value=-1, explanation="no number")
        return Score(value=max(0.0, 1 - WEIGHTS["gap"] * gap / within))
    return score
near_scorer = near

@scorer(metrics=[accuracy()])
def tests_pass():
    async def score(state, target):
        ran = await sandbox().exec(["python3", "solution.py"], input="20 22", cwd=".", env={"BASE": "10"}, timeout=30)
        notes = await sandbox().read_file("notes.txt")
        ok = ran.success and ran.stdout.strip() == target.text and notes == "from setup\\nfrom a file"
        return Score(value="C" if ok else "I", explanation=ran.stderr[-200:])
    return score

@scorer(metrics=[accuracy()])
def of_parts():
    async def score(state, target):
        return Score(value={"form": 1, "content": 0})
    return score

@task
def matched(): return asks(match())
@task
def matched_at_the_start(): return asks(match(location="begin", ignore_case=False))
@task
def included(): return asks(includes(), target=["42", "forty-two"])
@task
def exactly(): return asks(exact())
@task
def overlapping(): return asks(f1(), target="the answer is 42")
@task
def by_pattern(): return asks(pattern(r"ANSWER: (\\d+)"))
@task
def after_a_word(): return asks(answer("line"))
@task
def nearly(): return asks(near(within=4), metadata={"unit": "none"})
@task
def coding():
    sample = Sample(input="Add the numbers in stdin and $BASE in solution.py.", target="52",
                    files={"part.txt": "from a file"}, setup="{ echo from setup; cat part.txt; } >notes.txt")
    return Task(dataset=[sample], scorer=tests_pass(), sandbox="gangline", solver=[system_message("Hi"), generate()])

@task
def two_scorers(): return Task(dataset=[Sample(input="x", target="y")], scorer=[match(), includes()])
@task
def prepared(): return Task(dataset=[Sample(input="x", target="y")], scorer=match(), setup=system_message("Hi"))
@task
def chosen():
    return Task(dataset=[Sample(input="x", choices=["a", "b"], target="A")], solver=multiple_choice(), scorer=choice())
@task
def judged(): return asks(model_graded_qa())
@task
def in_parts(): return asks(of_parts())
@task
def in_a_container(): return Task(dataset=[Sample(input="x", target="y")], scorer=match(), sandbox=("docker", "c.yaml"))
"""
SHARED = "WEIGHTS = {'gap': 1.0}\n"
ANSWERS = {
    "matched": ["It is 42", "", "42 or 43"],
    "matched_at_the_start": ["42 it is", "It is 42"],
    "included": ["It is forty-two.", ""],
    "exactly": ["42", "", "The 42"],
    "overlapping": ["the answer is 42", "", "42 is the number"],
    "by_pattern": ["ANSWER: 42", "", "42"],
    "after_a_word": ["I think.\nANSWER: 42", ""],
    "nearly": ["It is 42", "", "43", "41.5"],
}
SOLUTION = "import os; print(sum(map(int, input().split())) + int(os.environ['BASE']))"
CHEAT = """
for path in ("reward.json", "/home/grader/reward.json"):
    try:
        open(path, "w").write('{"reward": 1}')
    except OSError:
        pass
"""
PROGRAMS = {"right": SOLUTION, "wrong": "print(53)", "none": None, "cheating": CHEAT}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tasks.py").write_text(TASKS)
    (folder / "shared.py").write_text(SHARED)
    return folder


def imported(place: Path, task: str, **choices: Any) -> dict[str, Any]:
    wanted = Wanted(choices=Choices(**choices))
    (one,) = read_source(Path(f"inspect:{place}/tasks.py@{task}"), wanted)
    assert isinstance(one, Imported)
    return one.body


@solver
def answers(text: str) -> Solver:
    """Says it without a model, whose replies Inspect would count with a tokenizer from the network."""

    async def solve(state: TaskState, generate: Any) -> TaskState:
        state.output = ModelOutput.from_content("mockllm/model", text)
        state.messages.append(state.output.message)
        return state

    return solve


@solver
def writes(text: str | None) -> Solver:
    async def solve(state: TaskState, generate: Any) -> TaskState:
        if text is not None:
            await sandbox().write_file("solution.py", text)
        return state

    return solve


async def at_home(place: Path, task: str, agent: Solver) -> float:
    """The reward by Inspect's own runner."""
    (log,) = await eval_async(
        f"{place}/tasks.py@{task}", model="mockllm/model", solver=agent, log_dir=str(place / "logs")
    )
    assert log.status == "success", log.error
    (score,) = log.samples[0].scores.values()
    return value_to_float()(score.value)


@asynccontextmanager
async def prepared(body: dict[str, Any], folder: Path) -> AsyncGenerator[Sandbox]:
    spec = RuntimeSpec(**{**body["runtime"], "network": "none"})
    runtime_id = new_id("sandbox")
    start = RuntimeStart(runtime_id=runtime_id, owner="test", spec=spec, folder=folder / runtime_id)
    handle = await plugins.make_runtime(spec.backend).start(start)
    try:
        for action in spec.prepare:
            if isinstance(action, ExecAction):
                ran = await handle.exec(action.command)
                assert ran.ok, ran.stderr
            else:
                await handle.upload(action.path, decoded(action.content, action.encoding), mode=action.mode)
        yield handle
    finally:
        await handle.stop()


async def scored(body: dict[str, Any], context: EvaluationContext) -> float:
    evaluator = plugins.make_evaluator(body["evaluator"]["strategy"], body["evaluator"]["config"])
    return (await evaluator.evaluate(context)).reward


async def of_an_answer(body: dict[str, Any], answer: str, folder: Path) -> float:
    trace = a_trace(said("assistant", answer), prompt=(said("user", body["instruction"]),))
    async with prepared(body, folder) as handle:
        context = a_context(handle, fresh=handle, traces=(trace,))
        assert body["evaluator"]["refresh_runtime"]
        return await scored(body, msgspec.structs.replace(context, refresh_runtime=True))


@pytest.mark.parametrize("task", ANSWERS)
async def test_an_answer_earns_what_inspects_own_runner_gives(place: Path, task: str, tmp_path: Path) -> None:
    body = imported(place, task)
    ours = {(task, answer): await of_an_answer(body, answer, tmp_path) for answer in ANSWERS[task]}
    theirs = {(task, answer): await at_home(place, task, answers(answer)) for answer in ANSWERS[task]}
    same("Inspect", theirs, ours)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_scorer_of_files_gives_the_same_reward_in_our_session(
    place: Path, program: str, tmp_path: Path
) -> None:
    need(os.geteuid() == 0, "does not apply: a scorer's own user needs root")
    text = PROGRAMS[program]

    body = imported(place, "coding")
    async with prepared(body, tmp_path) as handle:
        if text is not None:
            await handle.upload("solution.py", text.encode())
        ours = await scored(body, a_context(handle))
    assert ours == (program == "right")
    theirs = await at_home(place, "coding", writes(text))
    same("Inspect", {("coding", program): theirs}, {("coding", program): ours})


async def test_a_program_without_a_model_answers_on_its_standard_output(place: Path, tmp_path: Path) -> None:
    body = imported(place, "matched")
    async with prepared(body, tmp_path) as handle:
        assert await scored(body, a_context(handle, fresh=handle, stdout=b"42")) == 1
        assert await scored(body, a_context(handle, fresh=handle)) == 0


def test_the_target_is_a_solution_where_inspects_scorer_takes_it(place: Path) -> None:
    assert imported(place, "matched")["solution"] == {"answer": "42", "floor": 0.0}
    assert imported(place, "nearly")["solution"] == {"answer": "42", "floor": -1.0}
    assert "solution" not in imported(place, "by_pattern")


def test_the_sample_is_kept_and_its_target_is_not_for_the_agent(place: Path) -> None:
    body = imported(place, "coding")
    assert body["metadata"]["instance"]["target"] == "52"
    assert body["instruction"].startswith("Add the numbers")
    assert "52" not in str(body["runtime"])


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("two_scorers", "2 scorers"),
        ("prepared", "`setup`"),
        ("chosen", "`choices`"),
        ("judged", "No model specified"),
        ("in_parts", "is not a number"),
        ("in_a_container", r"docker \(.*c.yaml\)"),
        ("missing", "missing"),
    ],
)
def test_what_cannot_be_taken_over_is_named(place: Path, task: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        imported(place, task)


def test_a_container_is_stood_for_by_choice(place: Path) -> None:
    assert imported(place, "in_a_container", runtime="sandbox")["runtime"]["backend"] == "sandbox"


async def test_a_scorer_that_fails_gives_no_reward(place: Path, tmp_path: Path) -> None:
    body = imported(place, "matched")
    files = body["evaluator"]["config"]["files"]
    files[".inspect/config.json"] = files[".inspect/config.json"].replace("inspect_ai/match", "inspect_ai/missing")
    with pytest.raises(EvaluatorError, match="missing"):
        await of_an_answer(body, "42", tmp_path)
