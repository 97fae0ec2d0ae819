"""What an efficient shell, load balancing and the clean-up of stale jobs are each worth: Table 3 of ProRL Agent, here.

Dynamic sampling with tool-heavy sessions: a trainer that takes no time asks for batches of groups whose rewards differ.
Server, node, keeper and sandboxes are real; two engines in this process answer a fixed number of calls at a time, as a
full batch does, each after a log-normal time. One part is switched off at a time:

- without load balancing, sessions go to the engines in turn instead of to the one with the fewest;
- without the efficient shell, the agent's commands go through tmux (`send-keys`, `wait`, `capture-pane`), without the
  pauses of the paper's baseline, instead of through the action server;
- without the clean-up, the trainer waits for all sessions of a round, and asks again for what it lacks, instead of
  keeping a batch in flight and ending what is unfinished when a batch is full.

Variants take turns; medians over the rounds. Drawn in docs/images/ablation.png.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ablation_node import EARNED, MEDIAN_TURNS, MOST_TURNS, NUM_SESSIONS
from aiohttp import web
from matplotlib.figure import Figure
from service_bench import served

from gangline.models.engine_server.app import serving
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.collecting.collector import PlainCollector, ReplenishingCollector, informative
from gangline.wire.client.server import ServerClient

NODE = Path(__file__).with_name("ablation_node.py")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "ablation.png"
NUM_ENGINES, ENGINE_SLOTS = 2, NUM_SESSIONS // 2
MEDIAN_CALL_S = 0.4
SAMPLES, NUM_GROUPS, NUM_BATCHES, NUM_ROUNDS = 4, 4, 3, 3

GRADING = {"command": f"cp {EARNED} reward.txt", "reward_file": "reward.txt"}

Figures = dict[str, dict[str, Any]]


class Variant(NamedTuple):
    name: str
    title: str
    shell: str = "server"
    placement: str = "load"
    cleans_up: bool = True


VARIANTS = (
    Variant("all", "all three"),
    Variant("no_balancing", "without load balancing", placement="turn"),
    Variant("no_shell", "without the efficient shell", shell="tmux"),
    Variant("no_cleanup", "without the clean-up", cleans_up=False),
)


class Measured(NamedTuple):
    sessions_per_s: float
    """Sessions in the batches that the trainer got."""
    engine_use: float
    """Share of the engines' slots that were busy."""
    action_ms: float
    """One shell command, median."""


class Engine:
    """A scripted engine that answers so many calls at a time; the others wait."""

    def __init__(self, seed: int) -> None:
        self.busy_s = 0.0
        self._chance = random.Random(seed)
        self._slots = asyncio.Semaphore(ENGINE_SLOTS)

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[str]:
        script = Script.model_validate({"default": {"text": "Go on."}})
        app = create_scripted_app(ScriptedSampler(script, TinyTokenizer()))
        app.middlewares.append(self._take_time)
        async with serving(app) as url:
            yield url

    @web.middleware
    async def _take_time(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not request.path.endswith("/completions"):
            return await handler(request)
        async with self._slots:
            began_at = time.monotonic()
            await asyncio.sleep(MEDIAN_CALL_S * self._chance.lognormvariate(0, 0.5))
            answer = await handler(request)
            self.busy_s += time.monotonic() - began_at
            return answer


def tasks() -> Iterator[dict[str, Any]]:
    for number in count():
        yield {
            "task_id": f"task-{number}",
            "instruction": "act",
            "num_samples": SAMPLES,
            "runtime": {"backend": "sandbox"},
            "agent": {"harness": "native"},
            "evaluator": {
                "strategy": "script",
                "config": {"command": f"cp {EARNED} reward.txt", "reward_file": "reward.txt"},
            },
        }


def make_collector(variant: Variant, client: ServerClient) -> PlainCollector | ReplenishingCollector:
    if not variant.cleans_up:
        return PlainCollector(client, tasks(), admit=informative)
    return ReplenishingCollector(client, tasks(), num_in_flight=NUM_GROUPS, unfinished="cancel", admit=informative)


async def measured(folder: Path, variant: Variant) -> Measured:
    engines = [Engine(number) for number in range(NUM_ENGINES)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine.served()) for engine in engines]
        server = await stack.enter_async_context(served("server", folder / "server"))
        arguments = (variant.shell, variant.placement, "n1", folder / "node", server.url, ",".join(urls))
        await stack.enter_async_context(served(*arguments, program=NODE))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        collector = await stack.enter_async_context(make_collector(variant, client))
        await collector.collect(1)  # the keeper and the first sandboxes start
        began_at = time.monotonic()
        already_s = sum(engine.busy_s for engine in engines)
        for _ in range(NUM_BATCHES):
            await collector.collect(NUM_GROUPS)
        took_s = time.monotonic() - began_at
        busy_s = sum(engine.busy_s for engine in engines) - already_s
    actions_s = [float(line) for line in (folder / "node" / "actions.txt").read_text().splitlines()]
    return Measured(
        sessions_per_s=NUM_BATCHES * NUM_GROUPS * SAMPLES / took_s,
        engine_use=busy_s / (NUM_ENGINES * ENGINE_SLOTS * took_s),
        action_ms=1000 * median(actions_s),
    )


async def measure() -> dict[str, Measured]:
    """By variant: medians over the rounds."""
    found: dict[str, list[Measured]] = {variant.name: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        for number in range(NUM_ROUNDS):
            for variant in VARIANTS:
                found[variant.name].append(await measured(Path(name) / f"{variant.name}-{number}", variant))
                print(f"  {variant.title}: {found[variant.name][-1]}", file=sys.stderr, flush=True)
    return {name: Measured(*map(median, zip(*rounds, strict=True))) for name, rounds in found.items()}


def draw(found: dict[str, Measured]) -> None:
    figure = Figure(figsize=(8, 2.6), dpi=140, layout="constrained")
    titles = [variant.title for variant in VARIANTS][::-1]
    shown = [found[variant.name] for variant in VARIANTS][::-1]
    columns = (
        ("sessions per second", [one.sessions_per_s for one in shown], "{:.1f}"),
        ("share of the engines in use", [one.engine_use for one in shown], "{:.0%}"),
        ("ms an action", [one.action_ms for one in shown], "{:.1f}"),
    )
    for axes, (label, values, form) in zip(figure.subplots(1, 3, sharey=True), columns, strict=True):
        bars = axes.barh(titles, values, color=["#c0762b"] * (len(titles) - 1) + ["#1f3b73"])
        axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_xlabel(label, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)


def run() -> Figures:
    """Measure and draw; figure name -> {value, unit, note}. Some minutes."""
    if shutil.which("tmux") is None or shutil.which("bwrap") is None:
        print("  the ablation is not measured: it needs bubblewrap and tmux", file=sys.stderr)
        return {}
    logging.getLogger("gangline").setLevel(logging.ERROR)  # groups of one reward are part of the load
    found = asyncio.run(measure())
    draw(found)
    load = (
        f"{NUM_BATCHES} batches of {NUM_GROUPS} informative groups of {SAMPLES}, {NUM_SESSIONS} sessions at once of "
        f"{MEDIAN_TURNS} turns (median, at most {MOST_TURNS}) with an action each, {NUM_ENGINES} engines with "
        f"{ENGINE_SLOTS} slots, median of {NUM_ROUNDS} rounds"
    )
    figures: Figures = {}
    for variant in VARIANTS:
        one = found[variant.name]
        note = f"{variant.title}; {load}"
        figures |= {
            f"ablation.{variant.name}.sessions_per_s": _figure(one.sessions_per_s, "1/s", note),
            f"ablation.{variant.name}.engine_use": _figure(one.engine_use, "share", note),
            f"ablation.{variant.name}.action_ms": _figure(one.action_ms, "ms", note),
        }
    return figures


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
