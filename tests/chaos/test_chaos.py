"""A service that is broken again and again, and loses nothing: `make chaos` runs a thousand sessions through it.

Engine, server and two nodes are processes over PostgreSQL; a seed says when which of them, or a harness in its sandbox,
dies by `kill -9`, and when the trainer's receiver of callbacks misbehaves. GANGLINE_CHAOS_SEED repeats a schedule,
GANGLINE_CHAOS_SESSIONS makes it longer.

At the end, exactly: every session has ended once, through nobody's fault but a killed harness's; its result is there,
with the calls of its script and rows that the audit accepts; events as they were heard, events as they are told again,
answers to who asks, and callbacks tell the same; and once the service has stopped, nothing is left of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.conversation import message_text
from gangline.domain.session import SessionResult
from gangline.domain.views import Event
from gangline.rows.audit import audit
from gangline.wire.client.server import ServerClient
from support.chaos.faults import NODES, PROGRAMS, Fault, num_kills, schedule
from support.chaos.service import TOKEN, ChaosService, harnesses, kill_harness
from support.chaos.trainer import Receiver, Trainer, persistently
from support.requirements import need_command
from support.store.postgres import Cluster

NUM_SESSIONS = int(os.environ.get("GANGLINE_CHAOS_SESSIONS", "60"))
SEED = int(os.environ.get("GANGLINE_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
NUM_SAMPLES, NUM_CALLS = 4, 3
AHEAD = 48
GIVE_UP_S = 150 + 3 * NUM_SESSIONS
TELL_EVERY_S = 10.0

AGENT = (Path(__file__).parents[1] / "support" / "chaos" / "agent.py").read_text()
SCRIPT = {
    "rules": [
        {"turn": turn, "text": f"answer {turn}", "delay_s": 0.1, "token_delay_s": 0.005, "split": "chars"}
        for turn in range(NUM_CALLS)
    ],
    "default": {"text": "nobody asks for so much"},
}


def task(number: int, *, mark: str, callback_url: str, max_attempts: int) -> dict[str, Any]:
    return {
        "task_id": f"chaos-{number}",
        "instruction": "go on",
        "num_samples": NUM_SAMPLES,
        "max_attempts": max_attempts,
        "timeout_seconds": 600,
        "runtime": {"prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
        "agent": {
            "harness": "shell",
            "settings": {"command": ["python3", "-S", "agent.py", str(NUM_CALLS)]},
            "env": {"CHAOS": mark},
        },
        "callback_url": callback_url,
        "metadata": {"number": number},
    }


class Chaos:
    """One run: the service, its trainer, and the faults that strike them."""

    def __init__(
        self, service: ChaosService, receiver: Receiver, trainer: Trainer, faults: Sequence[Fault], mark: str
    ) -> None:
        """mark: in the environment of every harness."""
        self.service = service
        self.receiver = receiver
        self.trainer = trainer
        self.faults = faults
        self.mark = mark
        self.killed: set[str] = set()
        """Sessions of which a harness was killed."""

    async def run(self) -> None:
        """Until every task has ended, and every fault is mended."""
        async with asyncio.TaskGroup() as forever:
            following = forever.create_task(self.trainer.follow())
            telling = forever.create_task(self._tell())
            watching = forever.create_task(self._watch())
            async with asyncio.TaskGroup() as group:
                group.create_task(self.trainer.submit())
                group.create_task(self.trainer.all_ended())
                for fault in self.faults:
                    group.create_task(self._strike(fault))
            following.cancel()
            telling.cancel()
            watching.cancel()

    async def _strike(self, fault: Fault) -> None:
        await self.trainer.ended(fault.num_ended)
        await asyncio.sleep(fault.pause_s)
        self.service.look()
        if fault.target == "receiver":
            await self.receiver.misbehave(fault.manner, self.trainer.one_more_task_ended(fault.lasts_s))
        elif fault.target == "harness":
            await self._kill_a_harness(fault.pick)
        else:
            await self.service.programs[fault.target].suffer(fault)

    async def _kill_a_harness(self, pick: float) -> None:
        while True:
            running = await asyncio.to_thread(harnesses, self.mark)
            if running:
                harness = running[int(pick * len(running))]
                if kill_harness(harness):
                    self.killed.add(harness.session_id)
                    return
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        """Nothing dies but by a fault."""
        while True:
            for program in self.service.programs.values():
                program.assert_lives()
            await asyncio.sleep(1.0)

    async def _tell(self) -> None:
        began_at = time.monotonic()
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            programs = self.service.programs.values()
            kills = ", ".join(f"{program.name} {program.num_kills}" for program in programs)
            print(
                f"{time.monotonic() - began_at:.0f} s: {self.trainer.num_ended} of {NUM_SESSIONS} sessions ended; "
                f"killed: {kills}, harnesses {len(self.killed)}",
                flush=True,
            )


def test_a_seed_is_a_schedule_with_faults_of_every_kind() -> None:
    faults = schedule(SEED, 60)
    assert schedule(SEED, 60) == faults != schedule(SEED + 1, 60)
    assert {fault.target for fault in faults} == {*PROGRAMS, "harness", "receiver"}
    assert {fault.manner for fault in faults if fault.target == "receiver"} == {"down", "refuses", "forgets"}


@pytest.mark.timeout(7200)
async def test_whatever_is_killed_every_session_ends_once_and_nothing_is_lost_doubled_or_left(
    postgres: Cluster, tmp_path: Path
) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    faults, mark = schedule(SEED, NUM_SESSIONS), uuid.uuid4().hex
    kills = num_kills(faults)
    print(f"\nGANGLINE_CHAOS_SEED={SEED} GANGLINE_CHAOS_SESSIONS={NUM_SESSIONS}: {dict(kills)}", flush=True)
    service = ChaosService(tmp_path, SCRIPT, database_url=postgres.new_database())
    async with Receiver().listening() as receiver, service.running():
        # An attempt is lost with its node, and with nothing else.
        max_attempts = min(100, 1 + sum(kills[name] for name in NODES))
        tasks = [
            task(number, mark=mark, callback_url=receiver.url, max_attempts=max_attempts)
            for number in range(NUM_SESSIONS // NUM_SAMPLES)
        ]
        async with ServerClient(service.server.url, TOKEN) as client:
            trainer = Trainer(client, tasks, ahead=AHEAD)
            chaos = Chaos(service, receiver, trainer, faults, mark)
            began_at = time.monotonic()
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    await chaos.run()
                    await called_back(client, len(tasks))
            except TimeoutError:
                pytest.fail(f"no end after {GIVE_UP_S} s: {await standing(client)}")
            print(f"{time.monotonic() - began_at:.0f} s for {NUM_SESSIONS} sessions", flush=True)
            await check_everything(client, chaos, len(tasks))
        assert {name: service.programs[name].num_kills for name in PROGRAMS} == {name: kills[name] for name in PROGRAMS}
        assert await service.stop() == [0] * len(service.programs)
        assert len(service.owners) == len(NODES)
        left = await service.leftovers(mark)
        assert {kind: found for kind, found in left.items() if found} == {}


async def called_back(client: ServerClient, num_tasks: int) -> None:
    """When every callback has been acknowledged."""
    while (await persistently(client.status)).callbacks != {"delivered": num_tasks}:
        await asyncio.sleep(0.2)


async def standing(client: ServerClient) -> str:
    """What has not ended, for people."""
    status = await persistently(client.status)
    page = await persistently(lambda: client.sessions(limit=1000))
    left = [f"{s.session_id} {s.state} {s.stage} {s.attempt} {s.node_id}" for s in page.sessions if s.state != "ended"]
    return f"{status.sessions}, callbacks {status.callbacks}: {'; '.join(left)}"


async def check_everything(client: ServerClient, chaos: Chaos, num_tasks: int) -> None:
    """What the server, the results, the events and the callbacks tell, against each other and against the script."""
    views = [await client.task(f"chaos-{number}") for number in range(num_tasks)]
    sessions = {session.session_id: session for view in views for session in view.sessions}
    assert {view.status for view in views} == {"ended"}
    assert len(sessions) == num_tasks * NUM_SAMPLES

    ends = Counter(event.session_id for event in chaos.trainer.events if event.kind == "session.ended")
    assert ends == dict.fromkeys(sessions, 1)
    replay = [event async for event in told_again(client, num_tasks)]
    heard = [event for event in chaos.trainer.events if not event.kind.startswith("callback.")]
    assert replay == heard
    by_polling = {
        view.task_id: (view.status, view.rewards, tuple(session.outcome for session in view.sessions)) for view in views
    }
    assert by_polling == by_events(replay)
    assert by_polling == by_callback(chaos.receiver)

    for view in views:
        results = await client.result(view.task_id)
        assert [result.session_id for result in results] == [session.session_id for session in view.sessions]
        for result, session in zip(results, view.sessions, strict=True):
            assert session.result_attempt == session.attempt == result.attempt
            assert (session.outcome, session.reward) == (result.outcome, result.reward)
            check_result(result)
    outcomes = Counter(session.outcome for session in sessions.values())
    unlucky = {name for name, session in sessions.items() if session.outcome != "completed"}
    assert unlucky <= chaos.killed, [sessions[name] for name in unlucky - chaos.killed]
    assert outcomes.keys() <= {"completed", "agent_error"}, outcomes
    attempts = Counter(session.attempt for session in sessions.values())
    doubled = sum(len(bodies) - 1 for bodies in chaos.receiver.taken.values())
    print(
        f"outcomes {dict(outcomes)}; attempts {dict(sorted(attempts.items()))}; {doubled} callbacks came again, "
        f"{chaos.receiver.num_turned_away} were turned away",
        flush=True,
    )


async def told_again(client: ServerClient, num_tasks: int) -> AsyncIterator[Event]:
    """All events from the beginning to the end of the last task, but those about callbacks."""
    async for event in client.events(after=0):
        if not event.kind.startswith("callback."):
            yield event
        num_tasks -= event.kind == "task.ended"
        if num_tasks == 0:
            return


Told = tuple[str, tuple[float | None, ...], tuple[str | None, ...]]
"""Status, rewards and outcomes of a task."""


def by_events(events: Sequence[Event]) -> dict[str, Told]:
    rewards: dict[str, list[float | None]] = {}
    outcomes: dict[str, list[str | None]] = {}
    told: dict[str, Told] = {}
    for event in events:
        assert event.task_id is not None or event.kind == "node.joined"
        name = event.task_id or ""
        if event.kind == "session.ended":
            index = int((event.session_id or "").rpartition(".")[2])
            rewards.setdefault(name, [None] * NUM_SAMPLES)[index] = event.data["reward"]
            outcomes.setdefault(name, [None] * NUM_SAMPLES)[index] = event.data["outcome"]
        elif event.kind == "task.ended":
            told[name] = (event.data["status"], tuple(rewards[name]), tuple(outcomes[name]))
    return told


def by_callback(receiver: Receiver) -> dict[str, Told]:
    told: dict[str, Told] = {}
    for key, bodies in receiver.taken.items():
        (body,) = {*bodies}  # however often it came, it says the same
        message = json.loads(body)
        assert message["metadata"] == {"number": int(message["task_id"].removeprefix("chaos-"))}
        assert key == f"{message['task_id']}:ended"
        told[message["task_id"]] = (message["status"], tuple(message["rewards"]), tuple(message["outcomes"]))
    return told


def check_result(result: SessionResult) -> None:
    """Rows that the audit accepts; of a completed session, the calls of the script in one unbroken row, once each."""
    trajectory = result.trajectory
    assert trajectory is not None, result
    report = audit(trajectory, result.completions)
    assert report.ok, report.violations
    calls = [completion for completion in result.completions if completion.status == "complete"]
    said = [message_text(call.new_messages[-1]).split()[:2] for call in calls]
    assert said == [["turn", str(turn)] for turn in range(len(calls))], result.session_id
    assert [message_text(call.response) for call in calls] == [f"answer {turn}" for turn in range(len(calls))]
    for before, call in pairwise(calls):
        assert call.parent_id == before.completion_id
        assert (call.certificate.prompt_source, call.certificate.context) == ("stitched", "exact"), call.certificate
    if result.outcome == "completed":
        assert len(calls) == NUM_CALLS
        names = [call.completion_id for call in calls]
        assert [trace for trace in trajectory.traces if [span.completion_id for span in trace.spans] == names]
