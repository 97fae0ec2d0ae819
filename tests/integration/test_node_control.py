"""A node's own routes over its engines and its gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from gangline.domain.errors import Conflict, EngineUnavailable, InvalidRequest, NotFound, UnknownPlugin
from gangline.domain.node_views import OpenedSession
from gangline.node.backends.gate import ABANDONED_S
from gangline.serving.scripted.server import scripted_server
from support.node.node import RunningNode, running_node

SCRIPT = {"default": {"text": "as you wish"}}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[RunningNode]:
    async with scripted_server(SCRIPT) as url, running_node(tmp_path, url) as running:
        yield running


async def ask(opened: OpenedSession, text: str = "hi") -> str | None:
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="scripted", messages=messages)
        return reply.choices[0].message.content


async def test_sessions_spread_over_the_engines_that_a_node_starts_with(tmp_path: Path) -> None:
    async with (
        scripted_server(SCRIPT) as one,
        scripted_server(SCRIPT) as two,
        running_node(tmp_path, one, two) as node,
    ):
        for _ in range(4):
            await ask(await node.client.open_session())
        assert [view.num_sessions for view in await node.client.backends()] == [2, 2]


async def test_an_ended_session_gives_its_place_back(node: RunningNode) -> None:
    opened, other = await node.client.open_session(), await node.client.open_session()
    await ask(opened)
    await ask(other)
    await node.client.finalize(opened.session_id)
    await node.client.abort_session(other.session_id)
    assert [view.num_sessions for view in await node.client.backends()] == [0]


async def test_a_session_goes_on_with_the_engine_that_replaces_its_own(node: RunningNode) -> None:
    opened = await node.client.open_session()
    await ask(opened)
    (first,) = await node.client.backends()
    async with scripted_server({"default": {"text": "from the other"}}) as url:
        added = await node.client.add_backend(url)
        await node.client.remove_backend(first.backend_id)
        assert await ask(opened, "again") == "from the other"
        assert [view.backend_id for view in await node.client.backends()] == [added.backend_id]
        assert await node.ask("GET", f"/v1/backends/{added.backend_id}") == (
            200,
            msgspec.json.decode(msgspec.json.encode((await node.client.backends())[0])),
        )


async def test_a_call_waits_for_the_engine_that_comes_after_a_clear(node: RunningNode) -> None:
    opened = await node.client.open_session()
    await node.client.clear_backends()
    assert await node.client.backends() == []
    waiting = asyncio.create_task(ask(opened))
    async with scripted_server({"default": {"text": "new weights"}, "model": "other"}) as url:
        await node.client.add_backend(url)
        assert await waiting == "new weights"
        assert (await node.client.status()).model == "other"


async def test_an_engine_with_another_model_is_refused(node: RunningNode) -> None:
    async with scripted_server(SCRIPT | {"model": "other"}) as url:
        with pytest.raises(Conflict):
            await node.client.add_backend(url)


async def test_what_is_no_engine_is_refused_by_what_is_wrong_with_it(node: RunningNode) -> None:
    with pytest.raises(EngineUnavailable):
        await node.client.add_backend("http://127.0.0.1:9")
    with pytest.raises(UnknownPlugin):
        await node.client.add_backend("http://127.0.0.1:9", kind="vlm")
    with pytest.raises(InvalidRequest):
        await node.client.add_backend("file:///etc/passwd")
    with pytest.raises(NotFound):
        await node.client.remove_backend("b77")
    assert (await node.ask("GET", "/v1/backends/b77"))[0] == 404


async def test_calls_wait_at_a_closed_gate_and_versions_are_stamped(node: RunningNode) -> None:
    opened = await node.client.open_session()
    state = await node.client.pause("drain", lease_s=60)
    assert (state.is_paused, state.is_drained) == (True, True)
    waiting = asyncio.create_task(ask(opened))
    while (await node.client.gate()).num_waiting == 0:
        await asyncio.sleep(0)
    assert (await node.client.set_version(3)).version == 3
    assert not waiting.done()
    assert (await node.client.resume()).is_paused is False
    assert await waiting == "as you wish"


async def test_a_version_that_an_engine_reports_itself_is_not_set_and_the_answer_says_so(node: RunningNode) -> None:
    assert (await node.client.gate()).notes == ()
    (note,) = (await node.client.set_version(7)).notes
    (engine,) = await node.client.backends()
    assert engine.reports_versions
    assert engine.url in note
    assert "and not version 7" in note
    assert (await node.client.gate()).notes == (note,)


async def test_a_version_never_goes_back(node: RunningNode) -> None:
    await node.client.set_version(3)
    with pytest.raises(InvalidRequest):
        await node.client.set_version(2)
    assert (await node.client.gate()).version == 3


@pytest.mark.parametrize("body", [{"mode": "abort"}, {"lease_s": 0}, {"lease_s": 1e9}, {"leas": 1}, [1]])
async def test_a_wrong_pause_leaves_the_gate_open(node: RunningNode, body: Any) -> None:
    status, problem = await node.ask("POST", "/v1/gate/pause", body)
    assert (status, problem["code"]) == (400, "invalid_request")
    assert (await node.client.gate()).is_paused is False


async def test_engines_and_gate_want_the_control_token(node: RunningNode) -> None:
    opened = await node.client.open_session()
    for method, path in [
        ("GET", "/v1/backends"),
        ("POST", "/v1/backends"),
        ("DELETE", "/v1/backends"),
        ("DELETE", "/v1/backends/b1"),
        ("GET", "/v1/gate"),
        ("POST", "/v1/gate/pause"),
        ("POST", "/v1/gate/resume"),
        ("POST", "/v1/gate/version"),
    ]:
        for key in (None, opened.api_key):
            status, problem = await node.ask(method, path, None, key)
            assert (status, problem["code"]) == (401, "unauthorized"), path
    assert len(await node.client.backends()) == 1
    assert (await node.client.gate()).is_paused is False


async def test_a_node_whose_engines_differ_does_not_start(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as one, scripted_server(SCRIPT | {"model": "other"}) as two:
        with pytest.raises(Conflict):
            async with running_node(tmp_path, one, two):
                pass


async def test_the_operators_policy_holds_for_sessions_of_callers_too(tmp_path: Path) -> None:
    policy = {"temperature": {"override": 0.25}}
    async with scripted_server(SCRIPT) as url, running_node(tmp_path, url, sampling=policy) as node:
        opened = await node.client.open_session()
        await ask(opened)
        await node.ask("POST", f"/s/{opened.session_id}/generate", {"prompt_ids": [1, 2]}, opened.api_key)
        result = await node.client.finalize(opened.session_id, completions=True)
    assert [one.certificate.sampling.temperature for one in result.completions] == [0.25, 0.25]
    assert [one.metadata["sampling_wished"]["temperature"] for one in result.completions] == [None, None]


async def test_a_drain_is_polled_and_one_whose_trainer_vanished_opens_soon(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as engine_url, running_node(tmp_path, engine_url) as node:
        opened = await node.client.open_session()
        async with node.http.post(f"{engine_url}/pause", params={"mode": "keep"}):
            held = asyncio.create_task(ask(opened))
        while (await node.client.gate()).num_in_flight == 0:
            await asyncio.sleep(0)
        status, state = await node.ask("POST", "/v1/gate/pause", {"lease_s": 600, "wait_s": 0})
        assert (status, state["is_paused"], state["is_drained"], state["num_in_flight"]) == (200, True, False, 1)
        vanished = asyncio.create_task(node.client.pause("drain", lease_s=500))
        while (await node.client.gate()).lease_left_s > 500:
            await asyncio.sleep(0)
        vanished.cancel()
        while (await node.client.gate()).lease_left_s > ABANDONED_S:
            await asyncio.sleep(0)
        draining = asyncio.create_task(node.client.pause("drain", lease_s=60))
        async with node.http.post(f"{engine_url}/resume"):
            assert await held == "as you wish"
        assert (await draining).is_drained
        await node.client.resume()
