"""Whether a small policy learns on the preset `math`: `examples/math_preset` as it stands, and its control.

The policy is made first. Then both experiments train it, one after the other, each on its own service with real
sandboxes. Some 15 minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gangline.train.runs.log import read_evaluations, read_records
from gangline.train.runs.records import EvaluationRecord, StepRecord
from programs import PROGRAM, printed_by

EXAMPLE = Path(__file__).parent.parent / "examples" / "math_preset"
NUM_TRAINED, NUM_HELD_OUT = 256, 64

Figures = dict[str, dict[str, Any]]


class Trained(NamedTuple):
    """What a run came to."""

    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]

    @property
    def minutes(self) -> float:
        return self.steps[-1].wall_s / 60


def prepare(folder: Path) -> None:
    """Policy, tasks and both experiments in one folder."""
    printed_by(sys.executable, str(EXAMPLE / "policy.py"), str(folder / "policy"))
    rows = printed_by(sys.executable, str(EXAMPLE / "rows.py"), "--rows", str(NUM_TRAINED + NUM_HELD_OUT))
    (folder / "rows.jsonl").write_text(rows)
    tasks = printed_by(PROGRAM, "tasks", "from", str(folder / "rows.jsonl"), "--preset", "math").splitlines(True)
    (folder / "tasks.jsonl").write_text("".join(tasks[:NUM_TRAINED]))
    (folder / "held_out.jsonl").write_text("".join(tasks[NUM_TRAINED:]))
    for name in ("experiment.yaml", "shuffled.yaml"):
        document = yaml.safe_load((EXAMPLE / name).read_text())
        (folder / name).write_text(yaml.safe_dump(document | {"model": str(folder / "policy")}))


def trained(folder: Path, name: str) -> Trained:
    """Run an experiment of the folder."""
    experiment, data = folder / f"{name}.yaml", folder / name
    printed_by(PROGRAM, "train", "run", str(experiment), "--data", str(data), "--json")
    return read(next((data / "runs").iterdir()))


def read(run: Path) -> Trained:
    return Trained(read_records(run / "metrics.jsonl"), read_evaluations(run / "evaluations.jsonl"))


def figures(learned: Trained, control: Trained) -> Figures:
    minutes = f"until the last of {len(learned.steps)} steps of 16 groups of 8 sessions, the first evaluation included"
    return {
        "learn.math.first_reward": _measured(learned.evaluations, 0),
        "learn.math.last_reward": _measured(learned.evaluations, -1),
        "learn.math.minutes": {"value": round(learned.minutes, 1), "unit": "min", "note": minutes},
        "learn.math.shuffled.first_reward": _measured(control.evaluations, 0),
        "learn.math.shuffled.last_reward": _measured(control.evaluations, -1),
    }


def _measured(evaluations: Sequence[EvaluationRecord], which: int) -> dict[str, Any]:
    one = evaluations[which]
    note = f"{one.num_sessions} sessions on {one.num_tasks} held-out problems, standard error {one.standard_error:.3f}"
    return {"value": round(one.reward_mean, 3), "unit": "", "note": note}


def run() -> Figures:
    """Returns figure name -> {value, unit, note}."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        folder = Path(name)
        prepare(folder)
        return figures(trained(folder, "experiment"), trained(folder, "shuffled"))


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
