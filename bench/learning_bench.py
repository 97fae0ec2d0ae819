"""Whether the demo's model learns: `gangline demo`, and the control with its rewards shuffled. Twenty-five minutes.

Draws docs/images/learning.png.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from gangline.cli.learning_view import draw_curves
from gangline.training.run_log import EvaluationRecord, StepRecord, read_evaluations, read_records

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "learning.png"
TIMEOUT_S = 3600


class Learned(NamedTuple):
    """What a demo came to."""

    report: dict[str, Any]
    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]


def demo(*options: str) -> Learned:
    """With its learning."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        program = Path(sys.executable).parent / "gangline"
        done = subprocess.run(
            [str(program), "demo", "--json", "--data", folder, *options],
            stdout=subprocess.PIPE,
            check=True,
            timeout=TIMEOUT_S,
        )
        report = json.loads(done.stdout)["learning"]
        run = Path(report["run"])
        return Learned(report, read_records(run / "metrics.jsonl"), read_evaluations(run / "evaluations.jsonl"))


def run() -> dict[str, dict[str, Any]]:
    """Returns figure name -> {value, unit, note}."""
    arms = {"rewards as they were": demo(), "rewards shuffled in each group": demo("--shuffled-rewards")}
    draw_curves(
        {label: arm.steps for label, arm in arms.items()},
        PICTURE,
        title="gangline demo: SmolLM2-135M learns to read files",
        evaluations={label: arm.evaluations for label, arm in arms.items()},
    )
    learned, shuffled = arms.values()
    minutes = f"{len(learned.steps)} steps and both evaluations, everything on 2 cores"
    return {
        "learn.demo.first_reward": _measured(learned.evaluations[0], ""),
        "learn.demo.last_reward": _measured(learned.evaluations[-1], ""),
        "learn.demo.minutes": _figure(learned.report["minutes"], "min", minutes),
        "learn.shuffled.first_reward": _measured(shuffled.evaluations[0], "the control: "),
        "learn.shuffled.last_reward": _measured(shuffled.evaluations[-1], "the control: "),
    }


def _measured(record: EvaluationRecord, what: str) -> dict[str, Any]:
    note = f"{what}{record.num_sessions} sessions on {record.num_tasks} held-out tasks"
    if record.standard_error is not None:
        note += f"; standard error {record.standard_error:.3f}"
    return _figure(record.reward_mean, "", note)


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
