"""What a replenishing collector is worth, on a long-tailed load with tasks of which two in five teach nothing.

Server and node are real processes; an agent asks a scripted engine twice and takes a log-normal time. The trainer
takes no time, so that only the collecting is measured: so many batches of informative groups, one after the other, with
tasks in the same order. `plain` waits for all of a batch and asks again for what it lacks. `carry` and `cancel` keep as
many groups in flight as a batch has; what is unfinished when a batch is full continues into the next one, or is ended.

- `learn.collect.batch_s.*`: seconds for a batch of informative groups.
- `learn.collect.run_slot_use.*`: share of the RUN slots' time that an agent was in, until the last batch was full.
- `learn.collect.wasted_share.*`: share of the agents' time that went into groups that would have taught something, and
  were cancelled, or one too many. Groups of one reward are not in it: every collector pays for those.
- `learn.collect.used_work_s.*`: drawn length of the sessions that were handed out, mean; of all that any collector
  could have had, it is in the note. A collector that prefers short ones shows.

Drawn in docs/images/collectors.png.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_node import LONGEST_WORK_S, MEDIAN_WORK_S, RUN_SLOTS, WORK, reward_of, task_of, work_s_of
from matplotlib.figure import Figure
from service_bench import served

from gangline.serving.scripted.server import scripted_server
from gangline.train.collecting.collector import (
    CollectionCounts,
    PlainCollector,
    ReplenishingCollector,
    informative,
)
from gangline.wire.client.server import ServerClient

NODE = Path(__file__).with_name("agent_node.py")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "collectors.png"
SAMPLES = 4
NUM_GROUPS, NUM_BATCHES = 8, 8
KINDS = ("plain", "cancel", "carry")
COLOURS = {"plain": "#c0762b", "cancel": "#8a8a8a", "carry": "#1f3b73"}

Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """When a session had a RUN slot, seconds since the start."""

    task_id: str
    started_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True)
class Collected:
    full_s: list[float]
    """When each batch was full, since the start."""
    task_ids: set[str]
    """Of the groups that were handed out."""
    counts: CollectionCounts
    runs: list[Run]

    @property
    def batch_s(self) -> float:
        return self.full_s[-1] / len(self.full_s)

    @property
    def busy_s(self) -> float:
        return sum(min(run.ended_s, self.full_s[-1]) - run.started_s for run in self.runs)

    @property
    def use(self) -> float:
        return self.busy_s / (RUN_SLOTS * self.full_s[-1])

    @property
    def used_work_s(self) -> float:
        return fmean(work_s for task_id in self.task_ids for work_s in works_s(task_id))

    @property
    def wasted(self) -> float:
        lost = [run for run in self.runs if run.task_id not in self.task_ids and is_informative(run.task_id)]
        return sum(run.took_s for run in lost) / sum(run.took_s for run in self.runs)


def tasks() -> Iterator[dict[str, Any]]:
    return (task_of(f"task-{number}", WORK, SAMPLES) for number in count())


def is_informative(task_id: str) -> bool:
    return len({reward_of(f"{task_id}.{number}", task_id) for number in range(SAMPLES)}) > 1


def works_s(task_id: str) -> list[float]:
    return [work_s_of(f"{task_id}.{number}") for number in range(SAMPLES)]


def make_collector(kind: str, client: ServerClient) -> PlainCollector | ReplenishingCollector:
    if kind == "plain":
        return PlainCollector(client, tasks(), admit=informative)
    unfinished = "carry" if kind == "carry" else "cancel"
    return ReplenishingCollector(client, tasks(), num_in_flight=NUM_GROUPS, unfinished=unfinished, admit=informative)


async def collected(folder: Path, kind: str) -> Collected:
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(scripted_server({"default": {"text": "Take your time."}}))
        server = await stack.enter_async_context(served("server", folder / "server"))
        await stack.enter_async_context(served("n1", folder / "node", server.url, engine_url, program=NODE))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        collector = await stack.enter_async_context(make_collector(kind, client))
        began_at, full_s, handed_out = time.time(), list[float](), set[str]()
        for _ in range(NUM_BATCHES):
            handed_out |= {group.task_id for group in await collector.collect(NUM_GROUPS)}
            full_s.append(time.time() - began_at)
    lines = (folder / "node" / "runs.jsonl").read_text().splitlines()
    runs = [_run(json.loads(line), began_at) for line in lines]
    started = [run for run in runs if run.started_s < full_s[-1]]
    return Collected(full_s, handed_out, collector.counts, started)


def _run(line: dict[str, Any], began_at: float) -> Run:
    task_id = line["session_id"].rpartition(".")[0]
    return Run(task_id, line["started_at"] - began_at, line["ended_at"] - began_at)


def draw(found: dict[str, Collected]) -> None:
    figure = Figure(figsize=(8, 4.2), dpi=140, layout="constrained")
    until = max(one.full_s[-1] for one in found.values())
    for axes, (kind, one) in zip(figure.subplots(len(found), 1, sharex=True), found.items(), strict=True):
        at = [step / 10 for step in range(int(10 * one.full_s[-1]))]
        running = [sum(run.started_s <= moment < run.ended_s for run in one.runs) for moment in at]
        axes.fill_between(at, running, step="post", color=COLOURS[kind], linewidth=0)
        for full_s in one.full_s:
            axes.axvline(full_s, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(f"{kind}: {one.batch_s:.1f} s a batch, {one.use:.0%} of slots in use", fontsize=9, loc="left")
        axes.set_ylim(0, RUN_SLOTS + 1)
        axes.set_xlim(0, until)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel(f"agents that run, of {RUN_SLOTS}", fontsize=9)
    figure.supxlabel("seconds; dotted: a batch is full", fontsize=9)
    figure.savefig(PICTURE)


async def measure() -> dict[str, Collected]:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        return {kind: await collected(Path(name) / kind, kind) for kind in KINDS}


def run() -> Figures:
    """Measure and draw; figure name -> {value, unit, note}. A minute."""
    logging.getLogger("gangline").setLevel(logging.ERROR)  # groups of one reward are part of the load
    found = asyncio.run(measure())
    draw(found)
    load = (
        f"{NUM_BATCHES} batches of {NUM_GROUPS} informative groups of {SAMPLES}, {RUN_SLOTS} RUN slots, agents of "
        f"log-normal length (median {MEDIAN_WORK_S:g} s, at most {LONGEST_WORK_S:g} s)"
    )
    some = [task_id for task_id in (f"task-{number}" for number in range(1000)) if is_informative(task_id)]
    mean = f"{fmean(work_s for task_id in some for work_s in works_s(task_id)):.3f} s over many informative groups"
    figures: Figures = {}
    for kind, one in found.items():
        counts = one.counts
        told = (
            f"{kind}: {counts.submitted} groups submitted, {counts.handed_out} used, {counts.not_admitted} of one "
            f"reward, {counts.cancelled} in flight at the end or cancelled, {counts.wasted} one too many"
        )
        figures[f"learn.collect.batch_s.{kind}"] = {"value": round(one.batch_s, 2), "unit": "s", "note": load}
        figures[f"learn.collect.run_slot_use.{kind}"] = {"value": round(one.use, 3), "unit": "share", "note": told}
        figures[f"learn.collect.used_work_s.{kind}"] = {"value": round(one.used_work_s, 3), "unit": "s", "note": mean}
        figures[f"learn.collect.wasted_share.{kind}"] = {"value": round(one.wasted, 3), "unit": "share", "note": told}
    return figures


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
