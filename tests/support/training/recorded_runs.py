"""Folders of training runs, as trainers leave them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gangline.train.run.experiment import Experiment
from gangline.train.run.lineage import begin_life, write_results
from gangline.train.runs.log import RunLog
from gangline.train.runs.records import EvaluationRecord, StepRecord
from support.training.fakes import step_record

__all__ = ["NUM_STEPS", "TASKS", "evaluation", "write_learning_run", "write_model", "write_run"]

NUM_STEPS = 2
TASKS = 40


def evaluation(step: int, means: list[float]) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        version=step,
        wall_s=60.0,
        reward_mean=sum(means) / len(means),
        standard_error=0.1,
        task_means=tuple(means),
        num_tasks=len(means),
        num_sessions=len(means),
        num_invalid=0,
        took_s=1.0,
    )


def write_model(folder: Path, weights: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def write_run(
    data: Path,
    name: str,
    after: list[float] | None = None,
    *,
    seed: int = 0,
    held_out: str = "h",
    model: Path | None = None,
    checkpoint: str = "",
    **changes: Any,
) -> Path:
    """A run of two steps, finished where `after` has the tasks' last rewards. model: that it begins from.
    checkpoint: digest of the one that it begins from."""
    folder = data / "runs" / name
    if model is None:
        model = data / "model"
        write_model(model, b"base")
    document = {
        "name": name,
        "model": "m",
        "data": {"tasks": "t.jsonl"},
        "schedule": {"steps": NUM_STEPS},
        "seed": seed,
    }
    experiment = Experiment.model_validate(document | changes)
    begin_life(
        folder,
        experiment,
        key="0a",
        tasks_digest="t",
        held_out_digest=held_out,
        model_folder=model,
        first_step=1,
        checkpoint_digest=checkpoint,
    )
    log = RunLog(folder)
    log.write_evaluation(evaluation(0, [0.0] * TASKS))
    records: list[StepRecord] = []
    for step in range(1, NUM_STEPS + 1 if after else NUM_STEPS):
        records.append(msgspec.structs.replace(step_record(), step=step))
        log.write(records[-1])
    if after is not None:
        last = evaluation(NUM_STEPS, after)
        log.write_evaluation(last)
        weights = write_model(folder / "model", name.encode())
        write_results(folder, records, [evaluation(0, [0.0] * TASKS), last], last_version=2, weights=weights)
    return folder


def write_learning_run(data: Path, name: str, num_steps: int, groups: Sequence[str] = (), **changes: Any) -> Path:
    """A run whose reward rises, with the metrics of a policy gradient. groups: of every step."""
    folder = write_run(data, name, schedule={"steps": num_steps}, **changes)
    (folder / "metrics.jsonl").unlink()
    log = RunLog(folder)
    for step in range(1, num_steps + 1):
        share = step / num_steps
        learner = {
            "loss": 0.1 - 0.05 * share,
            "ratio_mean": 1.0 + 0.01 * math.sin(step),
            "ratio_max": 1.5 + 0.2 * math.cos(step),
            "behaviour_kl": 0.002 * (1 + share),
            "entropy": 1.2 - 0.7 * share,
            "clipped_low": 0.01 * share,
            "clipped_high": 0.02 * share,
            "grad_norm": 0.5,
        }
        record = msgspec.structs.replace(
            step_record(),
            step=step,
            version=step,
            wall_s=30.0 * step,
            reward_mean=0.2 + 0.6 * share,
            num_trained_tokens=800 - 300 * step // num_steps,
            learner=learner,
            groups=tuple(groups),
        )
        log.write(record)
    log.write_evaluation(evaluation(num_steps, [0.0, 1.0] * (TASKS // 2)))
    return folder
