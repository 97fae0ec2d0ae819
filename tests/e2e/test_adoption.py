"""A node that is killed continues with its sessions in its next life: same attempt, same token stream, nothing twice.

Real processes: engine, server and node are commands, the agents run in sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.session import SessionResult
from gangline.domain.views import TaskView
from gangline.node.identity import owner_of
from gangline.node.node import _folder_of  # pyright: ignore[reportPrivateUsage]
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient
from support.requirements import need_command
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, processes_with, wait_for

TOKEN = "control-token"
NUM_TURNS = 6

# An agent of the standard library alone, which retries as the official SDKs do. It tells how far it is in `turns`, and
# continues from the turn that it is told to hold at when it is told to.
AGENT = textwrap.dedent("""
    import json, os, pathlib, sys, time, urllib.request
    num_turns, hold_at = int(sys.argv[1]), int(sys.argv[2])

    def ask(body, number):
        headers = {"Content-Type": "application/json", "Idempotency-Key": f"call-{number}",
                   "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        for wait_s in (0.2, 0.5, 1, 2, None):
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return json.load(reply)["choices"][0]["message"]["content"]
            except OSError:
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    messages = []
    for turn in range(num_turns):
        if turn == hold_at:
            while not os.path.exists("go"):
                time.sleep(0.02)
        messages.append({"role": "user", "content": f"turn {turn}"})
        body = json.dumps({"model": os.environ["GANGLINE_MODEL"], "messages": messages, "max_tokens": 16}).encode()
        messages.append({"role": "assistant", "content": ask(body, turn)})
        pathlib.Path("turns").write_text(str(turn + 1))
    print("done", flush=True)
    pathlib.Path("ended").touch()
""")

HOLD = "touch began; until [ -e go ]; do sleep 0.05; done"
SCRIPT = {
    "rules": [
        {"turn": 0, "pattern": "^wait until you are told$", "tool_calls": [{"run": HOLD}]},
        {"text": "as you wish", "delay_s": 0.3},
    ]
}


class Process:
    """A `gangline` command that serves."""

    def __init__(self, kind: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, kind, *map(str, arguments), "--json"],
            stdout=subprocess.PIPE,
            env=clean_environment(GANGLINE_TOKEN=TOKEN),
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.url = json.loads(line)[f"{kind}_url"] if line else ""
        assert self.url, f"the {kind} did not start"

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)
        self._process.wait(timeout=GIVE_UP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Around:
    """Engine and server, which outlive all nodes of these tests."""

    def __init__(self, folder: Path) -> None:
        script = folder / "script.json"
        script.write_text(json.dumps(SCRIPT))
        self.engine = Process("engine", "--scripted", script, "--tokenizer", "tiny", "--port", "0")
        self.server = Process("server", "--data", folder, "--port", "0")


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Generator[Around]:
    need_command("bwrap", "apt-get install bubblewrap")
    around = Around(tmp_path_factory.mktemp("around"))
    yield around
    around.server.end()
    around.engine.end()


class Service:
    """A node, one life after another."""

    def __init__(self, around: Around, data: Path) -> None:
        self.data = data
        self.node_id = f"n-{secrets.token_hex(4)}"
        """Of its own: the server keeps an id for a node's folder while it may come back."""
        self.folder = data / "nodes" / self.node_id
        self.server = around.server
        self._engine = around.engine
        self.node: Process | None = None

    def start_node(self, *options: object) -> None:
        given = ("--data", self.data, "--id", self.node_id, "--server", self.server.url, "--engine", self._engine.url)
        self.node = Process("node", *given, *options)

    def kill_node(self) -> None:
        self.end_node(signal.SIGKILL)

    def end_node(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.node is not None
        node, self.node = self.node, None
        node.end(number)

    def work(self, session_id: str, attempt: int = 1, role: str = "agent") -> Path:
        """The working folder of the agent, or of the grader, as the host sees it."""
        return self.folder / "runtimes" / f"{session_id}.{attempt}.{role}" / "work"

    def turns(self, session_id: str, attempt: int = 1) -> int:
        try:
            return int(self.work(session_id, attempt).joinpath("turns").read_text() or 0)
        except FileNotFoundError:
            return 0

    async def hold_a_call(self, go: Path) -> None:
        """Let the agent call, and keep it waiting at the gate."""
        assert self.node is not None
        async with NodeClient(self.node.url, TOKEN) as node:
            await node.pause()
            go.touch()
            while (await node.gate()).num_waiting == 0:
                await asyncio.sleep(0.02)

    def keeper_pids(self) -> list[int]:
        keepers = processes_with(str(self.folder / "keeper"))
        return [pid for pid, line in keepers.items() if "keeper.keeper" in line]

    def assert_nothing_left(self) -> None:
        assert self.what_is_left() == []

    def what_is_left(self) -> list[str]:
        """Processes, mounts, folders, sockets and control groups of the node."""
        owner = owner_of(_folder_of(self.data, self.node_id))
        left = [*processes_with(str(self.folder)).values(), *processes_with(f"GANGLINE_RUNTIME={owner}/").values()]
        left += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.folder) in line]
        left += os.listdir(self.folder / "runtimes")
        # `os.walk` passes over folders that go meanwhile; `rglob` fails on them.
        left += [f"{folder}/socket" for folder, _names, files in os.walk(self.folder) if "socket" in files]
        for folder, names, _files in os.walk("/sys/fs/cgroup"):
            left += [f"{folder}/{name}" for name in names if f"@{owner}@" in name]
        return left


@pytest.fixture
def service(around: Around, tmp_path: Path) -> Generator[Service]:
    service = Service(around, tmp_path)
    yield service
    if service.node is not None:
        service.end_node()


def task(task_id: str, *, hold_at: int = -1, **changes: Any) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "instruction": "go on",
        "max_attempts": 3,
        "timeout_seconds": 60,
        "runtime": {"backend": "sandbox", "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
        "agent": {
            "harness": "shell",
            "settings": {"command": [sys.executable, "agent.py", str(NUM_TURNS), str(hold_at)]},
        },
        **changes,
    }


async def submitted(client: ServerClient, body: dict[str, Any]) -> str:
    """Id of the task's one session."""
    view = await client.submit(body)
    return (await client.task(view.task_id)).sessions[0].session_id


async def ended(client: ServerClient, task_id: str) -> tuple[TaskView, SessionResult]:
    view = await client.wait(task_id, timeout_s=GIVE_UP_S)
    return view, await client.session_result(view.sessions[0].session_id)


async def until(condition: Any) -> None:
    await asyncio.to_thread(wait_for, condition)


def stream(result: SessionResult) -> tuple[list[int], list[int]]:
    """The one trace of a session: its tokens, and the mask of the sampled ones."""
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    return [*trace.prompt_ids, *trace.response_ids], list(trace.loss_mask)


def assert_one_exact_chain(result: SessionResult) -> None:
    assert [completion.status for completion in result.completions] == ["complete"] * NUM_TURNS, "lost, or doubled"
    assert [completion.certificate.context for completion in result.completions] == ["first"] + ["exact"] * (
        NUM_TURNS - 1
    )
    parents = [completion.parent_id for completion in result.completions]
    assert parents == [None, *(completion.completion_id for completion in result.completions[:-1])]


async def test_a_killed_node_goes_on_with_the_same_attempt_and_the_same_tokens(service: Service) -> None:
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        await submitted(client, task("calm"))
        _, calm = await ended(client, "calm")
        session_id = await submitted(client, task("crash"))
        for turn in (1, 3):
            await until(lambda turn=turn: service.turns(session_id) > turn)
            service.kill_node()
            service.start_node()
        view, result = await ended(client, "crash")
        node = service.node
        assert node is not None
    session = view.sessions[0]
    assert (session.outcome, session.attempt, result.attempt) == ("completed", 1, 1)
    assert result.artifacts["harness.stdout"] == b"done\n"
    assert_one_exact_chain(result)
    assert stream(result) == stream(calm)
    assert [timing.stage for timing in result.timings] == ["init", "ready", "run", "postrun"]
    service.end_node()
    service.assert_nothing_left()


async def test_a_harness_that_ended_while_the_node_was_away_is_graded(service: Service) -> None:
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task("away", hold_at=NUM_TURNS - 1))
        await until(lambda: service.turns(session_id) == NUM_TURNS - 1)
        service.kill_node()
        await asyncio.to_thread(service.work(session_id).joinpath("go").touch)
        service.start_node()
        view, result = await ended(client, "away")
    assert (view.sessions[0].outcome, view.sessions[0].attempt) == ("completed", 1)
    assert_one_exact_chain(result)


async def test_an_agent_that_does_not_try_again_is_not_blamed_for_the_crash(service: Service) -> None:
    """The call in flight is lost; a client that gives up then has not failed by itself."""
    one_try = AGENT.replace("(0.2, 0.5, 1, 2, None)", "(None,)")
    body = task("blame", hold_at=2)
    body["runtime"]["prepare"][0]["content"] = one_try
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, body)
        await until(lambda: service.turns(session_id) == 2)
        await service.hold_a_call(service.work(session_id) / "go")
        service.kill_node()
        service.start_node()
        await until(lambda: service.turns(session_id, attempt=2) == 2)
        (service.work(session_id, attempt=2) / "go").touch()
        view, result = await ended(client, "blame")
        first = await client.session_result(session_id, attempt=1)
    assert (view.sessions[0].outcome, view.sessions[0].attempt) == ("completed", 2)
    assert_one_exact_chain(result)
    assert first.failure is not None
    assert (first.outcome, first.failure.code, len(first.completions)) == ("infra_error", "node_restarted", 2)


@pytest.mark.parametrize(("is_clean", "num_attempts"), [(True, 1), (False, 2)], ids=["clean", "agents_own"])
async def test_grading_is_done_again_in_a_clean_runtime_only(
    service: Service, is_clean: bool, num_attempts: int
) -> None:
    """In the agent's own sandbox a second grading could see what the first one left: there the session runs again."""
    command = "touch begun; until [ -e graded ]; do sleep 0.05; done; echo 1 > reward.txt"
    evaluator = {"strategy": "script", "config": {"command": command}, "refresh_runtime": is_clean}
    name, role = f"graded-{num_attempts}", "grader" if is_clean else "agent"
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task(name, evaluator=evaluator))
        await until((service.work(session_id, role=role) / "begun").exists)
        service.kill_node()
        await until(lambda: not service.work(session_id, role=role).exists())
        service.start_node()
        again = service.work(session_id, num_attempts, role)
        await until((again / "begun").exists)
        (again / "graded").touch()
        view, result = await ended(client, name)
    session = view.sessions[0]
    assert (session.outcome, session.attempt, session.reward) == ("completed", num_attempts, 1.0)
    assert result.artifacts["harness.stdout"] == b"done\n"
    assert [timing.stage for timing in result.timings] == ["init", "ready", "run", "postrun"]
    assert_one_exact_chain(result)


async def test_an_agent_in_the_node_dies_with_it_and_its_session_goes_round_again(service: Service) -> None:
    body = task("in-node", instruction="wait until you are told", agent={"harness": "native"})
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, body)
        await until((service.work(session_id) / "began").exists)
        service.kill_node()
        await until(lambda: not service.work(session_id).exists())
        service.start_node()
        await until((service.work(session_id, attempt=2) / "began").exists)
        (service.work(session_id, attempt=2) / "go").touch()
        view, result = await ended(client, "in-node")
        first = await client.session_result(session_id, attempt=1)
    assert (view.sessions[0].outcome, view.sessions[0].attempt) == ("completed", 2)
    assert [completion.certificate.context for completion in result.completions] == ["first", "exact"]
    assert first.failure is not None
    assert (first.outcome, first.failure.code, len(first.completions)) == ("infra_error", "node_restarted", 1)


async def test_what_waits_for_a_node_that_never_comes_back_is_removed_after_the_grace(service: Service) -> None:
    service.start_node("--adopt-grace", "1")
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task("orphan", hold_at=2))
        await until(lambda: service.turns(session_id) == 2)
        assert service.keeper_pids()
        service.kill_node()
        await until(lambda: not service.what_is_left())
        await client.cancel_session(session_id)


async def test_without_a_grace_nothing_outlives_the_node(service: Service) -> None:
    service.start_node("--adopt-grace", "0")
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task("no-grace", hold_at=2))
        await until(lambda: service.turns(session_id) == 2)
        assert service.keeper_pids() == []
        service.kill_node()
        await until(lambda: not processes_with(str(service.folder)))
        service.start_node("--adopt-grace", "0")
        await until(lambda: service.turns(session_id, attempt=2) == 2)
        service.work(session_id, attempt=2).joinpath("go").touch()
        view, _ = await ended(client, "no-grace")
    assert (view.sessions[0].outcome, view.sessions[0].attempt) == ("completed", 2)


async def test_a_killed_keeper_takes_its_sandboxes_along_and_their_sessions_are_tried_again(service: Service) -> None:
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task("keeper"))
        await until(lambda: service.turns(session_id) > 1)
        for pid in service.keeper_pids():
            os.kill(pid, signal.SIGKILL)
        view, result = await ended(client, "keeper")
        first = await client.session_result(session_id, attempt=1)
    assert (view.sessions[0].outcome, view.sessions[0].attempt) == ("completed", 2)
    assert_one_exact_chain(result)
    assert first.failure is not None
    assert (first.failure.boundary, first.failure.code) == ("runtime", "runtime_failed")
    service.end_node()
    service.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_node_that_is_told_to_end_leaves_nothing(service: Service, number: signal.Signals) -> None:
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task(f"stopped-{number.name.lower()}", hold_at=2))
        await until(lambda: service.turns(session_id) == 2)
        service.end_node(number)
        service.assert_nothing_left()
        view = await client.task(f"stopped-{number.name.lower()}")
        await client.cancel_session(session_id)
    assert (view.sessions[0].state, view.sessions[0].attempt) == ("queued", 2), "its agent had started"


async def test_a_session_that_was_cancelled_meanwhile_is_dropped(service: Service) -> None:
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task("dropped", hold_at=2))
        await until(lambda: service.turns(session_id) == 2)
        service.kill_node()
        await client.cancel_session(session_id)
        service.start_node()
        await until(lambda: not os.listdir(service.folder / "runtimes"))
        view = await client.task("dropped")
    assert view.sessions[0].outcome == "cancelled"


async def test_the_budget_goes_on_without_the_time_that_the_node_was_away(service: Service) -> None:
    service.start_node()
    async with ServerClient(service.server.url, TOKEN) as client:
        session_id = await submitted(client, task("budget", hold_at=2, timeout_seconds=6))
        await until(lambda: service.turns(session_id) == 2)
        service.kill_node()
        service.start_node()
        view, result = await ended(client, "budget")
    assert (view.sessions[0].outcome, view.sessions[0].attempt) == ("agent_timeout", 1)
    assert len(result.completions) == 2
    assert result.harness_exit is not None
    assert result.harness_exit.timed_out
