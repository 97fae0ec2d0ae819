"""What the guide of trainers shows of data: a line of slime's prompts becomes a task as its `task_of` makes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gangline.domain.task import TaskRequest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "trainers.md"


def test_slimes_line_of_tasks_makes_a_task_by_the_guides_own_function() -> None:
    section = GUIDE.read_text().split("\n## slime", 1)[1].split("\n## ", 1)[0]
    (line,) = re.findall(r"```json\n(.*)\n```", section)
    (function,) = re.findall(r"^(def task_of.*?)\n\n", section, re.MULTILINE | re.DOTALL)
    made: dict[str, Any] = {}
    exec(function, made)
    row = json.loads(line)
    sample = SimpleNamespace(index=3, prompt=row["prompt"], metadata=row["metadata"])
    task = TaskRequest.model_validate(made["task_of"](sample))
    assert (task.task_id, task.instruction) == ("run7-3", "Make the tests pass.")
    assert task.evaluator.strategy == "script"
    assert task.agent.harness == "opencode"


def test_the_variables_of_slimes_job_are_json() -> None:
    (given,) = re.findall(r'--runtime-env-json "(.*?)" --', GUIDE.read_text(), re.DOTALL)
    variables = json.loads(given.replace('\\"', '"'))["env_vars"]
    assert variables.keys() == {"PYTHONPATH", "TRAINER_KEY", "CUDA_DEVICE_MAX_CONNECTIONS"}
    assert variables["TRAINER_KEY"] == "$TRAINER_KEY", "the shell writes it"
