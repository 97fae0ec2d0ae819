"""Whether the demo's model learns: `gangline demo`, and the control with its rewards shuffled. Twenty minutes.

Draws docs/images/learning.png.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gangline.cli.learning_view import draw_curves
from gangline.training.run_log import StepRecord, read_records

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "learning.png"
TIMEOUT_S = 3600


def demo(*options: str) -> tuple[dict[str, Any], list[StepRecord]]:
    """Its report of the learning, and the steps."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        program = Path(sys.executable).parent / "gangline"
        done = subprocess.run(
            [str(program), "demo", "--json", "--data", folder, *options],
            stdout=subprocess.PIPE,
            check=True,
            timeout=TIMEOUT_S,
        )
        report = json.loads(done.stdout)["learning"]
        return report, read_records(Path(report["run"]) / "metrics.jsonl")


def run() -> dict[str, dict[str, Any]]:
    """Returns figure name -> {value, unit, note}."""
    learned, steps = demo()
    shuffled, shuffled_steps = demo("--shuffled-rewards")
    draw_curves(
        {"rewards as they were": steps, "rewards shuffled in each group": shuffled_steps},
        PICTURE,
        title="gangline demo: SmolLM2-135M learns to read files",
    )
    part = f"mean over a fifth of the {len(steps)} steps, 32 sessions each"
    return {
        "learn.demo.first_reward": _figure(learned["first_reward"], "", part),
        "learn.demo.last_reward": _figure(learned["last_reward"], "", part),
        "learn.demo.minutes": _figure(learned["minutes"], "min", "the learning alone, everything on 2 cores"),
        "learn.shuffled.first_reward": _figure(shuffled["first_reward"], "", "the control"),
        "learn.shuffled.last_reward": _figure(shuffled["last_reward"], "", "the control"),
    }


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
