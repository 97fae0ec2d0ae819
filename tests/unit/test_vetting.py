"""The parts of an audit that need no service: solutions as agents, mutants, changed graders, and the checks."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest, vetted_digest
from gangline.tasks.vetting.audit import audit
from gangline.tasks.vetting.checks import CheckResult, checked, of_all_steps, verdict_of
from gangline.tasks.vetting.conditions import all_conditions
from gangline.tasks.vetting.evidence import Evidence, evidence_of
from gangline.tasks.vetting.grading import answered_on_stdout, leaves, reward_files, with_command
from gangline.tasks.vetting.held_out import against_held_out
from gangline.tasks.vetting.mutants import mutants
from gangline.tasks.vetting.panel import panel
from gangline.tasks.vetting.searching import named_files, search
from gangline.tasks.vetting.subject import Subject, subject_of
from gangline.tasks.vetting.trials import Trial, program, scripted, solved_task
from gangline.train.run.vetted import require_vetted

AGENT = {"harness": "shell", "settings": {"command": "true"}}
SCRIPT = {"strategy": "script", "config": {"command": "true", "reward_file": "reward.txt"}}
MATH = {"strategy": "math", "config": {"answer": "3"}}


def subject(**changes: Any) -> Subject:
    return subject_of("t", {"instruction": "Do it.", "agent": AGENT, "evaluator": SCRIPT, **changes})


def evidence(trial: str, reward: float | None = 1.0, **changes: Any) -> Evidence:
    return Evidence(trial=trial, session_id=f"s-{trial}", **({"outcome": "completed", "reward": reward} | changes))


def ended(session_id: str, **changes: Any) -> SessionResult:
    given: dict[str, Any] = {"task_id": "t", "node_id": "n", "attempt": 1, "fence": 1, "outcome": "completed"}
    return SessionResult(session_id=session_id, **(given | changes))


def checks_of(about: Subject, *found: Evidence) -> dict[str, CheckResult]:
    tried: dict[str, list[Evidence]] = {}
    for one in found:
        tried.setdefault(one.trial, []).append(one)
    return checked(about, tried)


SOLVED = subject(solution={"command": "true"})
BARE = [
    {"name": "one", "instruction": "Build.", "evaluator": SCRIPT, "min_reward": 0.5, "timeout_seconds": 60},
    {"name": "two", "instruction": "Paint.", "evaluator": MATH, "settings": {"stdin": "of another harness"}},
]
FIRST_LINE = "the first line of what the first step builds"
BOTH = [
    BARE[0] | {"solution": {"files": {"sled.py": f"{FIRST_LINE}\n"}}},
    BARE[1] | {"solution": {"command": "echo $COLOUR", "env": {"COLOUR": "3"}, "floor": 0.25}},
]
STEPS = {"instruction": "Build, then paint.", "agent": AGENT, "steps": BOTH}


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("oracle", [evidence("oracle", 0.5), evidence("oracle", 0.5)]),
        ("oracle", [evidence("oracle", None, outcome="infra_error", message="no reward file")]),
        ("floor", [evidence("floor", 0.1)]),
        ("floor", [evidence("floor", None)]),
        ("grader", [evidence("floor", None, outcome="infra_error", boundary="evaluator", code="evaluator_error")]),
        ("grader", [evidence("mutants.breaking.garbled", None, outcome="agent_error", code="grading_spoiled")]),
        ("flakes", [evidence("oracle"), evidence("oracle", 0.0)]),
        ("budget", [evidence("oracle", outcome="agent_timeout")]),
        ("budget", [evidence("oracle", run_s=1100.0)]),
        ("tests", [evidence("oracle", output="===== 3 skipped in 0.01s =====")]),
        ("tests", [evidence("oracle", output="Ran 0 tests in 0.000s")]),
        ("tests", [evidence("oracle", output="Ran 2 tests in 0.000s\n\nOK (skipped=2)")]),
        ("tests", [evidence("oracle", output="collected 0 items")]),
        ("cheats", [evidence("cheats.claims", 0.5)]),
        ("mutants", [evidence("mutants.preserving", 0.0, num_mutated=1)]),
        ("mutants", [evidence("mutants.breaking.hollow", num_mutated=1)]),
        ("mutants", [evidence(f"mutants.point.{at}", num_mutated=1) for at in (1, 2)]),
        ("conditions", [evidence("conditions", 0.0), evidence("conditions.clock", 0.0)]),
    ],
)
def test_a_check_fails(check: str, found: list[Evidence]) -> None:
    result = checks_of(SOLVED, *found)[check]
    assert result.status == "failed"
    assert result.message
    assert set(result.sessions) <= {one.session_id for one in found}


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("tests", [evidence("oracle", output="===== 2 passed, 1 skipped in 0.01s =====")]),
        ("tests", [evidence("oracle", output="Ran 2 tests in 0.000s\n\nOK (skipped=1)")]),
        (
            "cheats",
            [evidence("cheats.claims", 0.0), evidence("cheats.plants", None), evidence("cheats.hard_coded", 0.5)],
        ),
        ("grader", [evidence("floor", 0.0), evidence("mutants.breaking.garbled", 0.0, code="grading_spoiled")]),
        ("grader", [evidence("floor", None, outcome="agent_error", boundary="harness", code="harness_error")]),
        ("mutants", [evidence("mutants.point.1", num_mutated=1), evidence("mutants.point.2", 0.0, num_mutated=1)]),
        ("conditions", [evidence("conditions")]),
    ],
)
def test_a_check_passes(check: str, found: list[Evidence]) -> None:
    assert checks_of(SOLVED, *found)[check].status == "passed"


def test_a_mutation_that_changed_nothing_says_nothing() -> None:
    assert checks_of(SOLVED, evidence("mutants.breaking.hollow"))["mutants"].status == "not_checked"


def test_without_a_solution_a_task_is_unproven_and_one_failure_makes_it_defective() -> None:
    found = [evidence("floor", 0.0), evidence("cheats.claims", 0.0)]
    assert verdict_of(checks_of(subject(), *found)) == "unproven"
    assert verdict_of(checks_of(SOLVED, *found, evidence("oracle"), evidence("oracle"))) == "sound"
    assert verdict_of(checks_of(SOLVED, *found, evidence("oracle"), evidence("oracle", 0.0))) == "defective"


def test_faults_of_the_service_say_nothing_of_a_task_and_a_broken_preparation_does() -> None:
    lost = evidence("oracle", None, outcome="infra_error", boundary="node", code="node_error")
    broken = evidence("oracle", None, outcome="infra_error", boundary="runtime", code="prepare_failed")
    grader = evidence("oracle", None, outcome="infra_error", boundary="evaluator", code="evaluator_error")
    assert [one.is_ours for one in (lost, broken, grader)] == [True, False, False]


@pytest.mark.parametrize("given", [{}, {"answer": "1", "patch": "x"}, {"answer": "1", "floor": 1.0}])
def test_a_solution_is_one_thing_above_its_floor(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"give one of|floor must be below"):
        TaskRequest.model_validate({"instruction": "x", "agent": AGENT, "solution": given})


def test_a_verdict_is_about_the_content_and_not_about_the_agent() -> None:
    request = TaskRequest.model_validate({"instruction": "x", "agent": AGENT, "evaluator": SCRIPT})
    other = request.model_copy(update={"agent": request.agent.model_copy(update={"max_turns": 3}), "num_samples": 4})
    assert vetted_digest(request) == vetted_digest(other)
    assert vetted_digest(request) != vetted_digest(request.model_copy(update={"instruction": "y"}))
    digests = {vetted_digest(TaskRequest.model_validate({**STEPS, "steps": steps})) for steps in (BOTH, BARE, BARE[:1])}
    assert len(digests) == 2, "a solution is none of the content, and a step is"


def test_an_answer_is_read_from_standard_output_wherever_the_evaluator_is() -> None:
    composite = {"strategy": "composite", "config": {"parts": [{"weight": 0.5, **MATH}, {"weight": 0.5, **SCRIPT}]}}
    read = answered_on_stdout(composite)
    assert [leaf["config"].get("source") for leaf in leaves(read)] == ["stdout", None]
    assert [leaf["strategy"] for leaf in leaves(read)] == ["math", "script"]
    assert read["config"]["parts"][0]["weight"] == 0.5


def test_a_graders_command_runs_after_other_code_and_twice(tmp_path: Path) -> None:
    config = {"command": "echo ran >> runs.txt; echo $MARK > reward.txt", "reward_file": "reward.txt"}
    changed = with_command({"strategy": "script", "config": config}, before="export MARK=7", again=True)
    assert changed is not None
    (leaf,) = leaves(changed)
    subprocess.run(leaf["config"]["command"], cwd=tmp_path, check=True)
    assert (tmp_path / "runs.txt").read_text() == "ran\nran\n"
    assert (tmp_path / "reward.txt").read_text() == "7\n"
    assert with_command(MATH, before="", again=False) is None
    assert reward_files(changed) == ["reward.txt"]


def test_conditions_are_for_graders_that_run_something() -> None:
    answers = subject(evaluator=MATH, solution={"answer": "3"})
    assert answers.solution is not None
    assert all_conditions(answers, answers.solution) is None
    assert SOLVED.solution is not None
    found = all_conditions(SOLVED, SOLVED.solution)
    assert found is not None
    assert found.body["runtime"]["network"] == "none"


def test_trials_are_valid_tasks() -> None:
    answer = subject(evaluator=MATH, solution={"answer": "\\boxed{3}"})
    for about in (SOLVED, answer, *subject_of("t", STEPS).steps):
        assert about.solution is not None
        trials = [*panel(about, ["out.txt"]), *mutants(about, about.solution)]
        assert len({trial.name for trial in trials}) == len(trials) >= 4
        for trial in trials:
            TaskRequest.model_validate({**trial.body, "task_id": f"vet-{trial.name}"})


def test_a_trial_of_a_step_comes_behind_the_solutions_of_the_steps_before() -> None:
    first, second = subject_of("t", STEPS).steps
    assert (first.timeout_s, first.top, first.floor, second.timeout_s, second.floor) == (60, 1, 0, 1200, 0.25)
    assert second.solution is not None
    assert second.solution.command == ("env", "COLOUR=3", "sh", "-c", "echo $COLOUR")
    floor = TaskRequest.model_validate({**scripted(second, "floor", "exit 0").body, "task_id": "floor"})
    assert floor.step_reward == "final"
    before, this = floor.steps
    assert (before.name, before.min_reward, this.name) == ("one", None, "two")
    assert base64.b64decode(before.settings["stdin"]).decode() == f"{FIRST_LINE}\n"
    assert this.settings == {"command": ["sh", "-c", "exit 0"]}
    assert this.evaluator.config["source"] == "stdout", "as no model is called"
    alone = TaskRequest.model_validate({**scripted(first, "floor", "exit 0").body, "task_id": "floor"})
    assert [step.name for step in alone.steps] == ["one"]


def test_a_step_may_have_what_the_step_before_made() -> None:
    late = BOTH[1] | {"solution": {"files": {"sled.py": f"{FIRST_LINE}\nand the second line of it\n"}}}
    _, second = subject_of("t", {**STEPS, "steps": [BOTH[0], late]}).steps
    asked = json.loads(base64.b64decode(search(second, {}).body["steps"][-1]["settings"]["stdin"]))
    ((lines, _),) = asked["groups"].values()
    assert lines == ["and the second line of it"]


def test_the_solution_of_a_task_with_steps_is_one_of_each_step() -> None:
    found = solved_task("t", STEPS)
    assert found is not None
    task = TaskRequest.model_validate({**STEPS, **found})
    assert [step.min_reward for step in task.steps] == [0.5, None]
    assert task.steps[1].settings["command"][-1] == "echo $COLOUR"
    assert solved_task("t", {**STEPS, "steps": [BOTH[0], BARE[1]]}) is None


async def test_a_step_behind_one_without_a_solution_is_not_checked() -> None:
    asked: list[str] = []

    async def run(trial: Trial, _: int) -> list[SessionResult]:
        asked.append(trial.name)
        return [ended(trial.name, reward=0.0)]

    audited = await audit(subject_of("t", {**STEPS, "steps": [BARE[0], BOTH[1]]}), run)
    assert asked
    assert all(name.startswith("step-1.") for name in asked)
    oracle = audited.checks["oracle"]
    assert oracle.status == "not_checked"
    assert oracle.message == (
        "step 'one': the task has no reference solution; step 'two': step 'one' before it has no reference solution"
    )
    assert audited.checks["floor"].status == "not_checked", "it passed in one step alone"
    assert verdict_of(audited.checks) == "unproven"


def test_a_check_of_a_task_with_steps_fails_where_one_step_does() -> None:
    passed, failed = CheckResult(status="passed"), CheckResult(status="failed", message="no", sessions=("s",))
    found = of_all_steps({"one": {"floor": passed, "oracle": passed}, "two": {"floor": failed, "oracle": passed}})
    assert found == {"floor": CheckResult(status="failed", message="step 'two': no", sessions=("s",)), "oracle": passed}


def test_the_graders_output_is_that_of_the_last_step() -> None:
    details = {"steps": [{"details": {"output": "one"}}, {"details": {"output": "two"}}], "step_reward": "final"}
    assert evidence_of("oracle", [ended("s", reward_details=details)])[0].output == "two"
    own = {"steps": ["walked"], "output": "of a grader that has its own steps"}
    assert evidence_of("oracle", [ended("s", reward_details=own)])[0].output == own["output"]


def test_files_that_an_instruction_names() -> None:
    text = "Read `in/data.csv` and ./conf/app.toml, see https://x.org/a.html, e.g. `x.y`, and write `out.txt`."
    assert named_files(subject(instruction=text)) == ["in/data.csv", "./conf/app.toml", "out.txt"]


SOURCE = '''#!/usr/bin/env python3
def area(width, height):
    """Doc."""
    if width < 0:
        return 0
    return width * height  # a comment
print(area(2, 3))
'''


def mutated(tmp_path: Path, mode: str, name: str = "area.py", text: str = SOURCE) -> tuple[str, str]:
    """The file afterwards, and the report."""
    file, listing = tmp_path / name, tmp_path / "list"
    file.write_text(text)
    listing.write_text(f"{file}\n")
    done = subprocess.run(
        [sys.executable, "-I", "-", mode, listing], input=program("mutate"), capture_output=True, text=True, check=True
    )
    return file.read_text(), done.stderr


def output_of(source: str) -> str:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout


def test_mutants_of_programs_behave_as_they_should(tmp_path: Path) -> None:
    same, _ = mutated(tmp_path, "preserve")
    assert same != SOURCE
    assert same.startswith("#!/usr/bin/env python3\n")
    assert output_of(same) == "6\n"
    hollow, _ = mutated(tmp_path, "hollow")
    assert output_of(hollow) == ""
    points = [mutated(tmp_path, f"point:{at}/3") for at in range(3)]
    assert len({text for text, _ in points}) == 3
    assert all(report.startswith("gangline-vet: mutated") for _, report in points)


def test_mutants_of_other_files(tmp_path: Path) -> None:
    assert mutated(tmp_path, "hollow", "a.txt", "Total 19 of z\n")[0] == "Upubm 20 pg a\n"
    assert mutated(tmp_path, "preserve", "a.json", '{"a":[1,2]}')[0].split() == ["{", '"a":', "[", "1,", "2", "]", "}"]
    assert mutated(tmp_path, "point:0/3", "a.txt", "19") == ("19", "")


def test_held_out_tasks_differ_in_more_than_case_and_blanks() -> None:
    one, other = subject(), subject(evaluator=MATH)
    held_out = {"instruction": " do  IT. ", "evaluator": SCRIPT}
    assert against_held_out([one], [held_out])["t"].status == "failed"
    assert against_held_out([other], [held_out])["t"].status == "passed"
    assert against_held_out([subject_of("t", STEPS)], [STEPS])["t"].status == "failed"
    assert against_held_out([subject_of("t", STEPS)], [{**STEPS, "steps": BARE[:1]}])["t"].status == "passed"


def test_a_run_may_require_sound_tasks() -> None:
    task = {"instruction": "Do it.", "agent": AGENT, "evaluator": SCRIPT}
    verdict = {"verdict": "sound", "digest": vetted_digest(TaskRequest.model_validate(task)), "gangline": "0"}
    sound = task | {"vetting": verdict | {"vetted_at": "2026-11-23T12:00:00+00:00"}}
    require_vetted([sound, sound | {"agent": AGENT | {"max_turns": 2}}], "tasks")
    defective = sound | {"vetting": sound["vetting"] | {"verdict": "defective"}}
    with pytest.raises(InvalidRequest) as raised:
        require_vetted([task, sound, sound | {"instruction": "x"}, defective], "tasks")
    assert "3 of 4 tasks" in raised.value.message
    assert "1 was not audited, 3 was changed after its audit, 4 is defective" in raised.value.message
