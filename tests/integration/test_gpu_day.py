"""What a day on a card would measure, rehearsed on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

GPU_DAY = Path(__file__).parents[2] / "bench" / "gpu_day.py"


def test_a_day_on_a_card_is_rehearsed_and_told(tmp_path: Path) -> None:
    command = [sys.executable, GPU_DAY, "--rehearse", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert set(steps) == {"attention", "memory", "speed", "push"}
    found = {name: step["found"] for name, step in steps.items()}
    assert all(one["ok"] for name in ("attention", "memory") for one in found[name].values())
    assert all(one["tokens_per_s"] > 0 for one in found["speed"].values())
    assert found["push"]["lora, bfloat16"]["gib"] < 0.6 * found["push"]["lora, float32"]["gib"]
    assert "## speed" in (tmp_path / "report.md").read_text()


def test_it_says_where_there_is_no_card(tmp_path: Path) -> None:
    command = [sys.executable, GPU_DAY, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert done.stderr == "no GPU is seen by PyTorch; --rehearse runs the same on a CPU.\n"
