"""Servers without token ids, and finding out which kind of engine answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gangline.domain.conversation import Message, ModelCall, Text, message_text
from gangline.domain.errors import EngineIncapable, EngineRefused, EngineUnavailable
from gangline.models.engines.auto import detect_engine
from gangline.models.engines.contract import EngineRequest, ReplyAccumulator
from gangline.models.engines.text.engine import OpenAITextEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.backends.pool import BackendPool
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.serving.scripted.server import scripted_server
from gangline.wire.http.listening import listening
from support.engines.sglang_engine import FakeSglang, sglang_server, text_server
from support.node.proxy import MemoryJournal, served

HELLO = EngineRequest(call=ModelCall(dialect="d", model="m", messages=(Message("user", (Text("hi"),)),)))


@asynccontextmanager
async def _text_engine(**options: Any) -> AsyncGenerator[OpenAITextEngine, None]:
    async with text_server() as url:
        engine = OpenAITextEngine(url, **options)
        try:
            yield engine
        finally:
            await engine.close()


async def test_text_alone_is_refused_unless_the_operator_wants_it_so() -> None:
    async with _text_engine() as engine:
        with pytest.raises(EngineIncapable, match=r"no token ids.*Start vLLM.*capture = \"text\""):
            await engine.probe()


async def test_text_comes_without_ids_and_says_so() -> None:
    async with _text_engine(capture="text") as engine:
        found = await engine.probe()
        assert (found.engine, found.model, found.logprob_kind) == ("openai_text", "plain", "missing")
        assert not found.reports_ids
        reply = await engine.chat(HELLO)
        assert message_text(reply.choices[0].message) == "You said hi."
        assert (reply.prompt_ids, reply.choices[0].sampled_ids, reply.choices[0].logprobs) == (None, None, None)
        folded = ReplyAccumulator()
        async for delta in engine.stream(HELLO):
            folded.feed(delta)
        assert folded.reply().choices[0].message == reply.choices[0].message
        with pytest.raises(EngineRefused, match="cannot count or render"):
            await engine.render(HELLO.call.messages)
        await engine.check_health(5.0)  # by its list of models: it has no /health


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_harness_gets_of_a_text_server_is_recorded_and_marked_untrainable(stream: bool) -> None:
    import openai

    journal, pool = MemoryJournal(), BackendPool(3600.0, capture="text")
    async with text_server() as url:
        await pool.add(url)
        engine = pool.engine_for("s1", "t")
        session = ModelSession(SessionSpec(session_id="s1", attempt=1, key="gls-right"), engine, journal)
        proxy = Proxy()
        proxy.add(session)
        async with (
            served(proxy) as proxy_url,
            openai.AsyncOpenAI(base_url=f"{proxy_url}/s/s1/v1", api_key="gls-right", max_retries=0) as client,
        ):
            for text in ("one", "two"):
                reply: Any = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": text}], stream=stream
                )
                said = [reply.choices[0].message.content] if not stream else [_delta(chunk) async for chunk in reply]
                assert "".join(said) == f"You said {text}."
        await session.fence("over")
        await pool.close()
    assert [message_text(completion.response) for completion in journal.completions] == [
        "You said one.",
        "You said two.",
    ]
    for completion in journal.completions:
        assert completion.certificate.untrainable == "the engine reports no token ids"
        assert completion.certificate.logprobs == "missing"
        assert not completion.trainable
        assert len(completion.sampled_ids) == len(completion.prompt_suffix_ids) == 0


def _delta(chunk: Any) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


async def _kind_of(url: str, **options: Any) -> str:
    engine = await detect_engine(url, **options)
    try:
        return (await engine.capabilities()).engine
    finally:
        await engine.close()


async def test_each_kind_of_engine_is_recognised() -> None:
    async with scripted_server({}) as vllm, sglang_server(FakeSglang()) as sglang, text_server() as text:
        assert await _kind_of(vllm + "/v1") == "vllm"
        assert await _kind_of(sglang) == "sglang"
        assert await _kind_of(text, capture="text") == "openai_text"
        with pytest.raises(EngineIncapable, match="nothing it samples can be trained on"):
            await _kind_of(text)


async def test_a_known_kind_without_ids_says_what_it_lacks_and_may_still_serve_text() -> None:
    stripped = {"default": {"text": "hi", "faults": {"no_token_ids": True}}}
    async with scripted_server(stripped) as vllm, sglang_server(FakeSglang(strips_fields=True)) as sglang:
        with pytest.raises(EngineIncapable, match="return_token_ids"):
            await _kind_of(vllm)
        with pytest.raises(EngineIncapable, match="stock routers"):
            await _kind_of(sglang)
        assert await _kind_of(vllm, capture="text") == "openai_text"
        assert await _kind_of(sglang, capture="text") == "openai_text"


async def test_a_server_that_refuses_calls_for_now_may_serve_text() -> None:
    """As the one of `gangline serve`, where no client plays."""

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models)])
    async with listening(app, shutdown_s=1.0, host="127.0.0.1", port=0) as (host, port, *_):
        assert await _kind_of(f"http://{host}:{port}", capture="text") == "openai_text"


async def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9 "):
        await detect_engine("http://127.0.0.1:9")


async def test_an_engine_that_was_found_is_asked_itself() -> None:
    async with scripted_server({"default": {"text": "hello"}}) as url:
        engine = await detect_engine(url)
        assert isinstance(engine, VllmEngine)
        assert (await engine.probe()).engine == "vllm"
        assert message_text((await engine.chat(HELLO)).choices[0].message) == "hello"
        folded = ReplyAccumulator()
        async for delta in engine.stream(HELLO):
            folded.feed(delta)
        assert message_text(folded.reply().choices[0].message) == "hello"
        ids = await engine.render(HELLO.call.messages)
        assert (await engine.detokenize(ids.tolist())).startswith("<|im_start|>user\nhi")
        await engine.check_health(5.0)
        await engine.close()
