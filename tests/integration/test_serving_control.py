"""Pausing, new weights, and clients that leave, on a sampler that is driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from gangline.models.engine_server.app import create_app, serving
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.sdk.http_calls import status_of


class HandSampler(ScriptedSampler):
    """Samples what the test puts in its queue; None breaks it."""

    def __init__(self) -> None:
        super().__init__(Script(model="m"), TinyTokenizer())
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()
        self.requests: list[SampleRequest] = []
        self.started = asyncio.Semaphore(0)
        self.closed = asyncio.Semaphore(0)

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        self.requests.append(request)
        self.started.release()
        try:
            while True:
                token_id = await self.tokens.get()
                if token_id is None:
                    raise RuntimeError("the GPU fell off")
                reason = "stop" if token_id in request.stop_ids else None
                yield SampledToken(token_id, -0.5, self.weight_version, reason)
        finally:
            self.closed.release()


BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "return_weight_versions": True}
SLOW = {"pattern": "slowly", "text": "abcdef", "token_delay_s": 3600}
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture
async def sampler() -> HandSampler:
    return HandSampler()


@pytest_asyncio.fixture
async def session(sampler: HandSampler) -> AsyncGenerator[aiohttp.ClientSession, None]:
    async with serving(create_app(sampler)) as url, aiohttp.ClientSession(url) as http:
        yield http


@pytest_asyncio.fixture
async def scripted() -> AsyncGenerator[tuple[ScriptedSampler, aiohttp.ClientSession], None]:
    script = Script.model_validate({"rules": [SLOW], "default": {"text": "abcdef"}})
    engine = ScriptedSampler(script, TinyTokenizer())
    async with serving(create_scripted_app(engine)) as url, aiohttp.ClientSession(url) as http:
        yield engine, http


async def control(http: aiohttp.ClientSession, path: str, body: Any = None) -> Any:
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_cancels_its_sequences(
    sampler: HandSampler, session: aiohttp.ClientSession, stream: bool, n: int
) -> None:
    call = asyncio.create_task(session.post(CHAT, json={**BODY, "stream": stream, "n": n}))
    for _ in range(n):
        await sampler.started.acquire()
    if stream:
        (await call).close()
    else:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    async with asyncio.timeout(20):
        for _ in range(n):
            await sampler.closed.acquire()


async def test_a_weight_update_inside_a_reply_shows_in_its_spans(
    sampler: HandSampler, session: aiohttp.ClientSession
) -> None:
    call = asyncio.create_task(session.post(CHAT, json={**BODY, "stream": True, "return_token_ids": True}))
    response = await call
    ids = sampler.tokenizer.encode("abc")
    for token_id in ids:
        sampler.tokens.put_nowait(token_id)
    chunks = response.content
    while b'"content":"c"' not in await chunks.readline():
        pass
    await control(session, "/update_weight_version", {"new_version": "7"})
    sampler.tokens.put_nowait(min(sampler.tokenizer.eos_ids))
    rest = await chunks.read()
    assert b'"weight_versions":[{"version":"0","start":0,"end":3},{"version":"7","start":3,"end":4}]' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_what_a_request_asks_for_reaches_the_sampler(
    sampler: HandSampler, session: aiohttp.ClientSession
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 40, "max_tokens": 5, "min_tokens": 1, "n": 2}
    for token_id in [*sampler.tokenizer.eos_ids] * 2:
        sampler.tokens.put_nowait(token_id)
    async with session.post(CHAT, json={**BODY, **asked, "tools": [tool]}) as response:
        assert response.status == 200
    assert sorted((r.choice_index, r.seed) for r in sampler.requests) == [(0, 40), (1, 41)]
    for request in sampler.requests:
        assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 7)
        assert (request.max_tokens, request.min_tokens) == (5, 1)
        assert (request.messages, request.tools) == (BODY["messages"], [tool])
        assert request.prompt_ids == sampler.tokenizer.render(BODY["messages"], tools=[tool])


async def test_stop_strings_wait_for_the_least_number_of_tokens(
    sampler: HandSampler, session: aiohttp.ClientSession
) -> None:
    for token_id in sampler.tokenizer.encode("xyzxyz"):
        sampler.tokens.put_nowait(token_id)
    async with session.post(CHAT, json={**BODY, "stop": "yz", "min_tokens": 3}) as response:
        reply = await response.json()
    assert reply["choices"][0]["message"]["content"] == "xyzx"
    assert reply["usage"]["completion_tokens"] == 6


async def test_a_sampler_that_breaks_is_an_error_and_not_a_short_reply(
    sampler: HandSampler, session: aiohttp.ClientSession
) -> None:
    sampler.tokens.put_nowait(None)
    async with session.post(CHAT, json=BODY) as response:
        assert response.status == 500
        assert "the GPU fell off" in (await response.json())["error"]["message"]
    sampler.tokens.put_nowait(None)
    async with session.post(CHAT, json={**BODY, "stream": True}) as response:
        events = (await response.text()).split("\n\n")
    assert events[-3].startswith('data: {"error":{"message":"RuntimeError: the GPU fell off"')
    assert events[-2] == "data: [DONE]"


Engine = tuple[ScriptedSampler, aiohttp.ClientSession]


async def test_new_calls_wait_while_the_engine_is_paused(scripted: Engine) -> None:
    _, http = scripted
    await control(http, "/pause?mode=keep")
    call = asyncio.create_task(http.post(CHAT, json=BODY))
    assert (await (await http.get("/is_paused")).json()) == {"is_paused": True}
    assert not call.done()
    await control(http, "/resume")
    reply = await (await call).json()
    assert reply["choices"][0]["message"]["content"] == "abcdef"
    assert (await (await http.get("/is_paused")).json()) == {"is_paused": False}


async def test_abort_ends_a_running_reply_with_what_it_has(scripted: Engine) -> None:
    _, http = scripted
    body = {**BODY, "messages": [{"role": "user", "content": "slowly"}], "stream": True}
    stream = await http.post(CHAT, json=body)
    while b'"content":"a"' not in await stream.content.readline():
        pass
    await control(http, "/pause?mode=abort")
    rest = await stream.text()
    assert '"finish_reason":"abort"' in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_wait_lets_running_replies_end_before_it_answers(scripted: Engine) -> None:
    engine, http = scripted
    stream = await http.post(CHAT, json={**BODY, "stream": True})
    await control(http, "/pause?mode=wait")
    assert engine._num_running == 0
    assert '"finish_reason":"stop"' in await stream.text()


async def test_weights_load_from_a_folder_and_a_missing_one_is_refused(scripted: Engine, tmp_path: Path) -> None:
    _, http = scripted
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    assert await control(http, "/collective_rpc", rpc) == {"results": [None]}
    for kwargs in ({"weights_path": str(tmp_path / "gone")}, {}):
        async with http.post("/collective_rpc", json={**rpc, "kwargs": kwargs}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "kwargs.weights_path"


async def test_the_version_is_reported_and_must_be_a_number(scripted: Engine) -> None:
    _, http = scripted
    await control(http, "/update_weight_version", {"new_version": "12"})
    assert await (await http.get("/weight_info")).json() == {"weight_version": "12"}
    for wrong in ("new", "-1", 3):
        async with http.post("/update_weight_version", json={"new_version": wrong}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "new_version")


async def test_without_dev_mode_there_is_no_control(sampler: HandSampler) -> None:
    async with serving(create_app(sampler, dev_mode=False)) as url, aiohttp.ClientSession(url) as http:
        assert await status_of(http, "POST", "/pause") == 404
        assert await status_of(http, "GET", "/health") == 200
