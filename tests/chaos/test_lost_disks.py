"""Nodes that vanish with their disks: sessions of durable turns go on elsewhere, and no turn is sampled twice.

A node's processes are killed, its sandboxes with them, and its folder is deleted; another node takes its place.
`make lost-disks` runs a thousand sessions through it.

At the end, exactly: every session has ended once, with the calls of its script, each answered once. A session that was
on a lost node has repeated, as its first calls, the records that the server had of it when the node was lost.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.session import KeptTurns, SessionResult
from gangline.rows.audit import audit
from gangline.rows.forks.calls import RESUME_FILE, RESUMED
from gangline.server.run import results_path
from gangline.store.journal.turns import TurnStore
from gangline.wire.client.server import ServerClient
from support.chaos.service import TOKEN, ChaosService
from support.requirements import need_command

NUM_SESSIONS = int(os.environ.get("GANGLINE_LOST_SESSIONS", "24"))
NUM_SAMPLES, NUM_CALLS = 4, 6
NUM_LOST = max(2, NUM_SESSIONS // 100)
GIVE_UP_S = 300 + 4 * NUM_SESSIONS
AGENT = (Path(__file__).parents[1] / "support" / "chaos" / "agent.py").read_text()
SCRIPT = {
    "rules": [{"turn": turn, "text": f"answer {turn}", "delay_s": 0.8} for turn in range(NUM_CALLS)],
    "default": {"text": "nobody asks for so much"},
}


def task(number: int) -> dict[str, Any]:
    return {
        "task_id": f"lost-{number}",
        "instruction": "go on",
        "num_samples": NUM_SAMPLES,
        "max_attempts": 1 + NUM_LOST,
        "timeout_seconds": 600,
        "runtime": {"prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
        "agent": {
            "harness": "shell",
            "settings": {"command": ["python3", "-S", "agent.py", str(NUM_CALLS), f"word-{number}"]},
        },
        "capture": {"durable": "turn"},
    }


class Losses:
    """Nodes that are lost one after the other, and what the server had of their sessions then."""

    def __init__(self, service: ChaosService, client: ServerClient) -> None:
        self._service = service
        self._client = client
        self._kept = TurnStore(results_path(service.data).with_name("turns"))
        self.expected: dict[str, list[str]] = {}
        """Session -> records of it when its node was lost for the last time."""

    async def lose(self, node_id: str) -> None:
        """Kill the node, all that it had started, and its disk; another one comes for it."""
        await self._service.lose(node_id)
        async for session_id in self._held_by(node_id):
            self.expected[session_id] = [one.completion_id for one in (await self._records(session_id)).completions]

    async def in_mid_work(self, node_id: str) -> None:
        """Wait until the server has two records of each of four sessions of the node."""
        while True:
            counts = [len((await self._records(session_id)).completions) async for session_id in self._held_by(node_id)]
            if sum(count >= 2 for count in counts) >= 4:
                return
            await asyncio.sleep(0.2)

    async def _records(self, session_id: str) -> KeptTurns:
        return await asyncio.to_thread(self._kept.latest, session_id, 1 << 53)

    async def _held_by(self, node_id: str) -> AsyncIterator[str]:
        page = await self._client.sessions(limit=1000, state="leased", node_id=node_id)
        for session in page.sessions:
            yield session.session_id

    def check(self, result: SessionResult) -> int:
        """Returns how many records were repeated."""
        repeated = [one.metadata[RESUMED] for one in result.completions if RESUMED in one.metadata]
        assert repeated == self.expected.get(result.session_id, [])
        assert (RESUME_FILE in result.artifacts) == bool(repeated)
        return len(repeated)


@pytest.mark.timeout(7200)
async def test_sessions_outlive_nodes_that_vanish_with_their_disks_and_no_turn_is_sampled_twice(
    tmp_path: Path,
) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    sizes = {"--run-slots": 8, "--ready-slots": 4, "--init-workers": 2, "--postrun-workers": 2}
    service = ChaosService(tmp_path, SCRIPT, nodes=("node-0", "node-1"), sizes=sizes)
    async with service.running(), ServerClient(service.server.url, TOKEN) as client, asyncio.timeout(GIVE_UP_S):
        losses, began_at = Losses(service, client), time.monotonic()
        tasks = [task(number) for number in range(NUM_SESSIONS // NUM_SAMPLES)]
        await client.submit_many(tasks)
        for number in range(NUM_LOST):
            await losses.in_mid_work(f"node-{number}")
            await losses.lose(f"node-{number}")
        for one in tasks:
            await client.wait(one["task_id"])
        results = [result for one in tasks for result in await client.result(one["task_id"])]
        print(f"{time.monotonic() - began_at:.0f} s, {NUM_LOST} nodes lost", flush=True)
        num_repeated = check_all(results, losses)
        assert num_repeated > 0
        assert losses_are_forgotten(service)


def check_all(results: Sequence[SessionResult], losses: Losses) -> int:
    assert len({result.session_id for result in results}) == len(results) == NUM_SESSIONS
    num_repeated = 0
    for result in results:
        assert (result.outcome, result.failure) == ("completed", None), (result.session_id, result.failure)
        assert len(result.completions) == NUM_CALLS, result.session_id
        assert result.trajectory is not None
        assert audit(result.trajectory, result.completions).ok
        num_repeated += losses.check(result)
        sampled = sum(len(one.sampled_ids) for one in result.completions)
        (trace,) = result.trajectory.traces
        assert int(trace.loss_mask.sum()) == sampled, "all are this session's own, and trained on once"
    print(f"{num_repeated} calls of {len(losses.expected)} sessions were repeated, none was sampled again", flush=True)
    return num_repeated


def losses_are_forgotten(service: ChaosService) -> bool:
    return not TurnStore(results_path(service.data).with_name("turns")).sessions()
