"""Ids that an engine does not have: it is asked for the size of its vocabulary, and none beyond is trained on."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from aiohttp import web

from gangline.models.engine_server.app import serving
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.sglang_engine import FakeSglang, sglang_server
from support.node.proxy import Proxied, proxied_engine

HELLO: Any = [{"role": "user", "content": "hello"}]
TINY_IDS = TinyTokenizer().num_ids


async def _complete(running: Proxied) -> None:
    async with running.client() as client:
        await client.chat.completions.create(model="m", messages=HELLO)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([5, 151935], None),
        ([5, 151936], "sampled token 1 is 151936, which is outside of the vocabulary"),
        ([2**31 - 1, 5], "sampled token 0 is 2147483647, which is outside of the vocabulary"),
    ],
)
async def test_a_turn_with_ids_beyond_sglangs_vocabulary_is_not_trained_on(ids: list[int], why: str | None) -> None:
    async with (
        sglang_server(FakeSglang(vocab_size=151936, odd_ids=ids)) as url,
        proxied_engine(SglangEngine(url)) as running,
    ):
        await _complete(running)
        (record,) = running.journal.completions
        assert (record.certificate.untrainable, record.trainable) == (why, why is None)


@pytest.mark.parametrize("ids", [[-1, 5], [5, 2**31], [5, 2**64]])
async def test_ids_that_no_engine_has_are_a_bad_gateway(ids: list[int]) -> None:
    async with (
        sglang_server(FakeSglang(odd_ids=ids, checks_biases=False)) as url,
        proxied_engine(SglangEngine(url)) as running,
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            await _complete(running)
        assert (refused.value.status_code, refused.value.code) == (502, "engine_malformed")
        assert running.journal.completions == []


async def test_an_engine_behind_a_router_that_drops_the_question_has_an_unknown_vocabulary() -> None:
    async with (
        sglang_server(FakeSglang(odd_ids=[5, 151936], checks_biases=False)) as url,
        proxied_engine(SglangEngine(url)) as running,
    ):
        assert (await running.engine.capabilities()).num_ids is None
        await _complete(running)
        assert running.journal.completions[0].trainable


@pytest.mark.parametrize(("token", "is_known"), [(TINY_IDS - 1, True), (TINY_IDS, False), (2**31 - 1, False)])
async def test_a_turn_with_ids_beyond_vllms_vocabulary_is_not_trained_on(token: int, is_known: bool) -> None:
    @web.middleware
    async def alters_ids(request: web.Request, handler: Any) -> web.StreamResponse:
        answer = await handler(request)
        asked = json.loads(await request.read()) if request.path == "/v1/chat/completions" else {"stream": True}
        if asked.get("stream") or answer.status != 200:
            return answer
        fields = json.loads(answer.body)
        fields["choices"][0]["token_ids"][0] = token
        return web.json_response(fields)

    app = create_scripted_app(ScriptedSampler(Script(), TinyTokenizer()))
    app.middlewares.append(alters_ids)
    async with serving(app) as url, proxied_engine(VllmEngine(url)) as running:
        assert (await running.engine.capabilities()).num_ids == TINY_IDS
        await _complete(running)
        (record,) = running.journal.completions
        assert record.trainable == is_known
        assert is_known or f"is {token}, which is outside" in (record.certificate.untrainable or "")
