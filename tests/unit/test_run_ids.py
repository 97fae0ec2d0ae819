"""Which run or evaluation numbered a task, by the task's id."""

from __future__ import annotations

import pytest

from gangline.domain.ids import new_id, run_of


@pytest.mark.parametrize(
    ("task_id", "run"),
    [
        ("demo-ab12cd-000007", "demo-ab12cd"),
        ("demo-ab12cd-000007.run2", "demo-ab12cd"),
        ("demo-ab12cd-000007.coalition5", "demo-ab12cd"),
        ("demo-ab12cd-1000000", "demo-ab12cd"),
        ("demo-ab12cd-evaluation-000003-v000002-0001", "demo-ab12cd-evaluation"),
        ("gsm8k-0123456789ab-000004.run3", "gsm8k-0123456789ab"),
        ("000001-000002", "000001"),
        ("task-00001", ""),
        ("demo-ab12cd-000007.0", ""),
        ("task-123456789012", ""),
        ("my-agent", ""),
        ("-000001", ""),
        ("000001", ""),
    ],
)
def test_tasks_of_a_run_are_told_from_those_of_people(task_id: str, run: str) -> None:
    assert run_of(task_id) == run


def test_an_id_that_the_server_chose_is_of_no_run() -> None:
    assert {run_of(new_id("task")) for _ in range(2000)} == {""}
