"""What a task with steps may have, and how the numbers of its steps become one reward."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.errors import EvaluatorError, InvalidRequest
from gangline.domain.placement import needs_of
from gangline.domain.task import TaskRequest, task_digest, vetted_digest
from gangline.node.sessions.grading.steps import below_minimum, combined_values, reward_among
from gangline.settings.plugins import check_task

TASK: dict[str, Any] = {
    "instruction": "both",
    "runtime": {"backend": "process"},
    "agent": {"harness": "shell", "settings": {"command": "true"}},
    "timeout_seconds": 9,
    "steps": [{"name": "a", "instruction": "first"}, {"name": "b", "instruction": "second", "timeout_seconds": 5}],
}


def task(**changes: Any) -> TaskRequest:
    return TaskRequest.model_validate({**TASK, **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"steps": [TASK["steps"][0]] * 2}, "two have the name 'a'"),
        ({"evaluator": {"strategy": "script", "config": {"command": "true"}}}, "each step has one of its own"),
        ({"environments": {"world": {"kind": "gymnasium"}}}, "they end with the agent's first run"),
        ({"fork": {"session_id": "s", "attempt": 1, "turn": 1}}, "cannot be continued from one of its turns"),
        ({"capture": {"durable": "turn"}}, "begins anew where its node is lost"),
        ({"capture": {"checkpoints": "turn"}}, "of sessions with one run"),
        ({"solution": {"command": "true"}}, "solution: each step has one of its own"),
        ({"steps": [{"name": "a", "instruction": "x", "evaluator": {"keep_files": True}}]}, "cannot be graded again"),
    ],
)
def test_what_steps_cannot_go_with_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        task(**changes)


def test_a_step_is_a_task_with_its_own_fields_over_the_tasks() -> None:
    whole = task(steps=[TASK["steps"][0], TASK["steps"][1] | {"settings": {"stdin": "x"}}])
    first, second = whole.at_step(0), whole.at_step(1)
    assert (first.instruction, first.timeout_seconds, first.steps) == ("first", 9, ())
    assert (second.instruction, second.timeout_seconds) == ("second", 5)
    assert second.agent.settings == {"command": "true", "stdin": "x"}


def test_steps_are_part_of_what_a_task_is_and_their_absence_changes_no_digest() -> None:
    alone = {name: value for name, value in TASK.items() if name != "steps"}
    without = TaskRequest.model_validate(alone)
    assert task_digest(without) == task_digest(TaskRequest.model_validate({**alone, "steps": []}))
    assert len({task_digest(one) for one in (without, task(), task(step_reward="final"))}) == 3
    assert vetted_digest(task()) != vetted_digest(without)


def test_a_step_with_wrong_settings_is_named() -> None:
    check_task(task())
    wrong = TASK["steps"][1] | {"settings": {"comand": "x"}}
    with pytest.raises(InvalidRequest, match=r"steps\.1 \(b\): harness 'shell'"):
        check_task(task(steps=[TASK["steps"][0], wrong]))


def test_a_node_needs_the_runtimes_of_all_graders() -> None:
    grader = {"strategy": "script", "config": {"command": "true"}, "refresh_runtime": True}
    step = TASK["steps"][1] | {"evaluator": {**grader, "runtime": {"backend": "docker", "image": "x"}}}
    assert needs_of(task(steps=[TASK["steps"][0], step])).runtimes == ("docker", "process")


@pytest.mark.parametrize(
    ("minimum", "is_below"),
    [(None, False), (0.5, False), (0.6, True), ({"style": 0}, False), ({"speed": -9}, True), ({}, False)],
)
def test_a_number_that_is_missing_is_below_any_minimum(minimum: Any, is_below: bool) -> None:
    assert (below_minimum({"reward": 0.5, "style": 0}, minimum) is not None) == is_below


def test_numbers_are_averaged_over_the_steps_that_began_and_missing_ones_are_zero() -> None:
    steps = [{"reward": 1.0, "style": 1.0}, {"reward": 0.5}]
    assert combined_values(steps, "mean") == {"reward": 0.75, "style": 0.5}
    assert combined_values(steps, "final") == {"reward": 0.5}
    assert reward_among({"style": 0.5}) == 0.5
    with pytest.raises(EvaluatorError, match="gave no `reward`, but style, speed"):
        reward_among({"style": 1.0, "speed": 1.0})
