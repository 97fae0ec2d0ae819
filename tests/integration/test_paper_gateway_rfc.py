"""An agent and a framework that know the verl gateway RFC (002) and nothing of Gangline.

Its two endpoints are posted to as printed, through an SDK that is given a base URL and a key; the manager's four
functions are the server's routes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from gangline.domain.errors import Conflict, NotFound, ServerUnavailable
from gangline.domain.node_views import OpenedSession
from gangline.domain.session import Heartbeat
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.node.node import TOKEN, RunningNode, running_node
from support.service.papers import listing

SCRIPT = {"default": {"text": "as you wish"}}


@dataclass
class Gateways:
    server: ServerClient
    nodes: list[RunningNode]

    def on(self, opened: OpenedSession) -> RunningNode:
        return next(node for node in self.nodes if opened.base_url.startswith(node.url + "/"))


@asynccontextmanager
async def running_gateways(folder: Path, count: int) -> AsyncGenerator[Gateways]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(scripted_server(SCRIPT))
        served = await stack.enter_async_context(serving(data_dir=folder / "server", control_token=TOKEN))
        server = await stack.enter_async_context(ServerClient(served.url, TOKEN))
        nodes: list[RunningNode] = []
        for number in range(1, count + 1):
            node_id, data = f"n{number}", folder / f"n{number}"
            running = running_node(data, engine, node_id=node_id, server_url=served.url)
            nodes.append(await stack.enter_async_context(running))
        while len((await server.status()).nodes) < count:
            await asyncio.sleep(0.01)
        yield Gateways(server, nodes)


@pytest.fixture
async def gateways(tmp_path: Path) -> AsyncGenerator[Gateways]:
    async with running_gateways(tmp_path, 2) as running:
        yield running


async def talk(opened: OpenedSession) -> None:
    """With a base URL and a key, as `OPENAI_BASE_URL` and `OPENAI_API_KEY` give them to any program."""
    async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model=opened.model, messages=messages)


async def post(url: str, key: str, body: Any = None) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as reply:
        return reply.status


async def test_the_base_url_and_both_endpoints_are_as_printed(gateways: Gateways) -> None:
    opened = await gateways.server.open_session(session_id="s1")
    where = urlsplit(str(opened.base_url))
    printed = listing("002-base-url.txt").strip()
    printed = printed.replace("{gateway_host}", where.hostname or "").replace("{port}", str(where.port))
    assert opened.base_url == printed.replace("{session_id}", "s1")
    node = gateways.on(opened).url
    chat, complete = re.findall(r"^POST (\S+)", listing("002-endpoints.txt"), re.MULTILINE)
    assert opened.base_url + "/chat/completions" == node + chat.replace("{id}", "s1")
    await talk(opened)
    reward_info = {"reward": 0.75, "answer": "42"}
    url = node + complete.replace("{id}", "s1")
    assert await post(url, opened.api_key, {"reward_info": reward_info}) == 200
    result = await gateways.server.finalize("s1")
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    fields = set(re.findall(r"^(\w+): ", listing("002-trajectory.txt"), re.MULTILINE))
    own = {"uid", "session_id", "trajectory_id", "reward_info"}
    assert fields == own | {"prompt_ids", "response_ids", "response_logprobs", "loss_mask"}
    assert trace.metadata["reward_info"] == reward_info
    assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.response_logprobs) > 0
    assert (result.reward_details["claimed_reward"], result.reward) == (0.75, None)


async def test_the_reward_in_the_uploaded_information_is_the_reward_where_the_policy_says_so(
    gateways: Gateways,
) -> None:
    opened = await gateways.server.open_session(reward_policy="claimed")
    await talk(opened)
    url = opened.base_url.removesuffix("/v1") + "/complete"
    assert await post(url, opened.api_key, {"reward_info": {"reward": 0.5}}) == 200
    assert (await gateways.server.finalize(opened.session_id)).reward == 0.5


async def test_completing_needs_no_body_and_wakes_who_waits_at_the_server(gateways: Gateways) -> None:
    opened = await gateways.server.open_session()
    waiting = asyncio.create_task(gateways.server.wait_session(opened.session_id, 60))
    assert await post(opened.base_url.removesuffix("/v1") + "/complete", opened.api_key) == 200
    assert (await waiting).status == "completed"


async def test_sessions_spread_over_the_nodes_and_stay_where_they_are(gateways: Gateways) -> None:
    opened = await asyncio.gather(*(gateways.server.open_session() for _ in range(6)))
    assert [sum(gateways.on(one) is node for one in opened) for node in gateways.nodes] == [3, 3]
    for one in opened:
        await talk(one)
    for one in opened:
        node = gateways.on(one)
        assert (await node.client.session(one.session_id)).num_calls == 1
        assert (await gateways.server.finalize(one.session_id)).node_id == one.node_id


async def test_the_node_with_the_fewest_sessions_is_chosen(gateways: Gateways) -> None:
    for _ in range(3):
        await gateways.nodes[0].client.open_session()
    while [node.metrics.get("external_sessions") for node in (await gateways.server.status()).nodes] != [3, 0]:
        await asyncio.sleep(0.05)
    opened = [await gateways.server.open_session() for _ in range(3)]
    assert [one.node_id for one in opened] == ["n2"] * 3


async def test_a_taken_id_is_a_conflict_whichever_node_has_it(gateways: Gateways) -> None:
    await gateways.nodes[1].client.open_session(session_id="mine")
    with pytest.raises(Conflict):
        await gateways.server.open_session(session_id="mine")
    both = await asyncio.gather(
        *(gateways.server.open_session(session_id="x") for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in both) == ["Conflict", "OpenedSession"]


async def test_a_node_that_drains_or_is_gone_is_passed_over(gateways: Gateways) -> None:
    await gateways.server.heartbeat(Heartbeat(node_id="gone", url="http://127.0.0.1:9", sessions={}, capacity=9))
    await gateways.nodes[0].client.open_session()
    await gateways.nodes[0].client.drain()
    assert {(await gateways.server.open_session()).node_id for _ in range(2)} == {"n2"}


async def test_aborting_discards_and_an_unknown_session_is_not_found(gateways: Gateways) -> None:
    opened = await gateways.server.open_session()
    assert (await gateways.server.abort_session(opened.session_id)).status == "aborted"
    with pytest.raises(Conflict):
        await gateways.server.finalize(opened.session_id)
    with pytest.raises(NotFound):
        await gateways.server.finalize("never")


async def test_another_server_finds_where_a_session_is_pinned(tmp_path: Path) -> None:
    async with running_gateways(tmp_path, 1) as first:
        opened = await first.server.open_session()
        await talk(opened)
        async with (
            serving(data_dir=tmp_path / "another", control_token=TOKEN) as other,
            ServerClient(other.url, TOKEN) as client,
        ):
            with pytest.raises(ServerUnavailable):
                await client.open_session()
            node = first.nodes[0]
            await client.heartbeat(Heartbeat(node_id="n1", url=node.url, sessions={}, capacity=1))
            assert (await client.finalize(opened.session_id)).trajectory is not None
