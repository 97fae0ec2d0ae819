"""How long a container takes to start, to run a command and to stop, alongside the runtime `sandbox` in the same
rounds.

Starts the engines of the tests (`tests/containers/engines.py`), as root, and ends them. An engine that is not installed
is not measured. Run by name: `python bench/run.py containers`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from runtime_bench import NUM_COMMANDS, NUM_LIVES, ROUNDS, Figures, Place, Times, figure, medians

from gangline.testing.adoption_conformance import in_keeper

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from containers.engines import IMAGE, docker_engine, installed, podman_engine

ENGINES = {"docker": (docker_engine, ("docker", "dockerd")), "podman": (podman_engine, ("podman", "runc"))}
"""Runtime -> its engine, and the programs that it needs."""


@contextmanager
def engines() -> Generator[list[str]]:
    """Names of those that run now."""
    names = [name for name, (_, programs) in ENGINES.items() if installed(*programs)]
    before = dict(os.environ)
    with ExitStack() as stack:
        for name in names:
            os.environ.update(stack.enter_context(ENGINES[name][0]()))
        try:
            yield names
        finally:
            os.environ.clear()
            os.environ.update(before)


async def live(name: str, image: str | None, times: Times) -> None:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        async with in_keeper(name, Path(folder) / "keeper") as runtime:
            place = Place(runtime, Path(folder) / "sandboxes", image)
            await (await place.start()).stop()  # the keeper starts with the first one
            for _ in range(NUM_LIVES):
                await place.live(times)


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. About a minute."""
    with engines() as names:
        times: dict[str, Times] = {name: defaultdict(list) for name in ("sandbox", *names)}
        for _ in range(ROUNDS):
            for name, took in times.items():
                asyncio.run(live(name, None if name == "sandbox" else IMAGE, took))
    sandbox = medians(times.pop("sandbox"))
    return {
        f"runtime.{name}.{step}_ms": figure(ms, "ms", _note(step, sandbox))
        for name, took in times.items()
        for step, ms in medians(took).items()
    }


def _note(step: str, sandbox: dict[str, float]) -> str:
    rounds = f"median; {ROUNDS} rounds of {NUM_LIVES} lives, {NUM_COMMANDS} times `true` in each"
    return f"{rounds}; `sandbox` in the same rounds {sandbox[step]:.2f} ms; load {os.getloadavg()[0]:.1f}"
