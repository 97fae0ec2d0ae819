"""A task that asks to be graded in a clean runtime is graded there, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest
from gangline.settings.plugins import check_task

CONFIGS: dict[str, dict[str, Any]] = {
    "script": {"command": "true"},
    "swe_bench": {"fail_to_pass": ["t"], "test_command": "true"},
    "test_on_output": {"checks": [{"kind": "equals", "value": "1"}]},
    "session_completed": {},
    "cases": {"cases": [{"input": "1", "output": "1"}]},
    "composite": {"parts": [{"strategy": "session_completed"}, {"strategy": "script", "config": {"command": "true"}}]},
    "judge": {"engine": "judge", "rubric": "r"},
    "shaped": {"evaluator": {"strategy": "session_completed"}, "turns": {}},
}


def _task(strategy: str, refresh: bool) -> TaskRequest:
    return TaskRequest.model_validate(
        {
            "instruction": "go",
            "agent": {"harness": "shell", "settings": {"command": "true"}},
            "evaluator": {"strategy": strategy, "config": CONFIGS[strategy], "refresh_runtime": refresh},
        }
    )


@pytest.mark.parametrize("strategy", ["script", "swe_bench", "cases", "composite"])
def test_evaluators_that_grade_in_a_clean_runtime_take_the_task(strategy: str) -> None:
    check_task(_task(strategy, True))


@pytest.mark.parametrize("strategy", ["test_on_output", "session_completed", "judge", "shaped"])
def test_evaluators_that_would_ignore_it_refuse_the_task(strategy: str) -> None:
    check_task(_task(strategy, False))
    with pytest.raises(InvalidRequest, match=rf"refresh_runtime: evaluator '{strategy}' grades in no clean runtime"):
        check_task(_task(strategy, True))
