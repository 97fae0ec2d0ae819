"""How long a sandbox takes to start, to run a command, and to stop, alongside SWE-ReX.

Sandboxes are a node's: in its keeper, where the runtime may live there. A life is a start (network `proxy`), a few
times the command `true`, and a stop. Systems take turns; medians count. Containers are measured where their program
works and GANGLINE_BENCH_IMAGE names an image that is there; SWE-ReX (`peer_environments.py`) where it can be installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from peer_environments import peer_python

from gangline.domain.errors import RuntimeUnavailable, UnknownPlugin
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.node.sessions.reuse.warm import WarmPool, WarmSizes
from gangline.settings import plugins
from gangline.testing.adoption_conformance import in_keeper

BENCH = Path(__file__).parent
RUNTIMES = {"sandbox": False, "process": False, "docker": True, "podman": True, "apptainer": True}
"""Name -> whether it needs an image."""
PEER = ("swe_rex", "swe-rex==1.4.0", "swe_rex.py", (3, 10))
ROUNDS = 4
NUM_LIVES = 6
NUM_COMMANDS = 4
NUM_AT_ONCE = 50
PROXY_PORT = 9
"""Nobody listens there, and nobody calls."""

Figures = dict[str, dict[str, Any]]
Times = defaultdict[str, list[float]]
"""Step -> milliseconds, each time."""
T = TypeVar("T")


async def timed(times: Times, step: str, work: Awaitable[T]) -> T:
    began_at = time.perf_counter()
    result = await work
    times[step].append(1000 * (time.perf_counter() - began_at))
    return result


# -- ours --------------------------------------------------------------------------------------------------------


class Place:
    """A runtime, and a folder for its sandboxes."""

    def __init__(self, runtime: Runtime, folder: Path, image: str | None) -> None:
        self.runtime = runtime
        self.folder = folder
        self.image = image

    async def start(self) -> Sandbox:
        runtime_id = new_id("bench")
        spec = RuntimeSpec(backend=self.runtime.name, image=self.image)
        folder = self.folder / runtime_id
        return await self.runtime.start(
            RuntimeStart(runtime_id=runtime_id, owner="bench", spec=spec, folder=folder, proxy_port=PROXY_PORT)
        )

    async def live(self, times: Times) -> None:
        handle = await timed(times, "start", self.start())
        for _ in range(NUM_COMMANDS):
            await timed(times, "exec", run_true(handle))
        await timed(times, "stop", handle.stop())

    async def live_at_once(self, number: int) -> Times:
        """So many lives, all in the same step: `all_started` and `all_ran` are of all together."""
        times: Times = defaultdict(list)
        starts = asyncio.gather(*(timed(times, "start", self.start()) for _ in range(number)))
        handles = await timed(times, "all_started", starts)
        await timed(times, "all_ran", asyncio.gather(*(timed(times, "exec", run_true(one)) for one in handles)))
        await asyncio.gather(*(timed(times, "stop", one.stop()) for one in handles))
        return times


async def run_true(handle: Sandbox) -> None:
    assert (await handle.exec(["true"])).ok


def rounds_of(name: str, image: str | None, times: Times) -> Figures:
    """One round of lives; figures of many at once come with it."""

    async def live() -> Figures:
        with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
            async with in_keeper(name, Path(folder) / "keeper") as runtime:
                place = Place(runtime, Path(folder) / "sandboxes", image)
                await (await place.start()).stop()  # the keeper starts with the first one
                for _ in range(NUM_LIVES):
                    await place.live(times)
                if name != "sandbox":
                    return {}
                await warm_starts(place, times)
                return at_once(await place.live_at_once(NUM_AT_ONCE)) | await private_memory(place)

    return asyncio.run(live())


async def warm_starts(place: Place, times: Times) -> None:
    """Sandboxes that a session of the kind finds started, one after another."""
    spec = RuntimeSpec(backend=place.runtime.name)
    pool = WarmPool(lambda _spec, _runtime_id: place.start(), WarmSizes(count=1))
    try:
        assert await pool.take(spec, None) is None  # the first one to ask has another one started
        for _ in range(NUM_LIVES):
            await filled(pool)
            handle = await timed(times, "warm_start", pool.take(spec, None))
            assert handle is not None
            await filled(pool)
            await handle.stop()
    finally:
        await pool.close()


async def filled(pool: WarmPool) -> None:
    while pool.is_starting:  # noqa: ASYNC110 - a bench needs no event for it
        await asyncio.sleep(0.01)


async def private_memory(place: Place) -> Figures:
    """Of the spawner of one sandbox, which has run a command."""
    handle = await place.start()
    await run_true(handle)
    label = f"GANGLINE_RUNTIME=bench/{handle.runtime_id}/".encode()
    num_bytes = await asyncio.to_thread(foremens_bytes, label)
    await handle.stop()
    return {"runtime.sandbox.private_mb": figure(num_bytes / (1 << 20), "MB", "private memory of a sandbox's spawner")}


def foremens_bytes(label: bytes) -> int:
    return sum(private_bytes(folder) for folder in Path("/proc").glob("[0-9]*") if is_spawner(folder, label))


def is_spawner(folder: Path, label: bytes) -> bool:
    try:
        return label in (folder / "environ").read_bytes() and b"helpers.forkserver" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def private_bytes(folder: Path) -> int:
    lines = (folder / "smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def at_once(times: Times) -> Figures:
    note = f"{NUM_AT_ONCE} at once, the last round"
    name = f"runtime.sandbox.c{NUM_AT_ONCE}"
    return {
        f"{name}.all_started_ms": figure(
            times["all_started"][0], "ms", f"{note}; from the first call to the last start"
        ),
        f"{name}.start_ms": figure(statistics.median(times["start"]), "ms", f"{note}; median of one"),
        f"{name}.exec_ms": figure(statistics.median(times["exec"]), "ms", f"{note}; median of one"),
    }


def usable(name: str, image: str | None) -> str | None:
    """Why this runtime is not measured; None when it is."""
    if RUNTIMES[name] and image is None:
        return "GANGLINE_BENCH_IMAGE names no image"
    try:
        asyncio.run(plugins.make_runtime(name).check())
    except (UnknownPlugin, RuntimeUnavailable) as error:
        return error.message
    return None


# -- SWE-ReX -----------------------------------------------------------------------------------------------------


def peer_round(python: Path, times: Times) -> None:
    command = [python, str(BENCH / "peers" / PEER[2]), str(NUM_LIVES), str(NUM_COMMANDS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for step, took_ms in json.loads(done.stdout).items():
        times[step] += took_ms


# -- figures -----------------------------------------------------------------------------------------------------


def figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 2), "unit": unit, "note": note}


def medians(times: Times) -> dict[str, float]:
    return {step: statistics.median(took_ms) for step, took_ms in times.items()}


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. About a minute."""
    image = os.environ.get("GANGLINE_BENCH_IMAGE")
    measured: list[str] = []
    for name in RUNTIMES:
        if (reason := usable(name, image)) is None:
            measured.append(name)
        else:
            print(f"  {name} is not measured: {reason}", file=sys.stderr)
    python = peer_python(PEER[0], PEER[1], PEER[3])
    times: dict[str, Times] = {name: defaultdict(list) for name in (*measured, *([PEER[0]] if python else ()))}
    figures: Figures = {}
    for _ in range(ROUNDS):
        for name in measured:
            figures |= rounds_of(name, image if RUNTIMES[name] else None, times[name])
        if python is not None:
            peer_round(python, times[PEER[0]])
    found = {name: medians(one) for name, one in times.items()}
    for name, steps in found.items():
        figures |= {f"runtime.{name}.{step}_ms": figure(ms, "ms", _note(name)) for step, ms in steps.items()}
    if python is not None and "sandbox" in found:
        figures |= ratios(found["sandbox"], found[PEER[0]])
    return figures


def _note(name: str) -> str:
    what = f"median; {ROUNDS} rounds of {NUM_LIVES} lives, {NUM_COMMANDS} times `true` in each"
    if name == PEER[0]:
        return f"{what}; {PEER[1]}, its local deployment, which isolates nothing; `session` is its open shell"
    return what


def ratios(ours: dict[str, float], theirs: dict[str, float]) -> Figures:
    return {
        f"runtime.sandbox.{step}_to_{PEER[0]}": figure(
            ours[step] / theirs[step],
            "ratio",
            f"{ours[step]:.1f} ms to {theirs[step]:.1f} ms of SWE-ReX's local deployment",
        )
        for step in ("start", "exec", "stop")
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
