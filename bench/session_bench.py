"""What a whole session costs: server, node, keeper and a real sandbox, for an agent that does nothing (`true`).

- `session.cpu_ms`: processor time of all of it on PostgreSQL, without the database's, the median of three rounds;
  `session.*_cpu_ms`: its parts. `children`: what the keeper and the node started for the session and have waited for.
  All files are in memory: on ext4 a new file costs more the more were deleted in the last minutes, so that rounds
  differ by ten milliseconds.
- `session.sqlite.cpu_ms`: the same on SQLite and on the disk.
- `session.statements`: that PostgreSQL was sent, by its own log, counted in a run of its own.
- `session.processes`, `session.switches`, `session.written_kb`: forks and threads of the whole machine; voluntary
  context switches of server, node and keeper; bytes that server and node gave to the disk.
- `session.idle_ms_per_s`: processor time of a session that waits, in a second.

Needs bubblewrap and PostgreSQL.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from service_bench import PROGRAM, served

from gangline.domain.errors import RuntimeUnavailable
from gangline.serving.scripted.server import scripted_server
from gangline.settings.plugins import make_runtime
from gangline.wire.client.server import ServerClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.store.postgres import Cluster, running_cluster

NUM_SESSIONS, SAMPLES, ROUNDS = 240, 8, 3
IN_MEMORY = "/dev/shm"
NUM_IDLE, IDLE_S = 16, 12
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Figures = dict[str, dict[str, Any]]


class Cost(NamedTuple):
    """Milliseconds of processor time, then counts; differences are per session."""

    server: float
    node: float
    keeper: float
    children: float
    processes: float
    switches: float
    written_kb: float

    @property
    def cpu_ms(self) -> float:
        return self.server + self.node + self.keeper + self.children

    def since(self, before: Cost, num: float) -> Cost:
        return Cost(*((now - then) / num for now, then in zip(self, before, strict=True)))


class Service:
    """A server and a node, each a process, the node with its keeper."""

    def __init__(self, server: int, node: int, client: ServerClient) -> None:
        self._server, self._node = server, node
        self.client = client

    def cost(self) -> Cost:
        keepers = _descendants(self._node)
        own, reaped = {}, {}
        for pid in (self._server, self._node, *keepers):
            own[pid], reaped[pid] = _cpu_ms(pid)
        return Cost(
            own[self._server],
            own[self._node],
            sum(own[pid] for pid in keepers),
            sum(reaped[pid] for pid in (self._node, *keepers)),
            int(re.findall(r"^processes (\d+)", Path("/proc/stat").read_text(), re.M)[0]),
            sum(_field(pid, "status", "voluntary_ctxt_switches") for pid in own),
            sum(_field(pid, "io", "write_bytes") for pid in (self._server, self._node)) / 1024,
        )

    async def through(self, name: str, command: str, num: int) -> None:
        """Submit the sessions and wait until all have ended well."""
        agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
        tasks = [f"{name}-{number}" for number in range(num // SAMPLES)]
        await self.client.submit_many(
            [
                {
                    "task_id": one,
                    "instruction": "do nothing",
                    "num_samples": SAMPLES,
                    "agent": agent,
                    "runtime": {"backend": "sandbox", "network": "none"},
                }
                for one in tasks
            ]
        )
        for one in tasks:
            view = await self.client.wait(one)
            assert view.outcomes == {"completed": SAMPLES}, view.outcomes


def _descendants(pid: int) -> list[int]:
    """All below it that still run."""
    found: list[int] = []
    front = [pid]
    while front:
        for tasks in Path(f"/proc/{front.pop()}/task").glob("*/children"):
            children = [int(child) for child in tasks.read_text().split()]
            front += children
            found += children
    return found


def _cpu_ms(pid: int) -> tuple[float, float]:
    """Its own, and that of the children that it has waited for."""
    fields = [int(one) for one in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]]
    return 1000 * _TICK_S * sum(fields[:2]), 1000 * _TICK_S * sum(fields[2:])


def _field(pid: int, file: str, name: str) -> int:
    return int(re.findall(rf"^{name}:\s*(\d+)", Path(f"/proc/{pid}/{file}").read_text(), re.M)[0])


@asynccontextmanager
async def service(folder: Path, database: str | None) -> AsyncGenerator[Service]:
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(scripted_server({"default": {"text": "never asked"}}))
        storage = [] if database is None else [database, str(folder / "results")]
        server = await stack.enter_async_context(served("server", folder / "server", *storage, program=PROGRAM))
        node = await stack.enter_async_context(served("sandboxes", folder / "node", server.url, engine_url))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        running = Service(server.pid, node.pid, client)
        await running.through("warm-up", "true", 2 * SAMPLES)
        yield running


async def noop(database: str | None, place: str | None = None) -> Cost:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-", dir=place) as name:
        async with service(Path(name), database) as running:
            await asyncio.sleep(1)
            before = running.cost()
            await running.through("noop", "true", NUM_SESSIONS)
            await asyncio.sleep(1)  # what is done behind a session's end
            return running.cost().since(before, NUM_SESSIONS)


async def idle() -> float:
    """Milliseconds in a second of a session that waits."""
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        async with service(Path(name), None) as running:
            waiting = asyncio.create_task(running.through("idle", f"sleep {IDLE_S + 15}", NUM_IDLE))
            await asyncio.sleep(5)
            before, began_at = running.cost(), time.perf_counter()
            await asyncio.sleep(IDLE_S)
            took_s = time.perf_counter() - began_at
            cost = running.cost().since(before, NUM_IDLE * took_s)
            await waiting
            return cost.cpu_ms


async def statements(cluster: Cluster) -> float:
    """Of a session, by the server's log."""
    database, log = cluster.new_database(), cluster.socket_dir / "log"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET log_statement = 'all'")  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        async with service(Path(name), database) as running:
            at = log.stat().st_size
            await running.through("counted", "true", NUM_SESSIONS // 2)
            said = log.read_bytes()[at:]
    return len(re.findall(rb"LOG:  (?:statement|execute )", said)) / (NUM_SESSIONS // 2)


async def measured() -> Figures:
    with running_cluster() as cluster:
        rounds = [await noop(cluster.new_database(), IN_MEMORY) for _ in range(ROUNDS)]
        postgres, sqlite = sorted(rounds, key=lambda cost: cost.cpu_ms)[ROUNDS // 2], await noop(None)
        num_statements = await statements(cluster)
    parts = "server {:.1f}, node {:.1f}, keeper {:.1f}, what they start {:.1f}"
    note = f"{NUM_SESSIONS} sessions of `true` in `sandbox`, median of {ROUNDS} rounds, files in memory: "
    on_disk = f"{NUM_SESSIONS} sessions of `true` in `sandbox`, files on the disk: "
    on = {
        "cpu_ms": (postgres.cpu_ms, "ms", note + parts.format(*postgres[:4])),
        "server_cpu_ms": (postgres.server, "ms", note + "on PostgreSQL"),
        "node_cpu_ms": (postgres.node, "ms", note + "on PostgreSQL"),
        "keeper_cpu_ms": (postgres.keeper, "ms", note + "on PostgreSQL"),
        "children_cpu_ms": (postgres.children, "ms", note + "on PostgreSQL"),
        "sqlite.cpu_ms": (sqlite.cpu_ms, "ms", on_disk + parts.format(*sqlite[:4])),
        "statements": (num_statements, "", "on PostgreSQL, by its log"),
        "processes": (postgres.processes, "", "forks and threads of the machine meanwhile"),
        "switches": (postgres.switches, "", "voluntary, of server, node and keeper"),
        "written_kb": (sqlite.written_kb, "KiB", "by server and node, on SQLite"),
        "idle_ms_per_s": (await idle(), "ms", f"of each of {NUM_IDLE} sessions that sleep"),
    }
    return {
        f"session.{name}": {"value": round(value, 2), "unit": unit, "note": told}
        for name, (value, unit, told) in on.items()
    }


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. A minute."""
    try:
        asyncio.run(make_runtime("sandbox").check())
    except RuntimeUnavailable as error:
        print(f"  sessions are not measured: {error.message}", file=sys.stderr)
        return {}
    if not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        print("  sessions are not measured: PostgreSQL is missing: sudo apt-get install -y postgresql", file=sys.stderr)
        return {}
    return asyncio.run(measured())


if __name__ == "__main__":
    for figure, found in run().items():
        print(figure, found["value"], found["unit"], f"({found['note']})")
