"""`kill -9` of the server under load, again and again: nothing accepted is lost, nothing ends twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gangline.domain.errors import LeaseLost, ServerUnavailable
from gangline.domain.session import Lease
from gangline.server.run import database_path, results_path
from gangline.store.results.files import ResultStore
from gangline.store.sql.reader import TaskReader
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, request, result

NUM_TASKS = 30
NUM_SAMPLES = 4
NUM_KILLS = 4

PROGRAM = """
import asyncio, sys
from pathlib import Path
from gangline.server.run import serving

async def main():
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    options = {"lease_s": 2.0, "sweep_every_s": 0.2, "check_task": lambda task: None, "callback_base_s": 0.05}
    async with serving(data_dir=folder, port=port, control_token=None, **options) as running:
        print(running.url, flush=True)
        await running.wait()

asyncio.run(main())
"""


class Victim:
    """A server process that is killed and started again on the same folder and port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Victim]:
        await self.start()
        try:
            yield self
        finally:
            await self.kill()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, str(self._folder), str(self._port), stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.url = (await asyncio.wait_for(self._process.stdout.readline(), 60)).decode().strip()
        self._port = int(self.url.rsplit(":", 1)[1])

    async def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        assert self._process.stdout is not None
        await self._process.stdout.read()
        await self._process.wait()


async def until_answered(call):
    """Call until the server answers, as every client of ours does."""
    while True:
        try:
            return await call()
        except ServerUnavailable:
            await asyncio.sleep(0.02)


class Worker:
    """Leases and reports without end, and remembers what the server said it accepted."""

    def __init__(self, node: FakeNode, chance: random.Random) -> None:
        self._node = node
        self._chance = chance
        self.accepted: dict[tuple[str, int], float] = {}

    async def work(self) -> None:
        while True:
            for lease in await until_answered(lambda: self._node.lease(3, wait_s=1.0)):
                await self._report(lease)

    async def _report(self, lease: Lease) -> None:
        reward = self._chance.random()
        told = result(lease, self._node.node_id, reward=reward, artifacts={"log": b"x" * 20_000})
        try:
            receipt = await until_answered(lambda: self._node.client.post_result(told))
        except LeaseLost:
            return
        assert receipt.accepted
        self.accepted[lease.session_id, lease.fence] = reward


async def test_killing_the_server_under_load_loses_nothing_and_doubles_nothing(tmp_path: Path):
    chance = random.Random(20)
    async with Victim(tmp_path).running() as server, ServerClient(server.url) as client:
        workers = [Worker(FakeNode(client, f"n{index}"), chance) for index in range(3)]
        working = [asyncio.create_task(worker.work()) for worker in workers]
        submitting = asyncio.create_task(submit_all(client))
        for kill in range(1, NUM_KILLS + 1):
            await sessions_ended(client, kill * NUM_TASKS * NUM_SAMPLES // (NUM_KILLS + 2))
            await server.kill()
            await server.start()
        await submitting
        tasks = [await client.wait(f"t{index}", timeout_s=120) for index in range(NUM_TASKS)]
        async with asyncio.timeout(60):  # a worker hears of its last report after everybody else does
            while sum(len(worker.accepted) for worker in workers) < NUM_TASKS * NUM_SAMPLES:
                await asyncio.sleep(0.02)
        for task in working:
            task.cancel()
        await asyncio.wait(working)
    assert all(task.cancelled() for task in working)
    assert {task.status for task in tasks} == {"ended"}
    accepted = {session: reward for worker in workers for (session, _), reward in worker.accepted.items()}
    assert len(accepted) == sum(len(worker.accepted) for worker in workers) == NUM_TASKS * NUM_SAMPLES
    with TaskReader(database_path(tmp_path)) as reader:
        ends = Counter(event.session_id for event in reader.events(limit=10**6) if event.kind == "session.ended")
        task_ends = Counter(event.task_id for event in reader.events(limit=10**6) if event.kind == "task.ended")
    assert set(ends.values()) == {1}
    assert set(task_ends.values()) == {1}
    assert ends.keys() == accepted.keys()
    results = ResultStore(results_path(tmp_path))
    for session in (session for task in tasks for session in task.sessions):
        assert session.result_attempt is not None
        kept = results.read(session.task_id, session.session_id, session.result_attempt)
        assert session.reward == kept.reward == accepted[session.session_id]


async def submit_all(client: ServerClient) -> None:
    for index in range(NUM_TASKS):
        task = request(f"t{index}", num_samples=NUM_SAMPLES, max_attempts=50)
        await until_answered(lambda task=task: client.submit(task))


async def sessions_ended(client: ServerClient, count: int) -> None:
    """Wait until so many have ended."""
    while (await until_answered(client.status)).sessions.get("ended", 0) < count:
        await asyncio.sleep(0.01)
