"""Which request is a retry, and what it is given: never a second sample of a call, never a replay of a resample."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import aiohttp
import openai
import pytest

from gangline.domain.conversation import ModelCall
from support.engines.held import HeldEngine
from support.node.proxy import Proxied, proxied, proxied_engine

BODY: Any = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
STREAM = BODY | {"stream": True}


async def _ask(running: Proxied, body: Any = BODY, **headers: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as client:
        url, key = f"{running.base_url}/chat/completions", {"Authorization": f"Bearer {running.session.key}"}
        async with client.post(url, json=body, headers=key | headers) as response:
            return response.status, await response.read()


def _asking(running: Proxied, body: Any = BODY, **headers: str) -> asyncio.Task[tuple[int, bytes]]:
    return asyncio.create_task(_ask(running, body, **headers))


async def _gone(task: asyncio.Task[Any], running: Proxied) -> None:
    """The client disconnects, and the proxy has seen it."""
    task.cancel()
    await asyncio.wait({task})
    async with asyncio.timeout(10):
        while any(entry.num_listeners for entry in running.session._retries._entries):
            await asyncio.sleep(0.005)


async def _attached(running: Proxied, number: int) -> None:
    async with asyncio.timeout(10):
        while running.session._retries._entries[-1].num_listeners < number:
            await asyncio.sleep(0.005)


RETRY = {"x-stainless-retry-count": "1"}


async def test_a_marked_retry_attaches_to_the_call_in_flight_and_both_get_one_answer() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine) as running:
        first = _asking(running)
        call = await engine.asked(1)
        second = _asking(running, **RETRY)
        await _attached(running, 2)
        call.finish("hi")
        assert await first == await second
        assert len(engine.calls) == 1
        (completion,) = running.journal.completions
        assert completion.metadata["num_replays"] == 1
        assert running.session.num_calls == 1


async def test_the_official_sdks_retry_after_a_timeout_finds_its_call() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, retry_grace_s=600) as running:
        async with running.client(max_retries=50, timeout=0.2) as client:
            asked = asyncio.create_task(client.chat.completions.create(**BODY))
            call = await engine.asked(1)
            async with asyncio.timeout(20):
                while running.session._retries._entries[0].flight.num_replays == 0:
                    await asyncio.sleep(0.005)
            call.finish("hi")
            assert (await asked).choices[0].message.content == "hi"
        assert len(engine.calls) == 1
        assert [c.status for c in running.journal.completions] == ["complete"]


async def test_the_same_body_again_finds_the_call_whose_client_is_gone() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, retry_grace_s=600) as running:
        first = _asking(running)
        call = await engine.asked(1)
        await _gone(first, running)
        second = _asking(running)
        await _attached(running, 1)
        call.finish("hi")
        assert (await second)[0] == 200
        assert len(running.journal.completions) == 1


async def test_an_answer_that_nobody_took_is_replayed() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, retry_grace_s=600) as running:
        first = _asking(running)
        call = await engine.asked(1)
        await _gone(first, running)
        call.finish("hi", " there")
        async with asyncio.timeout(10):
            while not running.journal.completions:
                await asyncio.sleep(0.005)
        status, answer = await _ask(running)
        assert (status, b"hi there" in answer) == (200, True)
        assert len(engine.calls) == 1
        assert len(running.session.tree) == 1


@pytest.mark.parametrize("headers", [RETRY, {"idempotency-key": "k1"}])
async def test_a_delivered_answer_is_replayed_to_a_retry_that_says_so_byte_for_byte(headers: dict[str, str]) -> None:
    async with proxied({}) as running:
        key = {name: value for name, value in headers.items() if name == "idempotency-key"}
        for body in (BODY, STREAM):
            first = await _ask(running, body, **key)
            again = await _ask(running, body, **headers)
            if body is BODY:
                assert first == again
            assert _text(first[1]) == _text(again[1])
        assert len(running.journal.completions) == 2


def _text(answer: bytes) -> tuple[bytes, str]:
    """Reply id and text, however it was cut into chunks."""
    import json

    if answer.startswith(b"data:"):
        chunks = [json.loads(line[6:]) for line in answer.decode().split("\n\n") if line and "[DONE]" not in line]
        text = "".join(choice["delta"].get("content") or "" for c in chunks for choice in c["choices"])
        return chunks[0]["id"], text
    body = json.loads(answer)
    return body["id"], body["choices"][0]["message"]["content"]


async def test_asking_again_after_a_delivered_answer_is_a_new_sample() -> None:
    async with proxied({}) as running:
        for body in (BODY, BODY, STREAM, STREAM):
            assert (await _ask(running, body))[0] == 200
        assert len(running.journal.completions) == 4


async def test_the_same_body_several_times_at_once_is_several_samples() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine) as running:
        asked = [_asking(running, **{"idempotency-key": str(number)}) for number in range(3)]
        for number in range(3):
            (await engine.asked(number + 1)).finish("hi")
        await asyncio.gather(*asked)
        assert len(running.journal.completions) == 3


async def test_a_retry_with_another_idempotency_key_is_another_call() -> None:
    async with proxied({}) as running:
        await _ask(running, **{"idempotency-key": "a"})
        await _ask(running, **RETRY | {"idempotency-key": "b"})
        assert len(running.journal.completions) == 2


async def test_a_session_that_went_on_had_its_answer() -> None:
    async with proxied({}) as running, running.client() as client:
        await _ask(running)
        reply: Any = running.journal.completions[0].response.parts[0]
        onwards: Any = [
            *BODY["messages"],
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "x"},
        ]
        await client.chat.completions.create(model="scripted", messages=onwards)
        assert running.journal.completions[1].parent_id == running.journal.completions[0].completion_id
        await _ask(running, **RETRY)
        assert len(running.journal.completions) == 3


async def test_a_failed_call_is_not_replayed() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine) as running:
        first = _asking(running)
        (await engine.asked(1)).fail()
        assert (await first)[0] == 503
        second = _asking(running, **RETRY)
        (await engine.asked(2)).finish("hi")
        assert (await second)[0] == 200


async def test_the_window_ends() -> None:
    async with proxied({}, retry_window_s=0.0) as running:
        await _ask(running)
        await _ask(running, **RETRY)
        assert len(running.journal.completions) == 2


async def test_a_client_that_vanished_and_does_not_come_back_loses_its_call_after_the_grace() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, retry_grace_s=0.05) as running:
        first = _asking(running, STREAM)
        call = await engine.asked(1)
        first.cancel()
        async with asyncio.timeout(10):
            while not running.journal.completions:
                await asyncio.sleep(0.005)
        assert call.was_cancelled
        assert running.journal.completions[0].status == "aborted"


async def test_a_stream_that_had_begun_is_cancelled_at_once() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, retry_grace_s=600) as running, running.client() as client:
        stream: Any = asyncio.create_task(client.chat.completions.create(**STREAM))
        call = await engine.asked(1)
        call.say("one")
        async for chunk in await stream:
            if chunk.choices[0].delta.content == "one":
                break
        await (await stream).close()
        async with asyncio.timeout(10):
            while not running.journal.completions:
                await asyncio.sleep(0.005)
        assert call.was_cancelled
        (completion,) = running.journal.completions
        assert (completion.status, completion.sampled_ids.tolist()) == ("aborted", [10])


async def test_a_fenced_session_replays_nothing() -> None:
    async with proxied({}) as running:
        await _ask(running)
        await running.session.fence("the session has ended")
        assert (await _ask(running, **RETRY))[0] == 403


async def test_what_is_kept_for_retries_is_bounded_and_small() -> None:
    async with proxied({}) as running, running.client() as client:
        for number in range(40):
            messages: Any = [{"role": "user", "content": f"hello {number}"}]
            stream: Any = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
            assert len([chunk async for chunk in stream]) > 3
        await _ask(running, BODY)
        entries = running.session._retries._entries
        assert len(entries) <= 17
        assert all(len(entry.flight.progress.shown) <= 1 for entry in entries)
        gc.collect()
        calls = [found for found in gc.get_objects() if type(found) is ModelCall and found.dialect == "openai_chat"]
        assert not calls


async def test_the_sdk_sees_nothing_of_all_this() -> None:
    async with proxied({}) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="scripted", messages=[], extra_headers=RETRY)
