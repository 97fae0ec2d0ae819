"""500 sessions over 200 images on two nodes, each with a cache of a tenth of them, and a registry that is killed and
slowed: whether any is lost, and how often a layer is pulled.

Starts two Docker daemons and Debian's docker-registry, as root, and ends them. Run by name: `python bench/run.py
images`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from containers.image_judge import judge_images

NUM_IMAGES, NUM_SESSIONS, CACHED_PART = 200, 500, 0.1
_GIVE_UP_S = 7200.0


def run() -> dict[str, dict[str, Any]]:
    """Measure; returns figure name -> {value, unit, note}. Half an hour."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        found = asyncio.run(
            judge_images(
                Path(folder),
                num_images=NUM_IMAGES,
                num_sessions=NUM_SESSIONS,
                cached_part=CACHED_PART,
                give_up_s=_GIVE_UP_S,
            )
        )
    print(found, file=sys.stderr)
    shared = (
        f"{NUM_SESSIONS} sessions over {NUM_IMAGES} images that share layers, two nodes with a Docker each, a cache of "
        "a tenth; docker-registry killed twice and slowed twice"
    )
    layers = f"{found.num_sent} layers sent for {found.num_holdings} times that a node came to hold one"
    images = f"{found.num_pulls} images pulled, {found.num_removed} removed, {found.num_retried} pulls tried again"
    figures = {
        "images.sessions_lost": (NUM_SESSIONS - found.outcomes.get("completed", 0) + found.num_wrong, "", images),
        "images.pulls_per_layer": (found.worst, "", f"the worst of a node's layers, by the registry's log; {layers}"),
        "images.wait_holds_run_slots": (found.run_slots_held, "", f"at most {found.max_waiting} waited at once"),
        "images.run_seconds": (round(found.seconds), "s", f"load {os.getloadavg()[0]:.0f}"),
    }
    return {
        name: {"value": value, "unit": unit, "note": f"{shared}; {note}"}
        for name, (value, unit, note) in figures.items()
    }
