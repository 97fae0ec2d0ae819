"""The parts of an audit that need no service: solutions as agents, mutants, changed graders, and the checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest, vetted_digest
from gangline.training.run.vetted import require_vetted
from gangline.vetting.checks import CheckResult, checked, verdict_of
from gangline.vetting.conditions import all_conditions
from gangline.vetting.evidence import Evidence
from gangline.vetting.grading import answered_on_stdout, leaves, reward_files, with_command
from gangline.vetting.held_out import against_held_out
from gangline.vetting.mutants import mutants
from gangline.vetting.panel import panel
from gangline.vetting.searching import named_files
from gangline.vetting.subject import Subject, subject_of
from gangline.vetting.trials import program

AGENT = {"harness": "shell", "settings": {"command": "true"}}
SCRIPT = {"strategy": "script", "config": {"command": "true", "reward_file": "reward.txt"}}
MATH = {"strategy": "math", "config": {"answer": "3"}}


def subject(**changes: Any) -> Subject:
    return subject_of("t", {"instruction": "Do it.", "agent": AGENT, "evaluator": SCRIPT, **changes})


def evidence(trial: str, reward: float | None = 1.0, **changes: Any) -> Evidence:
    return Evidence(trial=trial, session_id=f"s-{trial}", **({"outcome": "completed", "reward": reward} | changes))


def checks_of(about: Subject, *found: Evidence) -> dict[str, CheckResult]:
    tried: dict[str, list[Evidence]] = {}
    for one in found:
        tried.setdefault(one.trial, []).append(one)
    return checked(about, tried)


SOLVED = subject(solution={"command": "true"})


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("oracle", [evidence("oracle", 0.5), evidence("oracle", 0.5)]),
        ("oracle", [evidence("oracle", None, outcome="infra_error", message="no reward file")]),
        ("floor", [evidence("floor", 0.1)]),
        ("floor", [evidence("floor", None)]),
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
    for about in (SOLVED, answer):
        assert about.solution is not None
        trials = [*panel(about, ["out.txt"]), *mutants(about, about.solution)]
        assert len({trial.name for trial in trials}) == len(trials) >= 4
        for trial in trials:
            TaskRequest.model_validate({**trial.body, "task_id": f"vet-{trial.name}"})


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
