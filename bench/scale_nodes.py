"""Simulated nodes: real HTTP against a real server, sessions that only wait.

    python bench/scale_nodes.py FIRST NUM_NODES SLOTS SEED SERVER_URL ...

Each node leases sessions over a long poll, sends heartbeats, and reports each session when its time is over. Nodes take
the servers in turn. Prints a line of JSON when all nodes have had their first heartbeat answered, then one at the end,
after SIGTERM: {"leases", "results", "lost", "errors", "lease_ms": [p50, p99], "cpu_s"}.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import signal
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack

import numpy as np

from gangline.domain.errors import GanglineError
from gangline.domain.session import Heartbeat, Lease, SessionResult
from gangline.wire.client.server import ServerClient

HEARTBEAT_S = 3.0
WAIT_S = 20.0
MEDIAN_S, SIGMA, LONGEST_S = 1.0, 0.8, 20.0
"""Lengths of sessions: log-normal, cut off."""


class Node:
    """One simulated node."""

    def __init__(self, number: int, client: ServerClient, slots: int, seed: int, counts: Counter[str]) -> None:
        self.node_id = f"node-{number}"
        self.url = f"http://node-{number}.test"
        self.first_beat = asyncio.Event()
        self.lease_ms: list[float] = []
        self._client = client
        self._slots = slots
        self._draw = random.Random(f"{seed}/{number}")
        self._counts = counts
        self._held: dict[str, Lease] = {}
        self._is_free = asyncio.Event()
        self._reporting = asyncio.Semaphore(2)
        """A node's connections: its lease, its heartbeat, and results."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            await self.first_beat.wait()
            while True:
                free = self._slots - len(self._held)
                if free == 0:
                    self._is_free.clear()
                    await self._is_free.wait()
                    continue
                for lease in await self._leased(free):
                    self._held[lease.session_id] = lease
                    group.create_task(self._live(lease))

    async def _leased(self, free: int) -> list[Lease]:
        began = time.perf_counter()
        try:
            leases = await self._client.lease(self.node_id, url=self.url, max_sessions=free, wait_s=WAIT_S)
        except GanglineError as error:
            self._counts[f"lease: {error.code}"] += 1
            await asyncio.sleep(1.0)
            return []
        if leases:
            self.lease_ms.append(1000 * (time.perf_counter() - began))
            self._counts["leases"] += len(leases)
        return leases

    async def _live(self, lease: Lease) -> None:
        await asyncio.sleep(min(LONGEST_S, self._draw.lognormvariate(np.log(MEDIAN_S), SIGMA)))
        result = SessionResult(
            session_id=lease.session_id,
            task_id=lease.task_id,
            node_id=self.node_id,
            attempt=lease.attempt,
            fence=lease.fence,
            outcome="completed",
            reward=1.0,
        )
        while self._held.get(lease.session_id) is lease:
            try:
                async with self._reporting:
                    await self._client.post_result(result)
                self._counts["results"] += 1
                break
            except GanglineError as error:
                self._counts[f"result: {error.code}"] += 1
                if not error.retryable:
                    break
                await asyncio.sleep(1.0)
        self._held.pop(lease.session_id, None)
        self._is_free.set()

    async def _beat(self) -> None:
        await asyncio.sleep(self._draw.uniform(0, 10.0))  # a thousand nodes do not start within an instant
        every_s = HEARTBEAT_S
        while True:
            held = {lease.session_id: (lease.fence, "run") for lease in self._held.values()}
            beat = Heartbeat(node_id=self.node_id, url=self.url, sessions=held, capacity=self._slots)  # pyright: ignore
            try:
                reply = await self._client.heartbeat(beat)
            except GanglineError as error:
                self._counts[f"heartbeat: {error.code}"] += 1
            else:
                every_s = max(HEARTBEAT_S, reply.every_s)
                self._counts["lost"] += sum(self._held.pop(lost, None) is not None for lost in reply.lost)
                self.first_beat.set()
            await asyncio.sleep(every_s)


async def main(first: int, num_nodes: int, slots: int, seed: int, urls: list[str]) -> None:
    counts: Counter[str] = Counter()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for number in range(first, first + num_nodes):
            client = await stack.enter_async_context(ServerClient(urls[number % len(urls)], None))
            nodes.append(Node(number, client, slots, seed, counts))
        running = [asyncio.create_task(node.run()) for node in nodes]
        await asyncio.gather(*(node.first_beat.wait() for node in nodes))
        print(json.dumps({"ready": num_nodes}), flush=True)
        await ended.wait()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    lease_ms = [one for node in nodes for one in node.lease_ms]
    used = resource.getrusage(resource.RUSAGE_SELF)
    told = {name: counts.pop(name, 0) for name in ("leases", "results", "lost")}
    print(
        json.dumps(
            {
                **told,
                "errors": counts,
                "lease_ms": np.percentile(lease_ms, [50, 99]).round(1).tolist() if lease_ms else None,
                "cpu_s": round(used.ru_utime + used.ru_stime, 1),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:5]]
    asyncio.run(main(*given, sys.argv[5:]))  # pyright: ignore
