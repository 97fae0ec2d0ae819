"""A service beyond one machine: 1,000 simulated nodes, 100,000 sessions, real servers and a real PostgreSQL.

- `service.nodes_1000_leases_per_s`: sessions that were submitted, leased, kept alive by heartbeats and reported, over
  the time until all had ended. One server.
- `service.servers_1_to_4`: the same rate with four servers on one database over that with one; a tenth of the
  sessions. The machine's processors bound it: nodes, servers and database share them, so the note has the processor
  time of each for a session.
- `service.two_servers_ratio`: what two servers, each with a core, would do over what one does, by that time.

`make scale` runs it; NODES and SESSIONS choose other numbers. Sessions only wait: agents, engines and sandboxes are
elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from service_bench import Figures, Served, served, task

from gangline.wire.client.server import ServerClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.store.postgres import Cluster, running_cluster

PROGRAM = Path(__file__).with_name("scale_nodes.py")
NUM_NODES = int(os.environ.get("NODES", "1000"))
NUM_SESSIONS = int(os.environ.get("SESSIONS", "100000"))
SLOTS = 8
SAMPLES = 100
LEVELS = (1, 2, 4)
_TICKS = os.sysconf("SC_CLK_TCK")


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One run of all sessions."""

    num_servers: int
    num_sessions: int
    wall_s: float
    submit_s: float
    lease_ms: list[float]
    """p50 and p99 of lease requests that were given something, the time in the queue included."""
    server_ms: float
    """Processor time of all servers for a session."""
    database_ms: float
    nodes_ms: float
    """Processor time of the simulated nodes for a session."""
    lost: int
    num_failed: int
    """Sessions whose leases ran out in every attempt."""
    errors: dict[str, int]

    @property
    def rate(self) -> float:
        return self.num_sessions / self.wall_s


@asynccontextmanager
async def simulated(urls: list[str], num_nodes: int) -> AsyncGenerator[asyncio.subprocess.Process]:
    """All nodes in one process, when each has been heard."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, "0", str(num_nodes), str(SLOTS), "0", *urls, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline(), "the simulated nodes did not start"
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def one_round(cluster: Cluster, folder: Path, num_servers: int, num_sessions: int) -> Round:
    database = cluster.new_database()
    results = folder / "results"
    async with AsyncExitStack() as stack:
        servers: list[Served] = []
        for number in range(num_servers):
            place = (folder / f"server-{number}", database, results)
            servers.append(await stack.enter_async_context(served("server", *place)))
        client = await stack.enter_async_context(ServerClient(servers[0].url, None))
        nodes = await stack.enter_async_context(simulated([server.url for server in servers], NUM_NODES))
        before = [server.cpu_s() for server in servers], _cpu_below(cluster)
        began = time.perf_counter()
        num_failed = 0
        names = [f"scale-{at}" for at in range(num_sessions // SAMPLES)]
        for at in range(0, len(names), 20):
            await client.submit_many([task(name, SAMPLES) for name in names[at : at + 20]])
        submitted = time.perf_counter()
        for name in names:
            view = await client.wait(name)
            assert sum(view.outcomes.values()) == SAMPLES, view.outcomes
            num_failed += SAMPLES - view.outcomes.get("completed", 0)
        ended = time.perf_counter()
        server_s = sum(server.cpu_s() - was for server, was in zip(servers, before[0], strict=True))
        database_s = _cpu_below(cluster) - before[1]
        told = await _ended(nodes)
    return Round(
        num_servers=num_servers,
        num_sessions=num_sessions,
        wall_s=ended - began,
        submit_s=submitted - began,
        lease_ms=told["lease_ms"],
        server_ms=1000 * server_s / num_sessions,
        database_ms=1000 * database_s / num_sessions,
        nodes_ms=1000 * told["cpu_s"] / num_sessions,
        lost=told["lost"],
        num_failed=num_failed,
        errors=told["errors"],
    )


async def _ended(nodes: asyncio.subprocess.Process) -> dict[str, Any]:
    assert nodes.stdout is not None
    nodes.send_signal(signal.SIGTERM)
    told: dict[str, Any] = json.loads(await nodes.stdout.readline())
    await nodes.wait()
    return told


def _cpu_below(cluster: Cluster) -> float:
    """Processor seconds of PostgreSQL, connections that have ended included."""
    postmaster = int((cluster.socket_dir / "data" / "postmaster.pid").read_text().split()[0])
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(postmaster)], capture_output=True, text=True, check=False
    )
    pids = [postmaster, *map(int, listed.stdout.split())]
    return sum(_cpu_s(pid, with_children=pid == postmaster) for pid in pids)


def _cpu_s(pid: int, *, with_children: bool) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11 : 15 if with_children else 13])) / _TICKS


def _described(one: Round) -> str:
    return (
        f"{one.num_sessions:,} sessions on {NUM_NODES:,} nodes of {SLOTS} slots in {one.wall_s:.0f} s "
        f"(submitted in {one.submit_s:.0f}); processor ms a session: servers {one.server_ms:.2f}, PostgreSQL "
        f"{one.database_ms:.2f}, simulated nodes {one.nodes_ms:.2f}; a lease request p50 {one.lease_ms[0]:.0f} ms, p99 "
        f"{one.lease_ms[1]:.0f} ms; {one.lost} leases lost, {one.num_failed} sessions failed, "
        f"errors: {one.errors or 'none'}"
    )


async def measure() -> Figures:
    with tempfile.TemporaryDirectory(prefix="gangline-scale-") as name, running_cluster(is_durable=True) as cluster:
        folder = Path(name)
        whole = await one_round(cluster, folder / "whole", 1, NUM_SESSIONS)
        print(f"  {_described(whole)}", file=sys.stderr, flush=True)
        rounds: list[Round] = []
        for number in LEVELS:
            rounds.append(await one_round(cluster, folder / f"{number}", number, NUM_SESSIONS // 10))
            print(f"  {number} servers: {_described(rounds[-1])}", file=sys.stderr, flush=True)
    told = "; ".join(
        f"{one.num_servers}: {one.rate:.0f}/s, servers {one.server_ms:.2f} and database {one.database_ms:.2f} ms"
        for one in rounds
    )
    return {
        "service.nodes_1000_leases_per_s": {
            "value": round(whole.rate, 1),
            "unit": "sessions/s",
            "note": _described(whole),
        },
        "service.servers_1_to_4": {
            "value": round(rounds[-1].rate / rounds[0].rate, 2),
            "unit": "ratio",
            "note": f"servers on one PostgreSQL, all on {os.cpu_count()} cores with the nodes: {told}",
        },
        "service.two_servers_ratio": {
            "value": round(2 * rounds[0].server_ms / rounds[1].server_ms, 2),
            "unit": "ratio",
            "note": f"of sessions in a second of every server's core, two servers over one: {told}",
        },
    }


def run() -> Figures:
    """Measure; figure name -> {value, unit, note}. An hour on two cores."""
    return asyncio.run(measure())
