"""What an operator relies on, on real processes: a full READY, a breaker, hooks, a drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import GanglineError, NodeDraining
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient
from support.service.cli_process import UpProcess, gangline, processes_with, wait_for, wait_until_gone

Start = Callable[..., UpProcess]


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start]:
    services: list[UpProcess] = []

    def begin(*options: object, script: dict[str, Any] | None = None) -> UpProcess:
        services.append(UpProcess(tmp_path / f"service-{len(services)}", *options, script=script))
        assert services[-1].ready()
        return services[-1]

    try:
        yield begin
    finally:
        for service in services:
            service.close()


@asynccontextmanager
async def clients(up: UpProcess) -> AsyncGenerator[tuple[ServerClient, NodeClient]]:
    running = up.running()
    token = running["control_token"]
    async with ServerClient(running["server_url"], token) as server, NodeClient(running["node_urls"][0], token) as node:
        yield server, node


def task(command: str, **changes: Any) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    return {"instruction": "do it", "runtime": {"backend": "process"}, "agent": agent, **changes}


def log_of(up: UpProcess, action: str) -> list[str]:
    lines = (up.data / "logs" / "node.log").read_text().splitlines()
    return [line for line in lines if f" {action} " in line]


async def stages_become(node: NodeClient, **wanted: int) -> None:
    while (await node.status()).stages != wanted:
        await asyncio.sleep(0.05)


async def test_a_full_ready_stops_init_and_leaves_the_rest_to_others(start: Start, tmp_path: Path) -> None:
    up = start("--run-slots", 1, "--ready-slots", 1, "--init-workers", 3)
    go = tmp_path / "go"
    async with clients(up) as (server, node):
        submitted = await server.submit(task(f"until test -e {go}; do sleep 0.05; done", num_samples=5))
        await stages_become(node, init=0, ready=1, run=1, postrun=0)
        view = await server.task(submitted.task_id)
        assert view.states == {"leased": 2, "queued": 3}, "what cannot be begun here is not taken"
        go.touch()
        assert (await server.wait(submitted.task_id, timeout_s=60)).outcomes == {"completed": 5}
        inits = [line.split("session=")[1] for line in log_of(up, "session.init")]
        assert len(inits) == 5


CALL = """
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""


async def test_a_node_whose_engine_fails_every_session_rests_and_comes_back_when_one_goes_well(start: Start) -> None:
    # A call is tried again by the node before it fails; the engine is down for a while, not for so many sessions.
    script = {"rules": [{"pattern": "hello", "faults": {"status": 500, "times": 6}}], "default": {"text": "hi"}}
    options = ("--breaker-faults", 2, "--breaker-pause", 0.2, "--run-slots", 1, "--ready-slots", 0)
    up = start(*options, script=script)
    prepare = [{"type": "write", "path": "call.py", "content": CALL}]
    calling = task("python3 call.py", num_samples=3, max_attempts=50)
    calling["runtime"]["prepare"] = prepare
    async with clients(up) as (server, node):
        submitted = await server.submit(calling)
        view = await server.wait(submitted.task_id, timeout_s=90)
        assert view.outcomes == {"completed": 3}
        assert (await node.status()).breaker.state == "closed"
    opened = log_of(up, "breaker.opened")
    assert len(opened) >= 2
    assert "boundary=engine" in opened[0]
    assert "faults=2 pause_s=0.2 " in opened[0]
    assert " pause_s=0.4 " in opened[1]
    assert len(log_of(up, "breaker.closed")) == 1


async def test_a_resting_node_is_shown_with_what_fails(start: Start) -> None:
    script = {"rules": [{"pattern": "hello", "faults": {"status": 500, "times": None}}], "default": {"text": "hi"}}
    up = start("--breaker-faults", 1, "--breaker-pause", 300, script=script)
    calling = task("python3 call.py", max_attempts=100)
    calling["runtime"]["prepare"] = [{"type": "write", "path": "call.py", "content": CALL}]
    async with clients(up) as (server, node):
        await server.submit(calling)
        while not (await server.status()).nodes[0].metrics.get("breaker_open_engine"):
            await asyncio.sleep(0.05)
        breaker = (await node.status()).breaker
        assert (breaker.state, breaker.boundary, breaker.num_faults) == ("open", "engine", 1)
        assert 0 < (breaker.tries_in_s or 0) <= 300
    shown = gangline("status", "--data", up.data)
    assert "resting: engine fails" in shown.stdout


async def test_hooks_hear_of_each_result_and_change_none(start: Start, tmp_path: Path) -> None:
    heard, mark = tmp_path / "heard", f"slow-{os.getpid()}"
    hooks = (
        f"cat > {heard}.$GANGLINE_SESSION_ID; env | grep ^GANGLINE_ >> {heard}.env",
        "echo it is broken >&2; exit 3",
        f"sleep 600; : {mark}",
    )
    options = [text for hook in hooks for text in ("--hook", hook)]
    up = start(*options, "--hook-timeout", 0.5)
    async with clients(up) as (server, _node):
        submitted = await server.submit(task("echo done", task_id="told"))
        await server.wait(submitted.task_id, timeout_s=60)
        (result,) = await server.result(submitted.task_id)
    assert (result.outcome, result.reward, result.failure) == ("completed", 1.0, None)
    told = json.loads((tmp_path / f"heard.{result.session_id}").read_text())
    assert (told["session_id"], told["outcome"], told["reward"]) == (result.session_id, "completed", 1.0)
    environment = (tmp_path / "heard.env").read_text().splitlines()
    for line in ("GANGLINE_TASK_ID=told", "GANGLINE_ATTEMPT=1", "GANGLINE_OUTCOME=completed", "GANGLINE_REWARD=1.0"):
        assert line in environment
    failed = log_of(up, "hook.failed")
    assert len(failed) == 2
    assert "exited 3: it is broken" in failed[0]
    assert "was killed (0.5 s)" in failed[1]
    assert processes_with(mark).keys() <= {up.running()["pids"]["node"], up.process.pid}, "no hook outlives its budget"


async def test_a_node_killed_while_a_hook_runs_loses_no_result(start: Start, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    up = start("--hook", f"test -e {heard} && exit; touch {heard}; sleep 20", "--hook-timeout", 20)
    async with clients(up) as (server, _node):
        submitted = await server.submit(task("echo done"))
        wait_for(heard.exists)
        os.kill(up.running()["pids"]["node"], signal.SIGKILL)
        await server.wait(submitted.task_id, timeout_s=60)
        (result,) = await server.result(submitted.task_id)
    assert (result.outcome, result.reward, result.attempt) == ("completed", 1.0, 1)


async def test_a_drained_node_ends_with_its_sessions_and_takes_no_other(start: Start, tmp_path: Path) -> None:
    up = start("--run-slots", 1, "--ready-slots", 1)
    go = tmp_path / "go"
    node_pid = up.running()["pids"]["node"]
    async with clients(up) as (server, node):
        held = await server.submit(task(f"until test -e {go}; do sleep 0.05; done", num_samples=4))
        await stages_become(node, init=0, ready=1, run=1, postrun=0)
        opened = await node.open_session()
        drained = gangline("drain", "--data", up.data, "--json")
        (told,) = json.loads(drained.stdout).values()
        assert (told["draining"], told["stages"]["run"], told["num_external_sessions"]) == (True, 1, 1)
        with pytest.raises(NodeDraining):
            await node.open_session()
        go.touch()
        while (await server.task(held.task_id)).states.get("ended", 0) < 2:
            await asyncio.sleep(0.05)
        assert (await node.status()).draining, "a caller's own session is still open"
        for _ in range(2):  # and the node is heard meanwhile
            heard_at = (await server.status()).nodes[0].last_seen_at
            while (await server.status()).nodes[0].last_seen_at == heard_at:
                await asyncio.sleep(0.05)
        await node.finalize(opened.session_id)
        wait_until_gone(node_pid)
        with pytest.raises(GanglineError):
            await node.status()
        view = await server.task(held.task_id)
        assert (view.states, view.outcomes) == ({"ended": 2, "queued": 2}, {"completed": 2})
        assert (await server.status()).nodes == (), "it has left"
    assert "draining" not in gangline("status", "--data", up.data).stdout
    code, said = up.end()
    assert code == 0
    assert "child.done child=node" in said
