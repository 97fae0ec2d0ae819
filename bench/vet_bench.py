"""How many defects `gangline vet` finds, how many sound tasks it accuses, and how long it takes.

200 sound tasks and 200 with a defect of one of 20 kinds (`vet_tasks.py`), through a service that the command starts,
four tasks at a time. Misses and false alarms are printed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vet_tasks import defective_tasks, sound_tasks

SEED = int(os.environ.get("GANGLINE_VET_SEED", "0"))
FOLDER = os.environ.get("GANGLINE_VET_FOLDER")
"""Kept: an interrupted run continues there."""

Figures = dict[str, dict[str, Any]]


def vetted(folder: Path) -> list[dict[str, Any]]:
    """Records of the audit of all tasks."""
    tasks = [*sound_tasks(SEED), *defective_tasks(SEED)]
    random.Random(SEED).shuffle(tasks)  # so that the first half of them is half of each kind
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    command = [sys.executable, "-m", "gangline", "vet", path, "--data", folder / "data", "--in-flight", "4", "--json"]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    for name, why in found["not_audited"].items():
        print(f"  not audited: {name}: {why}", file=sys.stderr)
    return found["tasks"]


def run() -> Figures:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        records = vetted(Path(FOLDER or folder))
    return figures_of(records)


def figures_of(records: list[dict[str, Any]]) -> Figures:
    sound = [one for one in records if one["name"].startswith("sound-")]
    defective = [one for one in records if one["name"].startswith("defect-")]
    alarms = [one for one in sound if one["verdict"] != "sound"]
    missed = [one for one in defective if one["verdict"] != "defective"]
    for one in (*alarms, *missed):
        failed = {name: check["message"] for name, check in one["checks"].items() if check["status"] == "failed"}
        print(f"  {one['name']}: {one['verdict']} {failed}", file=sys.stderr)
    seconds = statistics.median(one["seconds"] for one in records)
    about = f"{len(sound)} sound tasks and {len(defective)} with one of 20 kinds of defect, seed {SEED}"
    return {
        "vet.recall": {"value": 1 - len(missed) / len(defective), "unit": "", "note": f"{about}; bar 0.95"},
        "vet.false_alarms": {"value": len(alarms) / len(sound), "unit": "", "note": f"{about}; bar 0.02"},
        "vet.median_s": {"value": seconds, "unit": "s", "note": f"per task, four at a time; {about}; bar 20"},
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
