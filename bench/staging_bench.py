"""What the stages of a node are worth, on a load shaped like the sources': slow start, long-tailed run, slow evaluation
in a clean runtime. Server and nodes are real processes; in the sandboxes, time passes and nothing else.

- `staging.run_slot_use`: share of the RUN slots' time that agents ran in, from the submit until the last session came
  to RUN: as long as work was waiting.
- `staging.run_slot_use_unstaged`: the same where as many workers take a session from start to evaluation, one by one.
- `staging.run_slot_use_bound`: what the pools allow at best, had every step begun the instant that it could.
- `scale.nodes_1_to_4`: sessions that came to RUN in a second, of four nodes with four times the work, over one node's.

Drawn in docs/images/staging.png.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from service_bench import served
from staging_node import AGENT, GRADER, RUN_SLOTS, STAGED, times_of

from gangline.domain.session import SessionResult
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient

NODE = Path(__file__).with_name("staging_node.py")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "staging.png"
SAMPLES = 8
NUM_SESSIONS = 96
"""For each node."""

Figures = dict[str, dict[str, Any]]


class Lived(NamedTuple):
    """How a load was lived through."""

    results: list[SessionResult]
    began_at: float
    """When it was submitted."""
    num_slots: int

    @property
    def waited_until(self) -> float:
        """When the last session came to RUN."""
        return max(start for start, _ in self.runs)

    @property
    def runs(self) -> list[tuple[float, float]]:
        return [
            (timing.started_at, timing.ended_at)
            for result in self.results
            for timing in result.timings
            if timing.stage == "run"
        ]

    @property
    def use(self) -> float:
        return _use(self.runs, self.began_at, self.waited_until, self.num_slots)

    @property
    def sessions_per_s(self) -> float:
        return len(self.results) / (self.waited_until - self.began_at)


def _use(runs: list[tuple[float, float]], began_at: float, until: float, num_slots: int) -> float:
    busy_s = sum(max(0.0, min(end, until) - start) for start, end in runs)
    return busy_s / ((until - began_at) * num_slots)


def _task(task_id: str) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "instruction": "take your time",
        "num_samples": SAMPLES,
        "agent": {"harness": "shell", "settings": {"command": AGENT}, "allow_no_model_call": True},
        "evaluator": {
            "strategy": "script",
            "refresh_runtime": True,
            "config": {"command": GRADER, "reward_file": "reward.txt"},
        },
    }


async def lived(folder: Path, kind: str, num_nodes: int) -> Lived:
    """Live through a load of `NUM_SESSIONS` for each node."""
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(scripted_server({"default": {"text": "never asked"}}))
        server = await stack.enter_async_context(served("server", folder / "server"))
        for number in range(num_nodes):
            name = f"n{number + 1}"
            arguments = (kind, name, folder / name, server.url, engine_url)
            await stack.enter_async_context(served(*arguments, program=NODE))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        tasks = [_task(f"load-{number}") for number in range(num_nodes * NUM_SESSIONS // SAMPLES)]
        began_at = datetime.now(UTC).timestamp()
        await client.submit_many(tasks)
        results: list[SessionResult] = []
        for task in tasks:
            await client.wait(task["task_id"])
            results += await client.result(task["task_id"])
        assert all(result.outcome == "completed" for result in results)
        return Lived(results, began_at, num_nodes * RUN_SLOTS)


def bound(session_ids: list[str]) -> float:
    """Use of the RUN slots by a node that loses no time: each step begins as soon as a worker and a place are free."""
    init_workers, slots = [0.0] * STAGED["init_workers"], [0.0] * RUN_SLOTS
    runs: list[tuple[float, float]] = []
    for session_id in session_ids:
        times = times_of(session_id)
        began = heapq.heappop(init_workers)
        if len(runs) >= STAGED["ready_slots"]:  # the READY buffer is full until an earlier session has come to RUN
            began = max(began, runs[-STAGED["ready_slots"]][0])
        prepared = began + times.init_s
        heapq.heappush(init_workers, prepared)
        start = max(prepared, heapq.heappop(slots))
        heapq.heappush(slots, start + times.run_s)
        runs.append((start, start + times.run_s))
    return _use(runs, 0.0, max(start for start, _ in runs), RUN_SLOTS)


def _draw(staged: Lived, unstaged: Lived) -> None:
    figure = Figure(figsize=(7, 3), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for load, name, colour in ((unstaged, "one worker for all stages", "#c0762b"), (staged, "staged", "#1f3b73")):
        at = [load.began_at + step / 10 for step in range(int(10 * (load.waited_until - load.began_at)))]
        running = [sum(start <= moment < end for start, end in load.runs) for moment in at]
        label = f"{name}: {load.use:.0%} in use"
        axes.step([moment - load.began_at for moment in at], running, color=colour, linewidth=1.3, label=label)
    axes.set_ylim(0, RUN_SLOTS + 2.2)
    axes.set_xlabel("seconds since the submit, as long as work is waiting")
    axes.set_ylabel(f"agents that run, of {RUN_SLOTS}")
    axes.legend(loc="upper right", frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)


async def measure() -> Figures:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        folder = Path(name)
        staged = await lived(folder / "staged", "staged", 1)
        unstaged = await lived(folder / "unstaged", "unstaged", 1)
        four = await lived(folder / "four", "staged", 4)
    _draw(staged, unstaged)
    best = bound(_in_order(staged))
    shape = (
        f"{NUM_SESSIONS} sessions of a synthetic load (start 0.6 s, run 1.6 s with a long tail, evaluation 0.8 s in a "
        f"clean runtime), {RUN_SLOTS} RUN slots"
    )
    ratio = four.sessions_per_s / staged.sessions_per_s
    scale = f"{four.sessions_per_s:.1f} sessions/s to {staged.sessions_per_s:.1f}, {RUN_SLOTS} RUN slots a node"
    return {
        "staging.run_slot_use": _share(staged.use, f"{shape}; while work was waiting, from the submit on"),
        "staging.run_slot_use_unstaged": _share(unstaged.use, f"the same, {RUN_SLOTS} workers for all stages in turn"),
        "staging.run_slot_use_bound": _share(best, "the same, staged, were no time lost between steps"),
        "scale.nodes_1_to_4": {"value": round(ratio, 2), "unit": "ratio", "note": f"{scale}; all on this machine"},
    }


def _in_order(load: Lived) -> list[str]:
    """As they were begun."""
    return [result.session_id for result in sorted(load.results, key=lambda result: result.timings[0].started_at)]


def _share(value: float, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": "share", "note": note}


def run() -> Figures:
    """Measure; figure name -> {value, unit, note}. Two minutes."""
    return asyncio.run(measure())


if __name__ == "__main__":
    print(json.dumps(run(), indent=2), file=sys.stdout)
