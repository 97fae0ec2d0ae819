"""Resources of whole sessions: by stage, to the byte of the proxy's own count, over a restart of the node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.domain.usage import AMOUNTS
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.process import ProcessRuntime
from gangline.settings import plugins
from gangline.testing.adoption_conformance import Lives
from gangline.testing.runtime_conformance import Check, run_check
from support.node.attempt import lease_of, node_parts
from support.node.usage_checks import CHECKS

AGENT = """
import json, os, time, urllib.request
for number in range(3):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 10_000 * (number + 1)}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    urllib.request.urlopen(request).read()
open("written", "wb").write(b"x" * 3_000_000)
while time.process_time() < 0.5: pass
"""
SPIN = "import time\nwhile time.process_time() < 0.5: pass"


class Front:
    """Stands before a node's proxy and counts what passes."""

    def __init__(self) -> None:
        self.port = self.num_sent = self.num_received = 0

    @contextlib.asynccontextmanager
    async def before(self, port: int) -> AsyncGenerator[None]:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                self._copy(reader, far_writer, "num_sent"), self._copy(far_reader, writer, "num_received")
            )

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                setattr(self, name, getattr(self, name) + len(piece))
                writer.write(piece)
                await writer.drain()
        writer.close()


async def _in_sandbox() -> None:
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)


async def ended(parts: NodeParts, command: str = "python3 agent.py", **task: Any) -> SessionResult:
    prepare = [{"type": "write", "path": "agent.py", "content": AGENT}]
    runtime = {"backend": "sandbox", "prepare": prepare} | task.pop("runtime", {})
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    return await Attempt(lease_of(runtime=runtime, agent=agent, **task), parts).live()


async def test_model_calls_are_counted_to_the_byte_of_the_proxys_own_count(tmp_path: Path) -> None:
    await _in_sandbox()
    front = Front()
    async with node_parts(tmp_path / "node") as parts, front.before(parts.proxy_port):
        result = await ended(msgspec.structs.replace(parts, proxy_port=front.port))
    assert (result.outcome, len(result.completions)) == ("completed", 3)
    assert result.usage is not None
    agent = result.usage.agent
    assert (agent.proxy_sent_bytes, agent.proxy_received_bytes) == (front.num_sent, front.num_received)
    assert front.num_sent > 60_000
    assert 0.5 <= (agent.cpu_s or 0) < 10
    assert 3_000_000 <= (agent.written_bytes or 0) < 30_000_000
    assert (agent.peak_memory_bytes or 0) > 3_000_000
    assert set(agent.measured) == set(AMOUNTS)


@pytest.mark.parametrize("refresh", [False, True])
async def test_grading_is_told_apart_from_the_agents_work(tmp_path: Path, refresh: bool) -> None:
    await _in_sandbox()
    command = f"python3 -c '{SPIN}'; python3 -c '{SPIN}'; echo 1 > reward.txt"
    evaluator = {"strategy": "script", "refresh_runtime": refresh, "config": {"command": command}}
    async with node_parts(tmp_path / "node") as parts:
        result = await ended(parts, "true", evaluator=evaluator)
    assert (result.outcome, result.reward) == ("completed", 1.0)
    assert result.usage is not None
    assert result.usage.grading is not None
    assert (result.usage.agent.cpu_s or 0) < 0.5
    assert (result.usage.grading.cpu_s or 0) >= 1.0


async def test_a_session_without_isolation_says_what_nobody_counts(tmp_path: Path) -> None:
    async with node_parts(tmp_path / "node") as parts:
        result = await ended(parts, runtime={"backend": "process"})
    assert result.usage is not None
    agent = result.usage.agent
    assert (agent.proxy_sent_bytes, agent.list_received_bytes) == (None, None)
    assert "runtime `process`" in agent.measured["proxy_sent_bytes"]
    assert (agent.cpu_s or 0) >= 0.5
    assert "without those that a command left behind" in agent.measured["cpu_s"]


async def test_a_session_whose_sandbox_is_lost_knows_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stops:
        async def evaluate(self, context: EvaluationContext) -> Reward:
            await context.runtime.stop()
            return Reward(reward=1.0)

    monkeypatch.setattr(plugins, "make_evaluator", lambda strategy, config: Stops())
    async with node_parts(tmp_path / "node") as parts:
        result = await ended(parts, runtime={"backend": "process"})
    assert result.usage is not None
    assert result.usage.agent.cpu_s is not None, "as it was when the agent ended"
    assert result.usage.grading is not None
    assert result.usage.grading.cpu_s is None
    assert "was stopped" in result.usage.grading.measured["cpu_s"]


async def test_what_was_used_survives_the_nodes_death(tmp_path: Path) -> None:
    await _in_sandbox()
    lives = Lives("sandbox", tmp_path / "lives")
    await lives.begin()
    try:
        handle = await lives.start()
        await handle.exec(["python3", "-c", SPIN])
        before = await handle.usage()
        await handle.annotate(b"note")
        (kept,) = await lives.next()
        after = await kept.usage()
        assert {name: getattr(after, name) for name in AMOUNTS} == {name: getattr(before, name) for name in AMOUNTS}
        assert (after.cpu_s or 0) >= 0.5
        await kept.exec(["python3", "-c", SPIN])
        assert ((await kept.usage()).cpu_s or 0) >= 1.0
    finally:
        await lives.end()


@pytest.mark.parametrize("check", CHECKS.applying(isolated=True), ids=lambda check: check.__name__)
async def test_a_sandbox_counts(check: Check, tmp_path: Path) -> None:
    await _in_sandbox()
    await run_check(check, BubblewrapRuntime(), tmp_path, isolated=True)


@pytest.mark.parametrize("check", CHECKS.applying(isolated=False), ids=lambda check: check.__name__)
async def test_a_process_counts(check: Check, tmp_path: Path) -> None:
    await run_check(check, ProcessRuntime(), tmp_path, isolated=False)
