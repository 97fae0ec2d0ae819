"""Sessions over an engine whose cache holds one of them: they take turns, and no agent sees it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import openai
from aiohttp import web
from aiohttp.typedefs import Handler

from gangline.models.engine_server.app import serving
from gangline.node.backends.admission import Admission
from gangline.node.backends.gate import Gate
from gangline.node.backends.pool import BackendPool
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.node.proxy import MemoryJournal, served

PAGE = """vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="4"} 1.0
vllm:num_requests_waiting{engine="0"} 3.0
"""


class Engine:
    """A scripted engine that tells the size of its cache, and answers when it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_calls = 0
        self.most_calls = 0
        self.num_pages = 0

    def app(self) -> web.Application:
        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.headers.get("X-Session-ID") is None:
                return await handler(request)
            self.num_calls += 1
            self.most_calls = max(self.most_calls, self.num_calls)
            try:
                await self.may_answer.wait()
                return await handler(request)
            finally:
                self.num_calls -= 1

        script = Script.model_validate({"default": {"text": "ready"}})
        app = create_scripted_app(ScriptedSampler(script, TinyTokenizer()))
        app.router.add_get("/metrics", self._metrics)
        app.middlewares.append(counted)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        self.num_pages += 1
        return web.Response(text=PAGE)


async def test_calls_wait_for_their_place_and_a_weight_update_waits_for_none_of_them() -> None:
    engine, gate, proxy, journal = Engine(), Gate(), Proxy(keep_alive_s=0.05), MemoryJournal()
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        engine_url = await stack.enter_async_context(serving(engine.app()))
        pool = BackendPool(3600.0, admission=Admission(patience_s=0.0))
        stack.push_async_callback(pool.close)
        await pool.add(engine_url)
        sessions: list[ModelSession] = []
        for name in ("s0", "s1", "s2"):
            spec = SessionSpec(session_id=name, attempt=1, key=f"gls-{name}")
            sessions.append(ModelSession(spec, pool.engine_for(name, name), journal, gate=gate))
            stack.push_async_callback(sessions[-1].fence, "the test is over")
            proxy.add(sessions[-1])
        url = await stack.enter_async_context(served(proxy))
        asking = [asyncio.create_task(_streamed(url, one)) for one in sessions]
        while pool.places is None or pool.places.num_waiting < 2 or engine.num_calls < 1:
            await asyncio.sleep(0.01)
        update = asyncio.create_task(gate.pause("drain", 600))
        await asyncio.sleep(0.2)  # keep-alives go out
        assert [one.meter.held_s > 0 for one in sessions].count(True) == 2
        engine.may_answer.set()
        assert (await update).is_drained
        assert sum(task.done() for task in asking) <= 1
        gate.resume()
        assert await asyncio.gather(*asking) == ["ready"] * 3
        (view,) = pool.views()
        assert view.cache is not None
        assert (view.cache.num_tokens, view.cache.num_places) == (64, 1)
        assert pool.places.num_waiting == 0
    assert engine.most_calls == 1
    assert sorted(one.session_id for one in journal.completions) == ["s0", "s1", "s2"]
    assert {one.status for one in journal.completions} == {"complete"}


async def test_one_reading_of_an_engines_page_tells_of_its_cache_and_of_its_load() -> None:
    engine = Engine()
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        engine_url = await stack.enter_async_context(serving(engine.app()))
        pool = BackendPool(3600.0, admission=Admission(is_eager=False))
        stack.push_async_callback(pool.close)
        await pool.add(engine_url)
        assert engine.num_pages == 0
        await pool.check()
        (view,) = pool.views()
        assert view.cache is not None
        assert view.speed is not None
        assert (view.cache.num_tokens, view.speed.num_queued, engine.num_pages) == (64, 3, 1)


async def _streamed(url: str, session: ModelSession) -> str:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/s/{session.session_id}/v1", api_key=session.key, max_retries=0
    ) as client:
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "A question that is long enough. " * 8}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])
