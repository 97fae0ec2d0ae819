"""What a stranger writes into a task must go through every store and wire unchanged, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.task import TaskRequest

BASE = '{"instruction": "x", "agent": {"harness": "shell"%s}, %s}'


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ('"timeout_seconds": 1e999', "finite"),
        ('"init_timeout_seconds": NaN', "finite"),
        ('"metadata": {"a": [{"b": 1e999}]}', "metadata: numbers must be finite"),
        ('"metadata": {"a": ' + "9" * 30 + "}", "metadata: whole numbers must fit 64 bits"),
        ('"metadata": {"a": ' + "[" * 100 + "]" * 100 + "}", "metadata: must not be nested deeper"),
        ('"metadata": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "Invalid JSON"),
        ('"evaluator": {"config": {"a": -1e999}}', "evaluator.config: numbers"),
        ('"builder": {"strategy": "s", "a": 1e999}', "builder: numbers"),
        ('"num_samples": 4097', "less than or equal to 4096"),
        ('"task_id": "../../etc/passwd"', "task_id"),
        ('"callback_url": "file:///etc/passwd"', "callback_url"),
    ],
)
def test_what_would_not_arrive_as_it_was_sent_is_refused(field: str, why: str):
    with pytest.raises(ValidationError, match=why):
        TaskRequest.model_validate_json(BASE % ("", field))


def test_settings_of_the_agent_are_held_to_the_same():
    with pytest.raises(ValidationError, match=r"agent\.settings: numbers"):
        TaskRequest.model_validate_json(BASE % (', "settings": {"a": 1e999}', '"num_samples": 1'))


def test_what_travels_is_kept_as_it_is():
    metadata: dict[str, Any] = {"a": [1, 2.5, None, True, {"b": "é"}], "big": 2**63}
    task = TaskRequest.model_validate({"instruction": "x", "agent": {"harness": "shell"}, "metadata": metadata})
    assert TaskRequest.model_validate_json(task.model_dump_json()).metadata == metadata
