"""Whether the demo overlaps its sessions: `gangline demo` without its learning, with its data in a temporary folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 300


def run() -> dict[str, dict[str, Any]]:
    """Run the demo; returns figure name -> {value, unit, note}. Under a minute once the model is there."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        program = Path(sys.executable).parent / "gangline"
        command = [str(program), "demo", "--json", "--samples", "8", "--steps", "0", "--data", folder]
        started_at_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S)
        took_s = time.perf_counter() - started_at_s
    report = json.loads(done.stdout)
    note = f"the seconds of 16 sessions over the wall clock's; `gangline demo` took {took_s:.0f} s in all"
    return {
        "demo.sessions_overlap": {
            "value": round(report["sessions_overlap"], 2),
            "unit": "sessions at a time",
            "note": note,
        }
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
