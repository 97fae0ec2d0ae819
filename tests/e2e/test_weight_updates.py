"""Weights change under a service at work: a hundred times, with a trainer that dies, with an engine that dies."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.completion import Completion
from gangline.domain.errors import EngineUnavailable
from gangline.domain.session import SessionResult
from gangline.rows.audit import audit
from gangline.server.run import serving
from gangline.train.weights.update import ServiceWeights
from gangline.wire.client.server import ServerClient
from support.node.backends import KillableEngine
from support.node.node import TOKEN, RunningNode, running_node
from support.node.weights import HeldLoad, agent, sampler_of, save, versions_sampled

TRAINER = Path(__file__).parents[1] / "support" / "training" / "weight_trainer.py"
TEXT = " ".join(f"word{number}" for number in range(3))
NUM_AGENTS, NUM_TURNS, NUM_UPDATES = 2, 4, 50
"""Agents of a node; turns of a session; updates in each of two modes, a hundred in all."""


@dataclass
class Service:
    """A server with nodes, each before its own engine."""

    url: str
    client: ServerClient
    nodes: list[RunningNode]
    engines: list[KillableEngine]

    def weights(self, folder: Path, **options: Any) -> ServiceWeights:
        return ServiceWeights(self.client, folder / "weights", token=TOKEN, **options)


@asynccontextmanager
async def service(folder: Path, num_nodes: int, token_delay_s: float = 0.0) -> AsyncGenerator[Service]:
    script = {"default": {"text": TEXT, "token_delay_s": token_delay_s}}
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(KillableEngine(script)) for _ in range(num_nodes)]
        server = await stack.enter_async_context(serving(data_dir=folder / "server", control_token=TOKEN))
        nodes = [
            await stack.enter_async_context(
                running_node(folder / f"node{i}", engine.url, node_id=f"n{i}", server_url=server.url)
            )
            for i, engine in enumerate(engines)
        ]
        client = await stack.enter_async_context(ServerClient(server.url, TOKEN))
        async with asyncio.timeout(60):
            while len((await client.status()).nodes) < num_nodes:
                await asyncio.sleep(0.05)
        yield Service(server.url, client, nodes, engines)


async def work(node: RunningNode, done: asyncio.Event) -> list[SessionResult]:
    """Streams sessions of some turns until `done`. Every reply must come whole."""
    results: list[SessionResult] = []
    while not done.is_set():
        opened = await node.client.open_session()
        messages: list[Any] = []
        async with agent(opened) as client:
            for turn in range(NUM_TURNS):
                messages.append({"role": "user", "content": f"turn {turn}"})
                chunks = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
                text = "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])
                assert text == TEXT
                messages.append({"role": "assistant", "content": text})
        results.append(await node.client.finalize(opened.session_id, completions=True))
    return results


def versions_of(completion: Completion) -> list[int]:
    """One for each sampled token: no token is without."""
    versions: list[int] = []
    for span in completion.certificate.version_spans:
        assert span.start == len(versions)
        versions += [span.version] * (span.end - span.start)
    assert len(versions) == len(completion.sampled_ids)
    return versions


@pytest.mark.parametrize("mode", ["drain", "keep"])
async def test_of_a_hundred_updates_under_load_no_harness_notices_one(tmp_path: Path, mode: Any) -> None:
    async with service(tmp_path, 2, token_delay_s=0.001) as running, asyncio.TaskGroup() as group:
        weights, done = running.weights(tmp_path, mode=mode), asyncio.Event()
        await weights.push(save, 1)
        working = [group.create_task(work(node, done)) for node in running.nodes for _ in range(NUM_AGENTS)]
        profiles = [await weights.push(save, version) for version in range(2, NUM_UPDATES + 2)]
        done.set()
        results = [result for worker in working for result in await worker]
    seen: set[int] = set()
    for result in results:
        assert [one.status for one in result.completions] == ["complete"] * NUM_TURNS
        versions = [version for one in result.completions for version in versions_of(one)]
        assert versions == sorted(versions)
        assert result.trajectory is not None
        assert audit(result.trajectory, result.completions).ok
        seen.update(versions)
    assert len(seen) > NUM_UPDATES / 4
    mixed = [len(set(versions_of(one))) > 1 for result in results for one in result.completions]
    assert any(mixed) == (mode == "keep")
    assert {(profile.num_engines, profile.num_nodes) for profile in profiles} == {(2, 2)}
    for engine in running.engines:
        assert sampler_of(engine).weight_version == NUM_UPDATES + 1


async def test_a_trainer_that_is_killed_with_the_gate_closed_does_not_freeze_the_service(tmp_path: Path) -> None:
    async with service(tmp_path, 1) as running:
        (node,), (engine,) = running.nodes, running.engines
        weights = running.weights(tmp_path)
        await weights.push(save, 1)
        load = HeldLoad(engine)
        command = (sys.executable, TRAINER, running.url, TOKEN, tmp_path / "weights", "2", "3")
        trainer = await asyncio.create_subprocess_exec(*map(str, command))
        async with asyncio.timeout(60):
            await load.began.wait()
        trainer.kill()
        await trainer.wait()
        assert (await node.client.gate()).is_paused
        assert await versions_sampled(node) == [-1]
        assert (await node.client.gate()).num_expired_leases == 1
        del sampler_of(engine).load_weights
        await weights.push(save, 2)
        assert await versions_sampled(node) == [2]


AGENT = textwrap.dedent("""
    import json, os, urllib.request
    messages = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"turn {turn}"})
        body = json.dumps({"model": os.environ["GANGLINE_MODEL"], "messages": messages}).encode()
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
            "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
        with urllib.request.urlopen(request) as reply:
            messages.append(json.load(reply)["choices"][0]["message"])
""")


async def test_an_engine_that_dies_in_the_middle_of_a_group_does_not_lose_it(tmp_path: Path) -> None:
    task = {
        "task_id": "group",
        "instruction": "talk",
        "num_samples": 4,
        "runtime": {
            "backend": "process",
            "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}],
        },
        "agent": {"harness": "shell", "settings": {"command": f"{sys.executable} agent.py"}},
    }
    async with service(tmp_path, 1, token_delay_s=0.02) as running:
        (engine,) = running.engines
        weights = running.weights(tmp_path)
        await weights.push(save, 3)
        await running.client.submit(task)
        async with asyncio.timeout(60):
            while sampler_of(engine)._num_running < 2:
                await asyncio.sleep(0.01)
        await engine.kill()
        await engine.start()
        assert [one.version for one in await _lost(weights)] == [0]
        assert await weights.ensure(3, save) is not None
        await running.client.wait("group", timeout_s=120)
        results = await running.client.result("group")
    assert [result.outcome for result in results] == ["completed"] * 4
    for result in results:
        assert result.trajectory is not None
        assert audit(result.trajectory, result.completions).ok
        versions = [version for one in result.completions for version in versions_of(one)]
        assert set(versions) <= {0, 3}


async def _lost(weights: ServiceWeights) -> list[Any]:
    """Once the node sees its engine again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await weights.lost(3)
            except EngineUnavailable:
                await asyncio.sleep(0.1)
