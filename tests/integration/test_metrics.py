"""What Prometheus reads of a server and of a node, over loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gangline.domain.node_numbers import NodeNumbers
from gangline.domain.node_views import OpenedSession
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN, RunningNode, running_node
from support.service.running import FakeNode, any_plugin, engine_down, request

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]

DENY = {"session", "session_id", "task", "task_id"}


async def scrape(url: str, token: str | None = TOKEN) -> tuple[int, Numbers]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{url}/metrics") as reply:
        if reply.status != 200:
            return reply.status, {}
        assert reply.content_type == "text/plain"
        families = text_string_to_metric_families(await reply.text())
        samples = [sample for family in families for sample in family.samples]
        return 200, {(one.name, frozenset(one.labels.items())): one.value for one in samples}


def of(numbers: Numbers, name: str, **labels: str) -> float:
    return numbers[name, frozenset(labels.items())]


async def talk(opened: OpenedSession, text: str) -> None:
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text}]
        await client.chat.completions.create(model="scripted", messages=messages)


async def on_a_node(tmp_path: Path, do: Any) -> Numbers:
    async with (
        scripted_server({"default": {"text": "as you wish"}}) as engine,
        running_node(tmp_path, engine) as node,
    ):
        await do(node)
        status, numbers = await scrape(node.url)
        assert status == 200
        return numbers


async def test_a_node_counts_calls_tokens_and_what_contexts_were(tmp_path: Path) -> None:
    sampled: list[int] = []

    async def two_calls(node: RunningNode) -> None:
        opened = await node.client.open_session()
        await talk(opened, "hi")
        await talk(opened, "hello")
        result = await node.client.finalize(opened.session_id, completions=True)
        sampled.append(sum(len(one.sampled_ids) for one in result.completions))

    numbers = await on_a_node(tmp_path, two_calls)
    assert of(numbers, "gangline_model_calls_total", dialect="openai_chat", status="complete") == 2
    assert of(numbers, "gangline_sampled_tokens_total") == sampled[0] > 0
    assert of(numbers, "gangline_prompt_tokens_total") > 0
    assert sum(value for (name, _), value in numbers.items() if name == "gangline_contexts_total") == 2
    assert of(numbers, "gangline_model_call_seconds_count") == 2


async def test_a_node_counts_errors_by_what_broke(tmp_path: Path) -> None:
    async def wrong_key(node: RunningNode) -> None:
        opened = await node.client.open_session()
        with pytest.raises(openai.AuthenticationError):
            await talk(msgspec.structs.replace(opened, api_key="wrong"), "hi")

    numbers = await on_a_node(tmp_path, wrong_key)
    assert of(numbers, "gangline_call_errors_total", boundary="caller", code="unauthorized") == 1


async def test_a_node_shows_its_gate_its_pools_and_its_backends(tmp_path: Path) -> None:
    async def close_the_gate(node: RunningNode) -> None:
        await node.client.open_session()
        await node.ask("POST", "/v1/gate/pause", {"mode": "keep"})

    numbers = await on_a_node(tmp_path, close_the_gate)
    assert of(numbers, "gangline_gate_closed") == 1
    assert of(numbers, "gangline_gate_closed_seconds_total") > 0
    assert of(numbers, "gangline_external_sessions") == 1
    assert of(numbers, "gangline_sessions", stage="run") == 0
    assert of(numbers, "gangline_pool_size", pool="run_slots") == 16
    assert [value for (name, _), value in numbers.items() if name == "gangline_backend_up"] == [1]


async def test_a_server_shows_queues_outcomes_and_nodes(tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        node = FakeNode(client)
        await client.submit(request("t", num_samples=3))
        leases = await node.lease(2)
        await node.finish(leases[:1])
        await node.finish(leases[1:], **engine_down())
        _, numbers = await scrape(running.url)
    assert of(numbers, "gangline_sessions", state="ended") == 1
    assert of(numbers, "gangline_sessions", state="queued") == 2
    assert of(numbers, "gangline_sessions_ended_total", outcome="completed") == 1
    assert of(numbers, "gangline_failures_total", code="engine_unavailable", again="true") == 1
    assert of(numbers, "gangline_node_sessions", node="n1") == 0
    assert of(numbers, "gangline_requests_total", method="POST", route="/v1/tasks", status="200") == 1


async def test_a_heartbeat_tells_the_server_the_same(tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
        scripted_server({"default": {"text": "as you wish"}}) as engine,
        running_node(tmp_path / "node", engine, server_url=running.url) as node,
    ):
        opened = await node.client.open_session()
        await talk(opened, "hi")
        told = None
        async with asyncio.timeout(30):
            while told is None or not told.model_calls:
                await asyncio.sleep(0.05)
                nodes = (await client.status()).nodes
                told = NodeNumbers.of(nodes[0].metrics) if nodes else None
        _, numbers = await scrape(running.url)
    assert (told.contexts, told.contexts_diverged, told.external_sessions) == (1, 0, 1)
    assert told.sampled_tokens > 0
    assert told.memory_bytes > told.memory_free_bytes > 0
    labels = {"node": nodes[0].node_id, "url": engine}
    assert of(numbers, "gangline_engine_up", **labels) == 1
    assert of(numbers, "gangline_engine_tokens_per_second", **labels) > 0
    assert of(numbers, "gangline_node_disk_free_bytes", node=nodes[0].node_id) > 0
    assert of(numbers, "gangline_node_disk_low", node=nodes[0].node_id) == 0
    assert (told.run, told.run_slots, told.gate_closed, told.policy_version) == (0, 16, 0, None)


async def test_numbers_want_the_control_token(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as running:
        assert (await scrape(running.url, None))[0] == 401

    async def without_a_token(node: RunningNode) -> None:
        assert (await scrape(node.url, None))[0] == 401

    await on_a_node(tmp_path, without_a_token)


async def test_paths_of_strangers_make_no_new_numbers(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running:
        async with aiohttp.ClientSession() as http:
            for number in range(5):
                await (await http.get(f"{running.url}/nowhere/{number}")).read()
        _, numbers = await scrape(running.url)
    strange = [labels for name, labels in numbers if name == "gangline_requests_total" and ("route", "none") in labels]
    assert len(strange) == 1


async def test_no_number_is_of_one_session_or_task(tmp_path: Path) -> None:
    async def one_call(node: RunningNode) -> None:
        await talk(await node.client.open_session(), "hi")

    numbers = await on_a_node(tmp_path, one_call)
    assert not [labels for _, labels in numbers if DENY & dict(labels).keys()]
