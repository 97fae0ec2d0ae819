"""What waits for the last session of a step, and what helps against it.

Sessions are as long as in "Inside the Agentic RL Training Loop" (see `agent_node`), 300 times faster, and there are as
many RUN slots as a step has sessions. Server and node are real processes, the trainer takes no time. `sync` waits for
all sessions of a step. `async` keeps so many groups under way and carries unfinished ones into the next step;
`async_twice` keeps two steps'.

- `fleet.tail_wait_share.*`: share of the RUN slots' time in which no agent was, because a step waits for its last ones.
- `fleet.step_s.*`: seconds a step.

Orders and budgets of a sync run are computed, as sessions that are given to slots one after the other:

- `fleet.simulated.tail_wait_share.*`: with `many` slots, as many as a step has sessions, or `few`, a quarter of that.
  Tasks come `as_given`; those that took longest the last time come first (`history`); the sessions themselves do, as if
  their lengths were known (`longest_first`); `budget`: a session ends after so many times its task's last mean.
- `fleet.simulated.cut_share`: share of the sessions that this budget ends.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from agent_node import RUN_SLOTS, STRAGGLE, straggle_s_of, task_of
from service_bench import served

from gangline.serving.scripted.server import scripted_server
from gangline.train.collecting.collector import PlainCollector, ReplenishingCollector
from gangline.wire.client.server import ServerClient

NODE = Path(__file__).with_name("agent_node.py")
SAMPLES = 4
NUM_GROUPS, NUM_STEPS = RUN_SLOTS // SAMPLES, 16
IN_FLIGHT = {"sync": 0, "async": NUM_GROUPS, "async_twice": 2 * NUM_GROUPS}
"""Groups."""

NUM_TASKS, NUM_EPOCHS = 500, 3
STEP_GROUPS, STEP_SAMPLES = 8, 8
BUDGET_FACTOR = 3
"""As in that article: 500 tasks, three epochs, groups of eight, 64 sessions a step."""

Figures = dict[str, dict[str, Any]]


def tasks() -> Iterator[dict[str, Any]]:
    return (task_of(f"task-{number}", STRAGGLE, SAMPLES) for number in count())


def make_collector(kind: str, client: ServerClient) -> PlainCollector | ReplenishingCollector:
    if kind == "sync":
        return PlainCollector(client, tasks())
    return ReplenishingCollector(client, tasks(), num_in_flight=IN_FLIGHT[kind])


class Collected(NamedTuple):
    step_s: float
    tail_wait_share: float


async def collected(folder: Path, kind: str) -> Collected:
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(scripted_server({"default": {"text": "Take your time."}}))
        server = await stack.enter_async_context(served("server", folder / "server"))
        await stack.enter_async_context(served("n1", folder / "node", server.url, engine_url, program=NODE))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        collector = await stack.enter_async_context(make_collector(kind, client))
        began_at = time.time()
        for _ in range(NUM_STEPS):
            await collector.collect(NUM_GROUPS)
        ended_at = time.time()
    busy_s = 0.0
    for line in (folder / "node" / "runs.jsonl").read_text().splitlines():
        run = json.loads(line)
        busy_s += max(0.0, min(run["ended_at"], ended_at) - run["started_at"])
    took_s = ended_at - began_at
    return Collected(took_s / NUM_STEPS, 1 - busy_s / (RUN_SLOTS * took_s))


async def measured() -> dict[str, Collected]:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        return {kind: await collected(Path(name) / kind, kind) for kind in IN_FLIGHT}


class Group(NamedTuple):
    task: int
    lengths: list[float]


def drawn_steps() -> list[list[Group]]:
    """The groups of each step, over all epochs."""
    groups: list[Group] = []
    for epoch in range(NUM_EPOCHS):
        order = list(range(NUM_TASKS))
        random.Random(epoch).shuffle(order)
        groups += (
            Group(task, [straggle_s_of(f"{task}.{epoch}-{sample}") for sample in range(STEP_SAMPLES)]) for task in order
        )
    return [groups[at : at + STEP_GROUPS] for at in range(0, len(groups) - STEP_GROUPS + 1, STEP_GROUPS)]


def makespan(lengths: Sequence[float], num_slots: int) -> float:
    """Each session is given to the slot that is free first."""
    free_at = [0.0] * num_slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


Plan = Callable[[list[Group], dict[int, float]], list[float]]
"""A step's groups, and tasks' mean lengths the last time -> lengths of its sessions, in the order of their start."""


def as_given(groups: list[Group], _: dict[int, float]) -> list[float]:
    return [length for group in groups for length in group.lengths]


def by_history(groups: list[Group], means: dict[int, float]) -> list[float]:
    return as_given(sorted(groups, key=lambda group: -means.get(group.task, math.inf)), means)


def longest_first(groups: list[Group], means: dict[int, float]) -> list[float]:
    return sorted(as_given(groups, means), reverse=True)


def within_budget(groups: list[Group], means: dict[int, float]) -> list[float]:
    return [
        min(length, BUDGET_FACTOR * means.get(group.task, math.inf)) for group in groups for length in group.lengths
    ]


PLANS: dict[str, Plan] = {
    "as_given": as_given,
    "history": by_history,
    "longest_first": longest_first,
    "budget": within_budget,
}


class Simulated(NamedTuple):
    tail_wait_share: float
    cut_share: float


def simulated(plan: Plan, steps: list[list[Group]], num_slots: int) -> Simulated:
    means, busy, took, num_cut, num = dict[int, float](), 0.0, 0.0, 0, 0
    for groups in steps:
        lengths = plan(groups, means)
        busy, took = busy + sum(lengths), took + makespan(lengths, num_slots)
        num += len(lengths)
        num_cut += sum(one < other for one, other in zip(sorted(lengths), sorted(as_given(groups, means)), strict=True))
        means |= {group.task: fmean(group.lengths) for group in groups}
    return Simulated(1 - busy / (num_slots * took), num_cut / num)


def run() -> Figures:
    """Measure; figure name -> {value, unit, note}. Two minutes."""
    logging.getLogger("gangline").setLevel(logging.ERROR)
    figures: Figures = {}
    for kind, one in asyncio.run(measured()).items():
        load = (
            f"{NUM_STEPS} steps of {NUM_GROUPS} groups of {SAMPLES}, {RUN_SLOTS} RUN slots, "
            f"{IN_FLIGHT[kind] or NUM_GROUPS} groups under way; lengths of a published run, 300 times faster"
        )
        share = round(one.tail_wait_share, 3)
        figures[f"fleet.tail_wait_share.{kind}"] = {"value": share, "unit": "share", "note": load}
        figures[f"fleet.step_s.{kind}"] = {"value": round(one.step_s, 2), "unit": "s", "note": load}
    steps = drawn_steps()
    load = f"computed: {len(steps)} steps of {STEP_GROUPS} groups of {STEP_SAMPLES}"
    for name, plan in PLANS.items():
        for slots, num_slots in (("many", STEP_GROUPS * STEP_SAMPLES), ("few", STEP_GROUPS * STEP_SAMPLES // 4)):
            found = simulated(plan, steps, num_slots)
            figures[f"fleet.simulated.tail_wait_share.{slots}.{name}"] = {
                "value": round(found.tail_wait_share, 3),
                "unit": "share",
                "note": f"{load}, {num_slots} slots",
            }
            if name == "budget":
                figures["fleet.simulated.cut_share"] = {
                    "value": round(found.cut_share, 3),
                    "unit": "share",
                    "note": f"{load}; a budget of {BUDGET_FACTOR} times the task's last mean",
                }
    return figures


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
