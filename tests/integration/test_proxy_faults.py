"""What goes wrong around a call: keys, bodies, engines, clients, disks. Who is told what, and what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import openai
import pytest

from gangline.domain.errors import DiskFull
from gangline.models.engine_server.app import serving
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.models.engines.contract import EngineReply, EngineRequest
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.settings.node import CallLimits
from support.engines.held import HeldEngine
from support.node.proxy import MemoryJournal, Proxied, proxied, proxied_engine

HELLO: Any = [{"role": "user", "content": "hello"}]
SLOW = {"rules": [{"pattern": "slow", "text": "a b c d e f g h i j k l m n o p q r s t", "token_delay_s": 0.05}]}


async def _post(running: Proxied, path: str = "", *, key: str | None = None, **options: Any) -> tuple[int, Any, Any]:
    headers = {"Authorization": f"Bearer {running.session.key if key is None else key}"} if key != "" else {}
    async with aiohttp.ClientSession() as client:
        url = path or f"{running.base_url}/chat/completions"
        async with client.post(url, headers=headers, **options) as response:
            return response.status, await response.json(), response.headers


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": HELLO} | fields


async def _recorded(journal: MemoryJournal, count: int = 1) -> None:
    async with asyncio.timeout(10):
        while len(journal.completions) < count:
            await asyncio.sleep(0.005)


# -- keys and bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "wrong", "gls-other", "\xff"])
async def test_a_wrong_missing_or_foreign_key_opens_nothing(key: str) -> None:
    async with proxied({}) as running:
        other = ModelSession(SessionSpec(session_id="s2", attempt=1, key="gls-other"), running.engine, running.journal)
        running.proxy.add(other)
        status, answer, _ = await _post(running, key=key, json=_body())
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
        assert running.journal.completions == []


async def test_a_removed_sessions_key_is_dead_on_both_paths() -> None:
    async with proxied({}) as running:
        running.proxy.remove("s1")
        assert (await _post(running, json=_body()))[0] == 401
        assert (await _post(running, f"{running.url}/v1/chat/completions", json=_body()))[0] == 401


async def test_the_sdk_raises_its_own_authentication_error() -> None:
    async with proxied({}) as running, running.client(api_key="nope") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=HELLO)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(4):
            yield b"x" * 500

    async with proxied({}, limits=CallLimits(max_body_bytes=1024)) as running:
        status, answer, _ = await _post(running, data=pieces() if chunked else b"x" * 2000)
        assert status == 413
        assert answer["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("path", ["/s/s1/v1/embeddings", "/s/s1/v2/x", "/s/s1", "/s/s1/", "/v1/completions", "/v1/x/y"])
async def test_what_is_not_served_is_404_and_names_what_is(path: str) -> None:
    async with proxied({}) as running:
        status, answer, _ = await _post(running, running.url + path, json=_body())
        assert status == 404
        assert "/v1/chat/completions" in answer["error"]["message"]


async def test_health_checks_of_clients_are_answered() -> None:
    async with proxied({}) as running, aiohttp.ClientSession() as client:
        for path in ("/", "/s/s1", "/api/hello"):
            async with client.head(running.url + path) as response:
                assert response.status == 200


async def test_model_lists_name_the_served_model() -> None:
    async with proxied({"model": "m1"}) as running, running.client() as client:
        assert [model.id async for model in client.models.list()] == ["m1"]
        assert (await client.models.retrieve("m1")).id == "m1"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("m2")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO}, "model"),
        (_body(messages=[]), "messages"),
        (
            _body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0].image_url.url",
        ),
        (_body(temperature="hot"), "temperature"),
        (_body(logit_bias={"1": 2}), "logit_bias"),
    ],
)
async def test_a_bad_body_is_400_names_the_field_and_is_no_turn(body: Any, param: str) -> None:
    async with proxied({}) as running:
        for stream in (False, True):
            status, answer, _ = await _post(running, json=body | {"stream": stream})
            assert status == 400
            assert answer["error"]["param"] == param
        assert running.session.num_calls == 0


# -- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("faults", "status", "retryable"),
    [
        ({"status": 500}, 503, True),
        ({"garbage": True}, 502, True),
        ({"drop_connection": 0}, 503, True),
        ({"no_token_ids": True}, 502, False),
        ({"status": 404}, 502, False),
    ],
)
async def test_an_engine_fault_is_told_in_shape_and_is_no_turn(
    stream: bool, faults: dict[str, Any], status: int, retryable: bool
) -> None:
    script = {"rules": [{"pattern": "hello", "text": "", "faults": faults}]}
    async with proxied(script) as running:
        got, answer, headers = await _post(running, json=_body(stream=stream))
        assert got == status
        assert "engine" in answer["error"]["message"]
        assert (headers.get("x-should-retry") != "false") == retryable
        assert running.journal.completions == []
        assert running.session.num_calls == 0
        assert running.session.failures.engine is not None
        assert running.session.failures.engine.retryable == retryable


async def test_a_stream_that_breaks_after_it_began_ends_with_an_error_event() -> None:
    script = {"rules": [{"pattern": "hello", "text": "one two three four", "faults": {"drop_connection": 3}}]}
    async with proxied(script) as running, running.client() as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="engine"):
            async for _ in stream:
                pass
        assert running.journal.completions == []


async def test_an_answer_clears_the_engine_failure_before_it() -> None:
    script = {"rules": [{"pattern": "hello", "text": "hi", "faults": {"status": 500}}]}
    async with proxied(script) as running:
        assert (await _post(running, json=_body()))[0] == 503
        assert (await _post(running, json=_body()))[0] == 200
        assert running.session.failures.engine is None
        assert running.session.num_calls == 1


async def test_an_engine_that_is_down_is_named() -> None:
    async with proxied_engine("http://127.0.0.1:9") as running:
        status, answer, _ = await _post(running, json=_body())
        assert status == 503
        assert "http://127.0.0.1:9" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_has_openais_code_and_is_not_the_engines_failure(stream: bool) -> None:
    async with proxied({"context_length": 60}) as running:
        status, answer, _ = await _post(
            running, json=_body(stream=stream, messages=[{"role": "user", "content": "word " * 100}])
        )
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert running.session.failures.engine is None


async def test_what_the_engine_refuses_about_a_body_is_400_and_the_callers() -> None:
    async with proxied({}) as running:
        status, answer, _ = await _post(running, json=_body(top_p=7))
        assert status == 400
        assert "top_p" in answer["error"]["message"]
        assert running.session.failures.engine is None


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_that_are_no_numbers_make_the_record_untrainable(stream: bool) -> None:
    script = {"rules": [{"pattern": "hello", "text": "hi there", "faults": {"nan_logprobs": True}}]}
    async with proxied(script) as running:
        status, *_ = await _post(running, json=_body()) if not stream else (await _stream_status(running),)
        assert status == 200
        (completion,) = running.journal.completions
        assert completion.certificate.untrainable == "log-prob of sampled token 0 is not finite"
        assert not completion.trainable
        assert len(completion.logprobs) == len(completion.sampled_ids)


async def _stream_status(running: Proxied) -> int:
    async with running.client() as client:
        async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
            pass
    return 200


# -- clients and sessions that go away -------------------------------------------------------------------------------


class AskedSampler(ScriptedSampler):
    """A scripted sampler that sets an event when a sequence begins."""

    def __init__(self, script: Script, tokenizer: TinyTokenizer) -> None:
        super().__init__(script, tokenizer)
        self.asked = asyncio.Event()

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        self.asked.set()
        async for token in super().sample(request):
            yield token


async def _disconnected(asked: asyncio.Task[Any]) -> None:
    asked.cancel()
    await asyncio.wait({asked})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_the_engine_and_leaves_an_aborted_record(stream: bool) -> None:
    engine = HeldEngine()
    async with proxied_engine(engine) as running:
        async with running.client() as client:
            if stream:
                opened = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO, stream=True))
                (await engine.asked(1)).say("a", "b")
                async for chunk in await opened:
                    if chunk.choices[0].delta.content:
                        break
            else:
                asked = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
                await engine.asked(1)
                await _disconnected(asked)
        await _recorded(running.journal)
        assert engine.calls[0].was_cancelled
        (completion,) = running.journal.completions
        assert completion.status == "aborted"
        assert completion.certificate.untrainable == "aborted: client disconnected"
        assert not completion.trainable
        if stream:
            assert 0 < len(completion.sampled_ids) < 20
            assert len(running.session.tree.prompt_ids(completion)) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_frees_its_place_in_the_engine(stream: bool) -> None:
    endless = Script.model_validate({"default": {"text": "a b c", "token_delay_s": 600}})
    sampler = AskedSampler(endless, TinyTokenizer())
    async with serving(create_scripted_app(sampler)) as engine_url, proxied_engine(engine_url) as running:
        await running.engine.capabilities()  # probed by calls of its own
        sampler.asked.clear()
        async with running.client() as client:
            asked = asyncio.create_task(_finishes(client, stream=stream))
            async with asyncio.timeout(30):
                await sampler.asked.wait()
            await _disconnected(asked)
        async with asyncio.timeout(10):
            await sampler.pause("wait")
        await _recorded(running.journal)
        assert running.journal.completions[0].status == "aborted"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fence_answers_calls_in_flight_and_refuses_later_ones(stream: bool) -> None:
    async with proxied(SLOW) as running, running.client() as client:
        slow: Any = [{"role": "user", "content": "slow"}]
        await running.engine.capabilities()  # probed by calls of its own
        began, chat = asyncio.Event(), running.engine.chat

        async def seen_chat(request: EngineRequest) -> EngineReply:
            began.set()
            return await chat(request)

        running.engine.chat = seen_chat

        async def ask() -> None:
            if not stream:
                await client.chat.completions.create(model="m", messages=slow)
                return
            async for _ in await client.chat.completions.create(model="m", messages=slow, stream=True):
                began.set()

        asked = asyncio.create_task(ask())
        await began.wait()
        await running.session.fence("the budget of this session has ended")
        assert [c.status for c in running.journal.completions] == ["aborted"]
        with pytest.raises(openai.APIError, match="budget of this session"):
            await asked
        status, answer, _ = await _post(running, json=_body())
        assert (status, answer["error"]["code"]) == (403, "session_over")
        await running.session.fence("again")


async def test_the_turn_limit_refuses_the_call_beyond_it_and_says_so() -> None:
    async with proxied({}, max_turns=1) as running:
        assert (await _post(running, json=_body()))[0] == 200
        assert not running.session.limit_reached.is_set()
        status, answer, _ = await _post(running, json=_body())
        assert (status, answer["error"]["code"]) == (403, "session_over")
        assert running.session.limit_reached.is_set()
        assert running.session.num_calls == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_agent_hung_up_on_is_a_turn(stream: bool) -> None:
    """Else an agent passes its limit of turns by hanging up when it has seen enough."""
    engine = HeldEngine()
    async with proxied_engine(engine, max_turns=1) as running:
        async with running.client() as client:
            asked = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO, stream=stream))
            await engine.asked(1)
            await _disconnected(asked)
        await _recorded(running.journal)
        assert [one.status for one in running.journal.completions] == ["aborted"]
        assert running.session.num_calls == 1
        status, answer, _ = await _post(running, json=_body())
        assert (status, answer["error"]["code"]) == (403, "session_over")
        assert running.session.limit == "turn_limit"


async def test_the_token_limit_refuses_the_call_after_it_was_reached() -> None:
    async with proxied({}, max_sampled_tokens=2) as running:
        assert (await _post(running, json=_body()))[0] == 200
        assert sum(len(one.sampled_ids) for one in running.journal.completions) >= 2
        assert running.session.limit is None
        status, answer, _ = await _post(running, json=_body())
        assert (status, answer["error"]["code"]) == (403, "session_over")
        assert running.session.limit_reached.is_set()
        assert (running.session.limit, running.session.num_calls) == ("token_limit", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_journaled_is_not_answered_and_not_in_the_tree(stream: bool) -> None:
    async with proxied({}) as running:
        running.journal.failure = DiskFull("no space left for the journal")
        if stream:
            async with running.client() as client:
                with pytest.raises(openai.APIError, match="no space left"):
                    await _finishes(client)
        else:
            status, answer, _ = await _post(running, json=_body())
            assert (status, answer["error"]["code"]) == (507, "disk_full")
        assert len(running.session.tree) == 0
        assert running.session.failures.store is not None
        running.journal.failure = None
        assert (await _post(running, json=_body()))[0] == 200
        assert [c.completion_id for c in running.session.tree] == ["c1-000001"]


async def test_of_several_choices_all_are_kept_or_none() -> None:
    async with proxied({}) as running:
        running.journal.failure = DiskFull("no space left for the journal")
        assert (await _post(running, json=_body(n=3)))[0] == 507
        assert len(running.session.tree) == 0
        running.journal.failure = None
        assert (await _post(running, json=_body(n=3)))[0] == 200
        assert [c.choice_index for c in running.session.tree] == [0, 1, 2]


async def _finishes(client: openai.AsyncOpenAI, **options: Any) -> list[str]:
    stream = await client.chat.completions.create(**({"model": "m", "messages": HELLO, "stream": True} | options))
    return [choice.finish_reason async for chunk in stream for choice in chunk.choices if choice.finish_reason]


async def test_nothing_is_finished_before_the_journal_has_it() -> None:
    async with proxied({}) as running:
        gate, reached = asyncio.Event(), asyncio.Event()
        append_all = running.journal.append_all

        async def slow_append(completions: Any) -> None:
            reached.set()
            await gate.wait()
            await append_all(completions)

        running.journal.append_all = slow_append  # type: ignore[method-assign]
        async with running.client() as client:
            asked = asyncio.create_task(_finishes(client))
            await reached.wait()
            fence = asyncio.create_task(running.session.fence("over"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asked), 0.1)
            assert not fence.done()
            gate.set()
            assert await asked == ["stop"]
            await fence
            assert [c.status for c in running.journal.completions] == ["complete"]


async def test_a_session_without_an_engine_is_over_as_soon_as_it_is_fenced() -> None:
    engine, journal = VllmEngine("http://127.0.0.1:9"), MemoryJournal()
    session = ModelSession(SessionSpec(session_id="s1", attempt=1, key="k"), engine, journal)
    await session.fence("never used")
    assert session.num_calls == 0
    await engine.close()
