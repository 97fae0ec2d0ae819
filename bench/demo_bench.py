"""How long the demo takes, and whether it overlaps its sessions, with its data in a temporary folder.

`demo.first_rows_s` is when its rows are on the disk, `demo.total_s` when it has ended, training included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 1800


def run() -> dict[str, dict[str, Any]]:
    """Run the demo; returns figure name -> {value, unit, note}. Six minutes once the model is there."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        program = Path(sys.executable).parent / "gangline"
        started_at_s = time.perf_counter()
        demo = subprocess.Popen([str(program), "demo", "--json", "--data", folder], stdout=subprocess.PIPE)
        first_rows_s = None
        while demo.poll() is None and time.perf_counter() - started_at_s < TIMEOUT_S:
            if first_rows_s is None and list(Path(folder).glob("demo/*.parquet")):
                first_rows_s = time.perf_counter() - started_at_s
            time.sleep(0.1)
        printed, _ = demo.communicate(timeout=TIMEOUT_S)
        total_s = time.perf_counter() - started_at_s
    report = json.loads(printed)
    assert demo.returncode == 0
    assert first_rows_s is not None
    learning = report["learning"]
    note = f"{len(learning['rewards'])} steps and both evaluations; {learning['first_reward']:.2f} to "
    return {
        "demo.sessions_overlap": _figure(
            report["sessions_overlap"], "sessions at a time", "the seconds of 16 sessions over the wall clock's"
        ),
        "demo.first_rows_s": _figure(first_rows_s, "s", "engine, server, node, 16 sessions and their audit"),
        "demo.total_s": _figure(total_s, "s", f"{note}{learning['last_reward']:.2f} on held-out files"),
    }


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 2), "unit": unit, "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
