"""Whether the demo's model learns: `gangline demo` twice, and controls with shuffled rewards. Takes 45 minutes.

Draws docs/images/learning.png.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gangline.train.commands.view import draw_curves
from gangline.train.runs.log import read_evaluations, read_records
from gangline.train.runs.records import EvaluationRecord, StepRecord

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "learning.png"
TIMEOUT_S = 3600
CONTROL_SEEDS = (0, 1, 2)  # the first is the demo's own


class Learned(NamedTuple):
    """What a demo came to."""

    report: dict[str, Any]
    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]

    @property
    def rewards(self) -> list[float]:
        """Mean rewards of steps and evaluations."""
        return [one.reward_mean for one in (*self.steps, *self.evaluations)]


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
        print(f"  {options}: {report['first_reward']:.3f}, {report['last_reward']:.3f}", file=sys.stderr, flush=True)
        return Learned(report, read_records(run / "metrics.jsonl"), read_evaluations(run / "evaluations.jsonl"))


def run() -> dict[str, dict[str, Any]]:
    """Returns figure name -> {value, unit, note}."""
    learned, again = demo(), demo()
    controls = {seed: demo("--shuffled-rewards", "--seed", str(seed)) for seed in CONTROL_SEEDS}
    arms = {"rewards as they were": learned, "the same seed again": again} | {
        f"rewards shuffled, seed {seed}": arm for seed, arm in controls.items()
    }
    draw_curves(
        {label: arm.steps for label, arm in arms.items()},
        PICTURE,
        title="gangline demo: SmolLM2-135M learns to read files",
        evaluations={label: arm.evaluations for label, arm in arms.items()},
    )
    minutes = f"{len(learned.steps)} steps and both evaluations, everything on 2 cores"
    apart = [abs(one - other) for one, other in zip(learned.rewards, again.rewards, strict=True)]
    return {
        "learn.demo.first_reward": _measured([learned], 0),
        "learn.demo.last_reward": _measured([learned], -1),
        "learn.demo.minutes": _figure(learned.report["minutes"], "min", minutes),
        "learn.demo.same_seed_gap": _figure(
            max(apart),
            "",
            "largest difference between two runs of one seed, of a step's or an evaluation's mean reward",
        ),
        "learn.shuffled.first_reward": _measured(list(controls.values()), 0),
        "learn.shuffled.last_reward": _measured(list(controls.values()), -1),
    }


def _measured(arms: Sequence[Learned], which: int) -> dict[str, Any]:
    """The mean over runs of one of their evaluations."""
    records = [arm.evaluations[which] for arm in arms]
    first = records[0]
    each = "; by seed " + ", ".join(f"{one.reward_mean:.2f}" for one in records) if len(records) > 1 else ""
    note = (
        f"{first.num_sessions} sessions on {first.num_tasks} held-out tasks, standard error {first.standard_error:.3f}"
    )
    return _figure(sum(one.reward_mean for one in records) / len(records), "", note + each)


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
