"""What the service costs per session, without sandboxes and models: server and node as processes, SQLite on this disk.

- `service.without_sandbox_sessions_per_s`: sessions of an agent that does nothing, through all stages, over the
  processor time of server and node together. `session_bench` has what a session with its sandbox takes.
- `service.submit_10k_s`: until 10,000 sessions are accepted, in batches of tasks.
- `service.flat_ratio_100_to_100k`: the server's processor time for one session's life (submit, lease, heartbeat,
  result) with 100,000 sessions stored, over that with 100. Drawn in docs/images/service-flat.png.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gangline.domain.session import Heartbeat, SessionResult
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient

PROGRAM = Path(__file__).with_name("service_processes.py")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "service-flat.png"
NUM_NOOP = 2_000
SAMPLES = 8
LEVELS = (100, 1_000, 10_000, 100_000)
PROBE = 200
REPEATS = 5

Figures = dict[str, dict[str, Any]]


class Served:
    """A process of the service, by its URL."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid = pid
        self.url = url

    def cpu_s(self) -> float:
        """Processor time so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def served(role: str, *arguments: object, program: Path = PROGRAM) -> AsyncGenerator[Served]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, role, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield Served(process.pid, (await process.stdout.readline()).decode().strip())
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


def task(task_id: str, num_samples: int = SAMPLES) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
    return {"task_id": task_id, "instruction": "do nothing", "num_samples": num_samples, "agent": agent}


async def noop_sessions(folder: Path) -> Figures:
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(scripted_server({"default": {"text": "never asked"}}))
        server = await stack.enter_async_context(served("server", folder / "server"))
        node = await stack.enter_async_context(served("node", folder / "node", server.url, engine_url))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        names = [f"noop-{number}" for number in range(NUM_NOOP // SAMPLES)]
        await _through(client, ["warm-up"])
        before = server.cpu_s(), node.cpu_s()
        started = time.perf_counter()
        await _through(client, names)
        wall_s = time.perf_counter() - started
        server_s, node_s = server.cpu_s() - before[0], node.cpu_s() - before[1]
        note = (
            f"{NUM_NOOP} sessions of an agent that does nothing, over the processor time of the server "
            f"({1000 * server_s / NUM_NOOP:.1f} ms each) and the node ({1000 * node_s / NUM_NOOP:.1f} ms); "
            f"{NUM_NOOP / wall_s:.0f} by the wall clock, every step synced to disk"
        )
        value = NUM_NOOP / (server_s + node_s)
        figure = {"value": round(value, 1), "unit": "sessions/s a core", "note": note}
        return {"service.without_sandbox_sessions_per_s": figure}


async def _through(client: ServerClient, task_ids: list[str]) -> None:
    """Submit the tasks and wait until all have ended, well."""
    await client.submit_many([task(task_id) for task_id in task_ids])
    for task_id in task_ids:
        view = await client.wait(task_id)
        assert view.outcomes == {"completed": SAMPLES}, view.outcomes


async def submit_10k(folder: Path) -> Figures:
    async with served("server", folder / "many") as server, ServerClient(server.url, None) as client:
        tasks = [task(f"t{number}") for number in range(10_000 // SAMPLES)]
        started = time.perf_counter()
        for at in range(0, len(tasks), 125):
            await client.submit_many(tasks[at : at + 125])
        value = time.perf_counter() - started
    note = f"{len(tasks):,} tasks of {SAMPLES} sessions, 125 tasks a request, on the disk when answered"
    return {"service.submit_10k_s": {"value": round(value, 2), "unit": "s", "note": note}}


async def flatness(folder: Path) -> Figures:
    """A server for each level, filled (submitted and cancelled, which stores sessions just so) and warmed up; then some
    sessions are lived on each in turn, so that what else the machine does meanwhile falls on all of them.
    """
    turns_ms: dict[int, list[float]] = {level: [] for level in LEVELS}
    async with AsyncExitStack() as stack:
        levels = {level: await _at_level(stack, folder / f"flat-{level}", level) for level in LEVELS}
        for turn in range(REPEATS):
            for level, (server, client) in levels.items():
                turns_ms[level].append(await _cost_ms(client, server, f"{level}-{turn}"))
            print("  " + ", ".join(f"{turns[-1]:.2f}" for turns in turns_ms.values()), file=sys.stderr, flush=True)
    costs_ms = {level: min(turns) for level, turns in turns_ms.items()}
    _draw(costs_ms)
    told = ", ".join(f"{level:,}: {cost:.2f} ms" for level, cost in costs_ms.items())
    note = f"server's processor time for a session's life (submit, lease, heartbeat, result), best of {REPEATS}; {told}"
    value = costs_ms[LEVELS[-1]] / costs_ms[LEVELS[0]]
    return {"service.flat_ratio_100_to_100k": {"value": round(value, 2), "unit": "ratio", "note": note}}


async def _at_level(stack: AsyncExitStack, folder: Path, level: int) -> tuple[Served, ServerClient]:
    server = await stack.enter_async_context(served("server", folder))
    client = await stack.enter_async_context(ServerClient(server.url, None))
    await _fill(client, level)
    await _cost_ms(client, server, "warm-up")
    return server, client


async def _fill(client: ServerClient, level: int) -> None:
    for start in range(0, level, 1000):
        await client.submit(task(f"fill-{start}", min(1000, level - start)))
        await client.cancel(f"fill-{start}")


async def _cost_ms(client: ServerClient, server: Served, name: str) -> float:
    before = server.cpu_s()
    await client.submit_many([task(f"probe-{name}-{number}") for number in range(PROBE // SAMPLES)])
    lived = 0
    while lived < PROBE:
        leases = await client.lease("n1", url="http://node.test", max_sessions=SAMPLES)
        held: dict[str, Any] = {lease.session_id: (lease.fence, "run") for lease in leases}
        await client.heartbeat(Heartbeat(node_id="n1", url="http://node.test", sessions=held, capacity=SAMPLES))
        for lease in leases:
            await client.post_result(
                SessionResult(
                    session_id=lease.session_id,
                    task_id=lease.task_id,
                    node_id="n1",
                    attempt=lease.attempt,
                    fence=lease.fence,
                    outcome="completed",
                    reward=1.0,
                )
            )
        lived += len(leases)
    return 1000 * (server.cpu_s() - before) / PROBE


def _draw(costs_ms: dict[int, float]) -> None:
    figure = Figure(figsize=(6, 3), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(list(costs_ms), list(costs_ms.values()), marker="o", color="#1f3b73", linewidth=2)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.3 * max(costs_ms.values()))
    axes.set_xlabel("sessions stored")
    axes.set_ylabel("ms of the server for one session")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)


async def measure() -> Figures:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        folder = Path(name)
        return {**await noop_sessions(folder), **await submit_10k(folder), **await flatness(folder)}


def run() -> Figures:
    """Measure; figure name -> {value, unit, note}. Two or three minutes."""
    return asyncio.run(measure())


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
