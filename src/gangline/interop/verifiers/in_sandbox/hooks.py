"""Runs a task's hooks in one of our sandboxes: `setup` before the agent; `finalize`, metrics and rewards after it.

The task is recreated from its class and data, as verifiers does between its own processes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from .box import Box
from .trace import trace_of


def main(folder: str, stage: str) -> None:
    """Run the hooks of a stage. `score` writes `reward.json` to the working folder.

    folder: contains `config.json`, and the taskset's modules in `taskset/`.
    """
    place = Path(folder).resolve()
    sys.path.insert(0, str(place / "taskset"))
    config = json.loads((place / "config.json").read_text())
    task = task_of(config)
    if stage == "setup":
        asyncio.run(task.setup(trace_of(task, None), Box()))
        return
    session = json.loads(Path(os.environ["GANGLINE_TRAJECTORY"]).read_text())
    reward_file = Path("reward.json").resolve()
    box = Box() if config["has_runtime"] else None
    found = asyncio.run(rewarded(task, trace_of(task, session), box))
    reward_file.write_text(json.dumps(found))


def task_of(config: Mapping[str, Any]) -> Any:
    """config: `module`, `class`, `data` and `config` of the task."""
    kind: Any = import_module(config["module"])
    for name in config["class"].split("."):
        kind = getattr(kind, name)
    return kind(kind.data_type().model_validate(config["data"]), kind.config_type().model_validate(config["config"]))


async def rewarded(task: Any, trace: Any, box: Box | None) -> dict[str, Any]:
    """`reward`, the rewards by name, and the metrics. Raises: ValueError if there is no reward; errors of the hooks."""
    if box is not None:
        await task.finalize(trace, box)
    await task.score(trace, box)
    given = {name: one for name, one in trace.rewards.items() if one is not None}
    if not given:
        raise ValueError("the task gave no reward")
    if not math.isfinite(trace.reward):
        raise ValueError(f"the reward {trace.reward} is not finite")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    shown = {name: {"score": one.score, "weight": one.weight} for name, one in given.items()}
    return {"reward": trace.reward, "rewards": shown, "metrics": metrics}
