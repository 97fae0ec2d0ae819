"""How long a newcomer takes from the wheel to rows of an own agent, on a bare Debian with the package index alone.

`scripts/newcomer.sh` runs the commands that `gangline init` prints. The engine plays replies from a file: an engine
with a model takes as long as PyTorch takes to download.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800


def run() -> dict[str, dict[str, Any]]:
    """Build the wheel and let a newcomer use it; returns figure name -> {value, unit, note}. Two minutes, as root."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([str(uv), "build", "--quiet", "--wheel", "--out-dir", folder], cwd=ROOT, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        done = subprocess.run(
            [str(ROOT / "scripts" / "newcomer.sh"), str(wheel)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    note = f"bare Debian, wheel and packages from the index, `init`, `up`, {found['rows']} rows; replies from a file"
    return {"frontdoor.first_rows_s": {"value": found["first_rows_s"], "unit": "s", "note": note}}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
