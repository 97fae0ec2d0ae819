"""The example of TRL's trainer with SmolLM2, as its guide runs it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_trl" / "train.py"


def test_the_example_trains_and_leaves_its_rewards(tmp_path: Path) -> None:
    options = ["--steps", "2", "--groups", "1", "--samples", "2", "--lora", "--data", str(tmp_path)]
    subprocess.run([sys.executable, str(EXAMPLE), *options], check=True, timeout=300)
    steps = json.loads((tmp_path / "rewards.json").read_text())
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(0 <= step["reward"] <= 1 for step in steps)
