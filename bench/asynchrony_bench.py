"""What asynchrony is worth, on a long-tailed load: the same trainer, in step with its collector and not.

Server and node are real processes, with agents that ask a scripted engine twice and take a log-normal time. The trainer
is the real one, with a learner that takes a fixed time and learns nothing: only the schedule is measured. Each update
of the weights goes through the node's gate: pause, as long as new weights would take, version, resume.

- `learn.async.steps_per_hour.*`: of `sync`, and of `async` with tokens of at most one, or two, versions ago.
- `learn.async.mean_lag.*`: versions between a trained token and the weights that were trained, mean over tokens.
- `learn.async.stale_share.*`: groups that had become too old, as a share of all that were collected whole.

Drawn in docs/images/asynchrony.png.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from agent_node import LONGEST_WORK_S, MEDIAN_WORK_S, RUN_SLOTS, WORK, task_of
from matplotlib.figure import Figure
from service_bench import served

from gangline.models.engine_server.app import serving
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app, open_tokenizer
from gangline.train.collecting.admission import StalenessSettings
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.samples import Sample
from gangline.train.run.trainer import Trainer
from gangline.train.runs.records import StepRecord, UpdateProfile
from gangline.train.weights.update import Save
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient

NODE = Path(__file__).with_name("agent_node.py")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "asynchrony.png"
SAMPLES, NUM_GROUPS, NUM_STEPS = 4, 8, 16
TRAIN_S, PUSH_S = 4.0, 0.4
NUM_TASKS = 200

Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Schedule:
    mode: Literal["sync", "async"]
    max_lag: int
    colour: str


SCHEDULES = {
    "sync": Schedule("sync", 0, "#c0762b"),
    "async_lag_1": Schedule("async", 1, "#1f3b73"),
    "async_lag_2": Schedule("async", 2, "#4d8f6f"),
}


class SlowLearner:
    """Takes its time."""

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        time.sleep(TRAIN_S)
        return {}

    def reward_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        return {}

    def abandon(self) -> None: ...

    def save_weights(self, folder: Path) -> None:
        return

    def save_state(self, folder: Path) -> None:
        return

    def load_state(self, folder: Path) -> None:
        return


class GatedWeights:
    """The engine gets nothing but a new version, while the node's gate is closed."""

    def __init__(self, node: NodeClient, sampler: ScriptedSampler) -> None:
        self._node = node
        self._sampler = sampler

    async def latest_version(self) -> int | None:
        return None

    async def push(self, save: Save, version: int) -> UpdateProfile:
        began = time.monotonic()
        await self._node.pause("drain")
        closed = time.monotonic()
        await asyncio.sleep(PUSH_S)
        await self._sampler.set_version(version)
        loaded = time.monotonic()
        await self._node.set_version(version)
        await self._node.resume()
        ended = time.monotonic()
        return UpdateProfile(
            version=version,
            transfer_s=0.0,
            pause_s=closed - began,
            drain_s=0.0,
            load_s=loaded - closed,
            resume_s=ended - loaded,
            total_s=ended - began,
            num_engines=1,
            num_nodes=1,
            num_bytes=0,
        )

    async def ensure(self, version: int, save: Save) -> UpdateProfile | None:
        return None


async def trained(folder: Path, schedule: Schedule) -> list[StepRecord]:
    """The steps of a run."""
    sampler = ScriptedSampler(Script.model_validate({"default": {"text": "Take your time."}}), open_tokenizer("tiny"))
    records: list[StepRecord] = []
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(serving(create_scripted_app(sampler)))
        server = await stack.enter_async_context(served("server", folder / "server"))
        node = await stack.enter_async_context(served("n1", folder / "node", server.url, engine_url, program=NODE))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        control = await stack.enter_async_context(NodeClient(node.url, None))
        trainer = Trainer(
            folder,
            schedule=ScheduleSettings(
                mode=schedule.mode,
                steps=NUM_STEPS,
                groups_per_step=NUM_GROUPS,
                staleness=StalenessSettings(max_lag=schedule.max_lag),
                checkpoint_every=10 * NUM_STEPS,
            ),
            algorithm=algorithm("grpo"),
            learner=SlowLearner(),
            service=client,
            stream=TaskStream(
                "load", [task_of(f"task-{n}", WORK, SAMPLES) for n in range(NUM_TASKS)], num_samples=SAMPLES
            ),
            weights=GatedWeights(control, sampler),
            on_step=records.append,
        )
        await trainer.run()
    return records


def steps_per_hour(records: list[StepRecord]) -> float:
    """After the first, for which every schedule waits alike."""
    return 3600 * (len(records) - 1) / (records[-1].wall_s - records[0].wall_s)


def lags(records: list[StepRecord]) -> dict[int, float]:
    """versions behind -> share of the trained tokens."""
    tokens: Counter[int] = Counter()
    for record in records:
        tokens.update(record.lag)
    return {lag: num / tokens.total() for lag, num in sorted(tokens.items())}


def stale_share(records: list[StepRecord]) -> float:
    num_stale = sum(record.num_stale for record in records)
    return num_stale / (num_stale + sum(record.num_groups for record in records))


def draw(found: dict[str, list[StepRecord]]) -> None:
    figure = Figure(figsize=(8, 3), dpi=140, layout="constrained")
    steps, behind = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, (name, records) in enumerate(found.items()):
        colour = SCHEDULES[name].colour
        label = f"{name.replace('_', ' ')}: {steps_per_hour(records):,.0f} steps an hour"
        steps.step(
            [record.wall_s for record in records], range(1, len(records) + 1), where="post", color=colour, label=label
        )
        share = lags(records)
        behind.bar([lag + 0.27 * (number - 1) for lag in share], list(share.values()), width=0.25, color=colour)
    steps.set_xlabel("seconds", fontsize=9)
    steps.set_ylabel("steps", fontsize=9)
    steps.legend(frameon=False, fontsize=8)
    behind.set_xlabel("versions behind", fontsize=9)
    behind.set_ylabel("share of trained tokens", fontsize=9)
    behind.set_xticks(range(1 + max(schedule.max_lag for schedule in SCHEDULES.values())))
    for axes in (steps, behind):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)


async def measure() -> dict[str, list[StepRecord]]:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        return {name: await trained(Path(folder) / name, schedule) for name, schedule in SCHEDULES.items()}


def run() -> Figures:
    """Measure and draw; figure name -> {value, unit, note}. Four minutes."""
    logging.getLogger("gangline").setLevel(logging.ERROR)  # groups of one reward are part of the load
    found = asyncio.run(measure())
    draw(found)
    load = (
        f"{NUM_STEPS} steps of {NUM_GROUPS} groups of {SAMPLES}, {RUN_SLOTS} RUN slots, agents of log-normal length "
        f"(median {MEDIAN_WORK_S:g} s, at most {LONGEST_WORK_S:g} s), {TRAIN_S:g} s of training, {PUSH_S:g} s of update"
    )
    figures: Figures = {}
    for name, records in found.items():
        told = ", ".join(f"{lag} behind: {share:.0%}" for lag, share in lags(records).items())
        mean_lag = sum(lag * share for lag, share in lags(records).items())
        for what, value, unit, note in (
            ("steps_per_hour", round(steps_per_hour(records)), "steps/h", load),
            ("mean_lag", round(mean_lag, 2), "versions", f"of trained tokens; {told}"),
            ("stale_share", round(stale_share(records), 3), "share", "groups that were dropped as too old"),
        ):
            figures[f"learn.async.{what}.{name}"] = {"value": value, "unit": unit, "note": note}
    return figures


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
