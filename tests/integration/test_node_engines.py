"""The engines of a node: keys that come by name, changes that outlive a restart, groups that share an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from gangline.domain.errors import Conflict, EngineUnavailable, GanglineError, InvalidRequest
from gangline.domain.node_views import EngineTime, OpenedSession
from gangline.models.engine_server.app import serving
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app, scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.nemo_rl import nemo_rl_server
from support.node.node import RunningNode, running_node

SCRIPT = {"default": {"text": "as you wish"}}
KEY = "sk-of-the-engine"


async def _page(_request: web.Request) -> web.Response:
    name = "vllm:request_queue_time_seconds"
    return web.Response(text=f'{name}_count{{engine="0"}} 4.0\n{name}_sum{{engine="0"}} 2.0\n')


@asynccontextmanager
async def locked_engine() -> AsyncGenerator[str]:
    """One that was started with `--api-key`."""

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    app = create_scripted_app(ScriptedSampler(Script.model_validate(SCRIPT), TinyTokenizer()))
    app.middlewares.append(guard)
    app.router.add_get("/metrics", _page)
    async with serving(app) as url:
        yield url


async def ask(opened: OpenedSession) -> str | None:
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content


async def urls(node: RunningNode) -> list[str]:
    return [view.url for view in await node.client.backends()]


@pytest.mark.parametrize("kind", ["auto", "vllm"])
async def test_an_engines_key_comes_from_the_environment_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    async with (
        locked_engine() as url,
        running_node(tmp_path, url, engine_kind=kind, engine_key_env="ENGINE_KEY") as node,
    ):
        assert await ask(await node.client.open_session()) == "as you wish"
        (view,) = await node.client.backends()
        assert view.api_key_env == "ENGINE_KEY"
        await node.client.clear_backends()
        with pytest.raises(GanglineError, match="Unauthorized"):
            await node.client.add_backend(url, kind=kind)
        with pytest.raises(InvalidRequest, match=r"NO_SUCH_KEY.*is not set"):
            await node.client.add_backend(url, kind=kind, api_key_env="NO_SUCH_KEY")
        with pytest.raises(InvalidRequest):
            await node.client.add_backend(url, kind=kind, api_key_env=KEY)
        added = await node.client.add_backend(url, kind=kind, api_key_env="ENGINE_KEY")
        assert added.state == "healthy"
    kept = (tmp_path / "nodes" / "n1" / "backends.json").read_text()
    assert "ENGINE_KEY" in kept
    assert KEY not in kept


async def test_an_engines_own_times_are_asked_for_with_its_key_and_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    async with (
        locked_engine() as url,
        scripted_server(SCRIPT) as other,
        running_node(tmp_path, url, engine_key_env="ENGINE_KEY") as node,
    ):
        await node.client.add_backend(other)
        assert [view.times for view in await node.client.backends()] == [{}, {}]
        locked, bare = await node.client.backends(times=True)
        assert locked.times == {"queue": EngineTime(mean_s=0.5, num_calls=4)}
        assert bare.times == {}, "it has no page of metrics"


async def test_what_was_added_and_removed_is_so_after_a_restart(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as one, scripted_server(SCRIPT) as two, scripted_server(SCRIPT) as three:
        async with running_node(tmp_path, one) as node:
            await node.client.add_backend(two, label="host-2")
            (first, _) = await node.client.backends()
            await node.client.remove_backend(first.backend_id)
        async with running_node(tmp_path, one) as node:
            (view,) = await node.client.backends()
            assert (view.url, view.label) == (two, "host-2")
            await node.client.add_backend(three)
        async with running_node(tmp_path, one) as node:
            assert await urls(node) == [two, three]
        async with running_node(tmp_path, three) as node:
            assert await urls(node) == [three]


async def test_a_remembered_engine_that_is_gone_does_not_keep_the_node_from_starting(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as one:
        async with scripted_server(SCRIPT) as two, running_node(tmp_path, one) as node:
            await node.client.add_backend(two)
        async with running_node(tmp_path, one, engine_wait_s=0.0) as node:
            assert await urls(node) == [one]
            assert await ask(await node.client.open_session()) == "as you wish"
    with pytest.raises(EngineUnavailable, match="did not answer"):
        async with running_node(tmp_path, one, engine_wait_s=0.0):
            pass


async def test_an_engine_that_answers_wrongly_is_not_called_silent(tmp_path: Path) -> None:
    async with nemo_rl_server(SCRIPT, train=(0.8, 1.0), val=(0.8, 1.0)) as url:
        with pytest.raises(EngineUnavailable, match=r"answers, but cannot be used.*with temperature 1.*Repair it"):
            async with running_node(tmp_path, url, engine_wait_s=0.0):
                pass
    with pytest.raises(EngineUnavailable, match=r"did not answer within 0 s.*Start it"):
        async with running_node(tmp_path, "http://127.0.0.1:9", engine_wait_s=0.0):
            pass


async def test_a_node_without_an_engine_gets_one_later(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as later, running_node(tmp_path) as node:
        assert await urls(node) == []
        await node.client.add_backend(later)
        assert await ask(await node.client.open_session()) == "as you wish"
    async with running_node(tmp_path) as node:
        assert await urls(node) == []  # that one is gone, and none was named


async def test_an_engine_that_drains_is_not_remembered_though_nobody_waits_for_its_end(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as one, scripted_server(SCRIPT) as two:
        async with running_node(tmp_path, one) as node:
            opened = await node.client.open_session()
            async with node.http.post(f"{one}/pause", params={"mode": "keep"}):
                held = asyncio.create_task(ask(opened))
            while (await node.client.gate()).num_in_flight == 0:
                await asyncio.sleep(0)
            await node.client.add_backend(two)
            (first, _) = await node.client.backends()
            vanished = asyncio.create_task(node.client.remove_backend(first.backend_id))
            while (await node.client.backends())[0].state != "draining":
                await asyncio.sleep(0)
            vanished.cancel()
            path = tmp_path / "nodes" / "n1" / "backends.json"
            while one in path.read_text().partition("members")[2]:
                await asyncio.sleep(0.01)
            async with node.http.post(f"{one}/resume"):
                assert await held == "as you wish"
        async with running_node(tmp_path, one) as node:
            assert await urls(node) == [two]


async def test_a_damaged_memory_is_no_memory(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as one:
        async with scripted_server(SCRIPT) as two, running_node(tmp_path, one) as node:
            await node.client.add_backend(two)
            path = tmp_path / "nodes" / "n1" / "backends.json"
            path.write_bytes(path.read_bytes()[:-3])
        async with running_node(tmp_path, one) as node:
            assert await urls(node) == [one]


async def test_the_sessions_of_one_task_share_an_engine_and_their_results_its_id(tmp_path: Path) -> None:
    async with (
        scripted_server(SCRIPT) as one,
        scripted_server(SCRIPT) as two,
        running_node(tmp_path, one, two, affinity_slack=3) as node,
    ):
        opened = [await node.client.open_session(task_id="t1") for _ in range(3)]
        for session in opened:
            await ask(session)
        assert sorted(view.num_sessions for view in await node.client.backends()) == [0, 3]
        assert (await node.client.session(opened[0].session_id)).task_id == "t1"
        result = await node.client.finalize(opened[0].session_id)
        assert result.trajectory
        assert (result.task_id, result.trajectory.task_id) == ("t1", "t1")
        alone = await node.client.open_session()
        assert (await node.client.finalize(alone.session_id)).task_id == alone.session_id


async def test_a_tasks_id_outlives_the_node(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as one:
        async with running_node(tmp_path, one) as node:
            opened = await node.client.open_session(task_id="t1")
        async with running_node(tmp_path, one) as node:
            assert (await node.client.finalize(opened.session_id)).task_id == "t1"
            with pytest.raises(Conflict):
                await node.client.open_session(session_id=opened.session_id)


async def test_agents_are_told_the_public_url_and_this_machine_the_local_one(tmp_path: Path) -> None:
    async with (
        scripted_server(SCRIPT) as one,
        running_node(tmp_path, one, host="0.0.0.0", public_url="http://gpu-1.example:99/") as node,
    ):
        assert node.url.startswith("http://127.0.0.1:")
        opened = await node.client.open_session(session_id="s1")
        assert opened.base_urls["openai"] == "http://gpu-1.example:99/s/s1/v1"
