"""A session's calls carry one id, so that a balancer behind the engine's address keeps them at one replica."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import warnings
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from gangline.domain.completion import SPAN
from gangline.domain.conversation import Message, ModelCall, Text
from gangline.domain.ids import root_span_of
from gangline.models.engine_server.app import create_app, serving
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.models.engines.contract import Engine, EngineRequest
from gangline.models.engines.generate.engine import GenerateEngine
from gangline.models.engines.generate.template import TemplateText
from gangline.models.engines.http import SESSION_HEADERS, EngineHttp
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.models.engines.text.engine import OpenAITextEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.backends.pool import BackendPool
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.trainers.verl.sampler import VerlSampler
from support.engines.pooled import pooled
from support.engines.sglang_engine import FakeSglang

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what verl imports
    verl_router = importlib.import_module("verl.workers.rollout.router")

TOKENIZER = TinyTokenizer()
ASKED = EngineRequest(call=ModelCall(dialect="test", model="", messages=(Message("user", (Text("Hello"),)),)))


def by_template(route: Any) -> Callable[[str], Engine]:
    return lambda url: GenerateEngine(EngineHttp(url), TemplateText(TOKENIZER), route=route, max_context=4096)


ENGINES: dict[str, tuple[Callable[[str], Engine], bool]] = {
    "vllm": (VllmEngine, False),
    "sglang": (SglangEngine, True),
    "openai_text": (lambda url: OpenAITextEngine(url, capture="text"), False),
    "generate_vllm": (by_template("vllm"), False),
    "generate_sglang": (by_template("sglang"), True),
}


def _scripted() -> web.Application:
    return create_scripted_app(ScriptedSampler(Script.model_validate({"default": {"text": "ready"}}), TOKENIZER))


async def _whole(engine: Engine, request: EngineRequest) -> None:
    await engine.chat(request)


async def _streamed(engine: Engine, request: EngineRequest) -> None:
    async for _ in engine.stream(request):
        pass


@pytest.mark.parametrize("ask", [_whole, _streamed])
@pytest.mark.parametrize("kind", ENGINES)
async def test_every_client_names_the_session(
    kind: str, ask: Callable[[Engine, EngineRequest], Awaitable[None]]
) -> None:
    make, speaks_sglang = ENGINES[kind]
    named = list[tuple[str | None, ...]]()

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        named.append(tuple(request.headers.get(name) for name in SESSION_HEADERS))
        return await handler(request)

    app = FakeSglang().app() if speaks_sglang else _scripted()
    app.middlewares.append(note)
    async with serving(app) as url:
        engine = make(url)
        session = await pooled(engine)
        assert not any(any(one) for one in named)  # a probe is nobody's call
        named.clear()
        await ask(session, ASKED)
        assert ("s", "s") in named
        await engine.close()


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("ask", [_whole, _streamed])
@pytest.mark.parametrize("kind", ENGINES)
async def test_every_client_names_the_calls_span_where_there_are_traces(
    kind: str, ask: Callable[[Engine, EngineRequest], Awaitable[None]], is_traced: bool
) -> None:
    make, speaks_sglang = ENGINES[kind]
    named = set[str | None]()

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        named.add(request.headers.get("traceparent"))
        return await handler(request)

    app = FakeSglang().app() if speaks_sglang else _scripted()
    app.middlewares.append(note)
    async with serving(app) as url:
        engine = make(url)
        session = await pooled(engine, is_traced=is_traced)
        assert named == {None}  # a probe is nobody's call
        named.clear()
        await ask(session, ASKED)
        spans = named - {None}
        trace_id, _ = root_span_of("t")
        assert len(spans) == is_traced
        assert all(re.fullmatch(rf"00-{trace_id:032x}-[0-9a-f]{{16}}-01", str(span)) for span in spans)
        if is_traced and ask is _whole:
            reply = await session.chat(ASKED)
            assert f"-{reply.metadata[SPAN]}-" in str(named - spans)
        await engine.close()


@pytest.mark.parametrize("path", ["chat", "completions", "generate"])
async def test_our_engine_server_gives_samplers_the_session(path: str) -> None:
    class Noting(ScriptedSampler):
        async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
            named.append(request.session_id)
            async for token in super().sample(request):
                yield token

    named = list[str | None]()
    messages = [{"role": "user", "content": "Hello"}]
    route, body = {
        "chat": ("/v1/chat/completions", {"messages": messages}),
        "completions": ("/v1/completions", {"prompt": "Hello"}),
        "generate": ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
    }[path]
    sampler = Noting(Script.model_validate({"default": {"text": "ready"}}), TOKENIZER)
    async with serving(create_app(sampler)) as url:
        http = EngineHttp(url)
        await http.post(route, msgspec.json.encode(body), {SESSION_HEADERS[0]: "s1"})
        await http.post(route, msgspec.json.encode(body))
        await http.close()
    assert named == ["s1", None]


async def test_verls_balancer_returns_sessions_to_their_replicas() -> None:
    """48 sessions of 10 turns, interleaved, over 8 replicas: verl's own balancer, and everything between a session's
    call and it except Ray."""
    balancer = verl_router.GlobalRequestLoadBalancer(servers={f"replica{number}": None for number in range(8)})
    replicas = defaultdict[str, list[str]](list)
    rng = random.Random(7)

    async def generate(*, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        server, _ = balancer.acquire_server(request_id)
        if (said := re.search(r"this is (s\d+)", TOKENIZER.decode(prompt_ids))) is not None:
            replicas[said[1]].append(server)
        await asyncio.sleep(rng.uniform(0.0, 0.005))
        balancer.release_server(server)
        return SimpleNamespace(token_ids=[eos], log_probs=[-0.5], stop_reason="completed", extra_fields={})

    async def live(session: Engine, name: str) -> None:
        call = msgspec.structs.replace(ASKED.call, messages=(Message("user", (Text(f"this is {name}"),)),))
        for _ in range(10):
            await session.chat(EngineRequest(call=call))

    (eos,) = TOKENIZER.eos_ids
    sampler = VerlSampler(generate, TOKENIZER, model_name="policy", context_length=4096, num_ids=300)
    async with serving(create_app(sampler, dev_mode=False)) as url, AsyncExitStack() as stack:
        pool = BackendPool(3600.0)
        stack.push_async_callback(pool.close)
        await pool.add(url, kind="vllm")
        await asyncio.gather(*(live(pool.engine_for(f"s{one}", "task"), f"s{one}") for one in range(48)))
    turns = [(before, after) for line in replicas.values() for before, after in pairwise(line)]
    assert len(turns) == 48 * 9
    assert sum(before == after for before, after in turns) >= 0.95 * len(turns)
    assert len({line[0] for line in replicas.values()}) == 8
