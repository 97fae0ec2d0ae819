"""A run in experiment trackers: their own packages, each with its local storage."""

from __future__ import annotations

import importlib
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.train.run.tracking import TrackerName, Tracking, TrackingSettings
from gangline.train.runs.records import EvaluationRecord
from support.requirements import need_module
from support.service.cli_process import wait_for

RUN = "tiny-0123ab"


def record(step: int, reward: float) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        version=step,
        wall_s=1.0,
        reward_mean=reward,
        standard_error=None,
        task_means=(reward,),
        num_tasks=1,
        num_sessions=2,
        num_invalid=0,
        took_s=0.5,
    )


def track(folder: Path, name: TrackerName, *records: EvaluationRecord, last_step: int = 0, **options: Any) -> None:
    settings = TrackingSettings(project="a-project", options={name: options})
    config = {"algorithm": {"name": "grpo"}, "mask": ["full"], "seed": 0}
    with Tracking.start([name], settings, folder=folder, run=RUN, config=config, last_step=last_step) as tracking:
        for one in records:
            tracking.add(one)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the other stores need all of MLflow, or its server
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    track(tmp_path, "tensorboard", record(1, 0.25))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"evaluation/reward_mean" in events.read_bytes()


def test_mlflow_continues_with_its_run(tmp_path: Path) -> None:
    need_module("mlflow", "pip install mlflow-skinny")
    track(tmp_path, "mlflow", record(1, 0.25))
    track(tmp_path, "mlflow", record(2, 0.5), last_step=1)
    client = importlib.import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("a-project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == RUN
    assert run.data.params == {"algorithm.name": "grpo", "mask": "['full']", "seed": "0"}
    history = client.get_metric_history(run.info.run_id, "evaluation/reward_mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5)]


def test_wandb_gets_every_number(tmp_path: Path) -> None:
    need_module("wandb", "pip install wandb")
    track(tmp_path, "wandb", record(1, 0.25), entity="a-team")
    (kept,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert kept.name == f"run-{RUN}.wandb"
    for wanted in (b"evaluation/reward_mean", b"a-team"):  # W&B's own process still writes, for a moment
        wait_for(lambda wanted=wanted: wanted in kept.read_bytes())


def test_trackio_gets_every_number(tmp_path: Path) -> None:
    """In its own process: Trackio reads its folder's variable when it is imported."""
    need_module("trackio", "pip install trackio")
    command = [sys.executable, "-c", _IN_TRACKIO, str(tmp_path), str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "a-project.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [1, 2]
    assert b"evaluation/reward_mean" in rows[0][1]
    assert done.stdout == "", "stdout is the command's own"


_IN_TRACKIO = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from integration.test_training_tracking import record, track

track(Path(sys.argv[1]), "trackio", record(1, 0.25), record(2, 0.5))
"""


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InvalidRequest, match="pip install wandb"):
        track(tmp_path, "wandb")


def test_one_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_module("mlflow", "pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with pytest.raises(InvalidRequest, match="report_to: mlflow could not be started"):
        track(tmp_path, "mlflow")


def test_a_tracker_that_fails_later_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def start(self) -> None: ...

        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            raise ConnectionError("gone")

        def finish(self) -> None:
            raise AssertionError("it was left out")

    class Kept(Failing):
        def __init__(self) -> None:
            self.steps: list[int | None] = []

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.steps.append(step)

        def finish(self) -> None: ...

    kept = Kept()
    with Tracking({"wandb": Failing(), "trackio": kept}) as tracking:
        tracking.add(record(1, 0.5))
        tracking.add(record(2, 0.5))
    assert kept.steps == [1, 2]
    assert caplog.text.count("trainer.tracker_lost tracker=wandb error=gone") == 1
