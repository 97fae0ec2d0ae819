"""Sessions that are cancelled and killed at any moment leave nothing: `make leaks` does it to five hundred of them.

A service with one node and its keeper lives through all of it. A seed says which sessions are cancelled and when, and
when one of the processes of the sandboxes is killed: of bubblewrap, a supervisor, a helper, the agent, the grader.
GANGLINE_LEAK_SEED repeats a schedule, GANGLINE_LEAK_SESSIONS makes it longer.

At the end: every session has ended; while node and keeper still run, there is no process, control group, mount or
folder of a sandbox, and both have no more descriptors of each kind than before, but for a handful of idle connections,
and about as much memory; once they have stopped, nothing is left at all.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gangline.wire.client.server import ServerClient
from support.chaos.leak_fates import Fate, fates
from support.chaos.service import TOKEN, ChaosService
from support.chaos.trainer import Trainer
from support.node.footprint import Footprint, children, descendants, described
from support.requirements import need_command
from support.service.cli_process import processes_with

NUM_SESSIONS = int(os.environ.get("GANGLINE_LEAK_SESSIONS", "40"))
SEED = int(os.environ.get("GANGLINE_LEAK_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
NODE = "node-a"
SIZES = {"--run-slots": 8, "--ready-slots": 4, "--init-workers": 4, "--postrun-workers": 4, "--breaker-faults": 0}
AHEAD = 20
NUM_WARM = 12
"""Sessions before the first look at what node and keeper have: they have opened and loaded what they ever need."""
GIVE_UP_S = 120 + 3 * NUM_SESSIONS
SETTLE_S = 120.0
KEPT_ALIVE_S = 16.0
"""A little longer than a connection without use is kept for the next call."""
MEMORY_ALLOWANCE_BYTES = 24 << 20
MAY_COME = Counter(socket=6, anon_inode=1)
"""Idle connections to the server that a node may keep, 5: heartbeats, one each 3 s, use all of them in turn. And a
forkserver of its own: once a session's runtime failed, the node checks that runtime itself."""

ENDS_A_SESSION = {"prepare_failed", "evaluator_error"}
"""Commands of the task's own, killed; they are not tried again."""

AGENT = (Path(__file__).parents[1] / "support" / "chaos" / "agent.py").read_text()
NUM_CALLS = 2
SCRIPT = {
    "rules": [{"turn": turn, "text": f"answer {turn}", "delay_s": 0.1} for turn in range(NUM_CALLS)],
    "default": {"text": "nobody asks for so much"},
}


def task(name: str, fate: Fate, mark: str) -> dict[str, Any]:
    agent = f"(setsid sleep 100000 &); sleep {fate.run_s:.2f}; exec python3 -S agent.py {NUM_CALLS}"
    return {
        "task_id": name,
        "instruction": "go on",
        "num_samples": 1,
        "max_attempts": 20,
        "runtime": {
            "prepare": [
                {"type": "write", "path": "agent.py", "content": AGENT},
                {"type": "exec", "command": f"(setsid sleep 100000 &); sleep {fate.prepare_s:.2f}"},
            ],
            "limits": {"memory_bytes": 1 << 30, "max_pids": 100, "cpus": 1.0},
        },
        "agent": {"harness": "shell", "settings": {"command": ["sh", "-c", agent]}, "env": {"CHAOS": mark}},
        "evaluator": {
            "strategy": "script",
            "config": {"command": f"sleep {fate.grade_s:.2f}; echo 1 > reward.txt"},
            "refresh_runtime": fate.in_clean_sandbox,
        },
    }


class Leaks:
    """One run: a service, and what befalls its sessions."""

    def __init__(self, service: ChaosService, client: ServerClient, mark: str) -> None:
        """mark: in the environment of every harness."""
        self.service = service
        self.client = client
        self.mark = mark
        self.num_blows: Counter[str] = Counter()
        """By the stage of a session that was cancelled, or the name of a program that was killed."""
        self._last_event = 0

    @property
    def node(self) -> int:
        return self.service.programs[NODE].pid

    @property
    def keeper(self) -> int:
        """It lives from the first sandbox on."""
        started = children(self.node)
        (keeper,) = [pid for pid in processes_with("gangline.sandbox.keeper.keeper") if pid in started]
        return keeper

    def _forkservers(self) -> set[int]:
        """The one process that the keeper has whether there are sandboxes or not; its forks show the same program."""
        return set(children(self.keeper)) & set(processes_with("helpers.forkserver"))

    async def run(self, name: str, chosen: Sequence[Fate]) -> None:
        """Until all sessions with these fates have ended."""
        tasks = [task(f"{name}-{number}", fate, self.mark) for number, fate in enumerate(chosen)]
        trainer = Trainer(self.client, tasks, ahead=AHEAD, after=self._last_event)
        async with asyncio.TaskGroup() as forever:
            following = forever.create_task(trainer.follow())
            async with asyncio.timeout(GIVE_UP_S), asyncio.TaskGroup() as group:
                group.create_task(trainer.submit())
                for number, fate in enumerate(chosen):
                    group.create_task(self._befall(trainer, number, f"{name}-{number}", fate))
                group.create_task(trainer.all_ended())
            following.cancel()
        self._last_event = trainer.events[-1].seq
        self.service.look()

    async def _befall(self, trainer: Trainer, number: int, task_id: str, fate: Fate) -> None:
        await trainer.submitted(number + 1)
        if fate.is_leased:
            await trainer.leased(task_id)
        await asyncio.sleep(fate.blow_s)
        self.service.look()
        if fate.blow == "cancel":
            (session,) = (await self.client.task(task_id)).sessions
            await self.client.cancel(task_id)
            self.num_blows[f"cancelled in {session.stage or session.state}"] += 1
        elif fate.blow == "kill":
            while not await asyncio.to_thread(self._kill_one, fate.pick) and not trainer.is_over:
                await asyncio.sleep(0.05)

    def _kill_one(self, pick: float) -> bool:
        """One process of the keeper's. False where there is none just now."""
        running = descendants(self.keeper)
        if not running:
            return False
        pid = running[int(pick * len(running))]
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        self.num_blows[f"killed {name}"] += 1
        return True

    def footprints(self) -> dict[str, Footprint]:
        return {"node": Footprint.of(self.node), "keeper": Footprint.of(self.keeper)}

    def left(self) -> dict[str, list[str]]:
        """Sandboxes, and results that are still to be delivered, while the service lives."""
        there = {
            "processes": [described(pid) for pid in descendants(self.keeper) if pid not in self._forkservers()],
            "undelivered": self.service.undelivered(),
            **self.service.sandboxes(),
        }
        return {kind: found for kind, found in there.items() if found}


async def until(condition: Callable[[], object], seen: Callable[[], object]) -> None:
    """Look again and again; `seen` is told where it never comes."""
    deadline = time.monotonic() + SETTLE_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, seen()
        await asyncio.sleep(0.1)


async def usual(leaks: Leaks) -> dict[str, Footprint]:
    """What node and keeper have when nothing runs; of each kind of descriptor the fewest: connections come and go."""
    await until(lambda: not leaks.left(), leaks.left)
    found = leaks.footprints()
    watched_until = time.monotonic() + KEPT_ALIVE_S
    while time.monotonic() < watched_until:
        await asyncio.sleep(0.2)
        for name, now in leaks.footprints().items():
            found[name] = Footprint(found[name].descriptors & now.descriptors, now.memory_bytes)
    return found


async def back_to(before: dict[str, Footprint], leaks: Leaks) -> None:
    """Nothing runs, and node and keeper have no more than before."""

    def over() -> dict[str, Footprint]:
        now = leaks.footprints()
        return {
            name: now[name]
            for name, was in before.items()
            if not now[name].descriptors <= was.descriptors + MAY_COME
            or now[name].memory_bytes > was.memory_bytes + MEMORY_ALLOWANCE_BYTES
        }

    await until(lambda: not leaks.left(), leaks.left)
    await until(lambda: not over(), lambda: f"{over()}; before: {before}")


def test_a_seed_is_a_fate_for_each_session() -> None:
    chosen = fates(SEED, 60)
    assert fates(SEED, 60) == chosen != fates(SEED + 1, 60)
    assert {fate.blow for fate in chosen} == {"none", "cancel", "kill"}


@pytest.mark.timeout(7200)
async def test_sessions_that_are_cancelled_and_killed_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    chosen, mark = fates(SEED, NUM_SESSIONS), uuid.uuid4().hex
    print(f"\nGANGLINE_LEAK_SEED={SEED} GANGLINE_LEAK_SESSIONS={NUM_SESSIONS}", flush=True)
    service = ChaosService(tmp_path, SCRIPT, nodes=(NODE,), sizes=SIZES)
    async with service.running(), ServerClient(service.server.url, TOKEN) as client:
        leaks = Leaks(service, client, mark)
        await leaks.run("warm", [fate._replace(blow="none") for fate in fates(SEED + 1, NUM_WARM)])
        before = await usual(leaks)
        print(before, flush=True)
        began_at = time.monotonic()
        await leaks.run("leak", chosen)
        print(f"{time.monotonic() - began_at:.0f} s; {dict(sorted(leaks.num_blows.items()))}", flush=True)
        await check_ends(client, chosen)
        await back_to(before, leaks)
        print(leaks.footprints(), flush=True)
        assert await service.stop() == [0] * len(service.programs)
        left = await service.leftovers(mark)
        assert {kind: found for kind, found in left.items() if found} == {}


async def check_ends(client: ServerClient, chosen: Sequence[Fate]) -> None:
    """Every session has ended, cancelled only if it was, and through nobody's fault but a killed process's."""
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for number, fate in enumerate(chosen):
        (session,) = (await client.task(f"leak-{number}")).sessions
        assert session.state == "ended"
        assert session.outcome is not None
        assert session.outcome != "cancelled" or fate.blow == "cancel"
        outcomes[session.outcome] += 1
        if session.failure is not None and session.outcome == "infra_error":
            failures[session.failure.code] += 1
    print(f"outcomes {dict(outcomes)}, failures {dict(failures)}", flush=True)
    assert outcomes.keys() <= {"completed", "cancelled", "agent_error", "infra_error"}
    assert failures.keys() <= ENDS_A_SESSION
