"""All mistakes of a file at once, each with the nearest valid name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.domain.errors import InvalidRequest
from gangline.train.run.experiment import read_experiment

TASK: dict[str, Any] = {
    "instruction": "go",
    "agent": {"harness": "shell", "settings": {"command": "true"}},
}


def experiment(folder: Path, **changes: Any) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "model": "smollm2", "data": {"tasks": "tasks.jsonl"}} | changes))
    return path


def test_every_wrong_setting_is_named_with_the_nearest_right_one(tmp_path: Path) -> None:
    path = experiment(
        tmp_path,
        shedule={"steps": 3},
        schedule={"mode": "asinc", "step": 3},
        algorithm={"name": "grppo"},
        service={"node": {"run_slotz": 3}},
    )
    with pytest.raises(InvalidRequest) as found:
        read_experiment(path)
    message = found.value.message
    assert "has 5 problems" in message
    for wrong, nearest in (
        ("shedule", "'schedule'"),
        ("schedule.mode", "'async'"),
        ("schedule.step", "'steps'"),
        ("service.node.run_slotz", "'run_slots'"),
        ("algorithm 'grppo'", "'grpo'"),
    ):
        assert any(wrong in line and f"Did you mean {nearest}" in line for line in message.splitlines()), wrong


@pytest.mark.parametrize("changes", [{}, {"sed": 3}], ids=str)
def test_wrong_tasks_are_named_all_together_and_beside_wrong_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    wrong = [TASK | {"num_sample": 2}, TASK, TASK | {"agent": {"harness": "shel"}}]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in wrong))
    overrides = {"loss.clip_hihg": 0.3}
    path = experiment(tmp_path, algorithm={"overrides": overrides}, evaluation={"tasks": "none.jsonl"}, **changes)
    done = CliRunner().invoke(build_app(), ["train", "validate", str(path)])
    message = str(done.exception)
    assert f"has {4 + len(changes)} problems" in message
    assert "clip_hihg" in message
    assert "none.jsonl" in message
    assert "task 1: num_sample: Extra inputs are not permitted. Did you mean 'num_samples'?" in message
    assert "Did you mean 'shell'?" in message


def test_a_single_problem_is_reported_by_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"experiment\.yaml: sed: .*Did you mean 'seed'"):
        read_experiment(experiment(tmp_path, sed=3))
