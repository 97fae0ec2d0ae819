"""How long a person waits for `gangline --help`, and for `gangline up` with a scripted engine. Medians of some runs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = str(Path(sys.executable).parent / "gangline")
NUM_HELPS, NUM_UPS = 15, 5
TYPER = (sys.executable, "-c", "import typer.rich_utils")
"""What draws the page, without any command of ours."""


def run() -> dict[str, dict[str, Any]]:
    """Returns figure name -> {value, unit, note}. Half a minute."""
    helps: list[float] = []
    drawing: list[float] = []
    for _ in range(NUM_HELPS):  # in turns, so that a busy minute of the machine falls on both
        helps.append(_seconds(PROGRAM, "--help"))
        drawing.append(_seconds(*TYPER))
    ups = [_ready_s() for _ in range(NUM_UPS)]
    drawn_ms = 1000 * statistics.median(drawing)
    return {
        "cli.help_ms": {
            "value": round(1000 * statistics.median(helps)),
            "unit": "ms",
            "note": f"`gangline --help`; the import of Typer and Rich alone takes {drawn_ms:.0f} ms in the same run",
        },
        "up.ready_s": {
            "value": round(statistics.median(ups), 2),
            "unit": "s",
            "note": f"`gangline up` with a scripted engine; the fastest of {NUM_UPS} took {min(ups):.2f} s",
        },
    }


def _seconds(*command: str) -> float:
    started_at_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started_at_s


def _ready_s() -> float:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"rules": [{"pattern": ".*", "text": "hi"}]}))
        engine = ("--engine", f"scripted:{script}", "--tokenizer", "tiny")
        arguments = [PROGRAM, "up", "--json", "--port", "0", "--data", f"{folder}/data", *engine]
        started_at_s = time.perf_counter()
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as up:
            assert up.stdout is not None
            ready = json.loads(up.stdout.readline())
            took_s = time.perf_counter() - started_at_s
            up.terminate()
        assert ready["node_urls"]
        return took_s


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
