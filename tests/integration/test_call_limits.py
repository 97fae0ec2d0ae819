"""Model calls that are too large, and large ones that are read in a process of their own."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import tracemalloc
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from gangline.node.calls.reading import body as body_module
from gangline.node.calls.reading.body import BytesInFlight, read_here
from gangline.node.calls.reading.pool import Readers
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.settings.node import CallLimits
from support.node.proxy import Proxied, proxied

SMALL = CallLimits(
    max_body_bytes=400_000,
    max_messages=3000,
    max_parts=4000,
    max_tools=8,
    max_definition_bytes=4096,
    max_in_flight_bytes=900_000,
)
ASKED: Any = {"role": "user", "content": "hello"}
SLOW = {"rules": [{"pattern": "slow", "text": "a b c d e f g h", "token_delay_s": 0.2}, {"pattern": "", "text": "ok"}]}

ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"model": "m"}, "messages"),
    "responses": ("/v1/responses", {"model": "m"}, "input"),
    "anthropic": ("/v1/messages", {"model": "m", "max_tokens": 9}, "messages"),
    "google": ("/v1beta/models/m:generateContent", {}, "contents"),
}


def said(dialect: str, num: int, text: str = "x", num_parts: int = 1) -> list[dict[str, Any]]:
    """A history of so many messages."""
    key, part = ("parts", {"text": text}) if dialect == "google" else ("content", {"type": "text", "text": text})
    if dialect == "responses":
        part = part | {"type": "input_text"}
    return [{"role": "user", key: [part] * num_parts}] * num


async def post(running: Proxied, dialect: str, body: bytes, **headers: str) -> tuple[int, Any, Any]:
    keys = {"Authorization": "Bearer gls-right", "x-api-key": "gls-right", "x-goog-api-key": "gls-right"}
    url = f"{running.url}/s/s1{ROUTES[dialect][0]}"
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=keys | headers) as response:
        return response.status, await response.json(content_type=None), response.headers


def body_of(dialect: str, messages: Any, **fields: Any) -> bytes:
    _, given, name = ROUTES[dialect]
    return json.dumps(given | {name: messages} | fields).encode()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between requests of a session whose last one was beyond a limit."""
    monkeypatch.setattr(body_module, "REFUSED_EVERY_S", 0.0)


@pytest.fixture
async def readers() -> AsyncGenerator[Readers]:
    readers = Readers()
    yield readers
    await readers.close()


@pytest.mark.parametrize("dialect", ROUTES)
@pytest.mark.parametrize("limit", ["max_body_bytes", "max_messages", "max_parts", "max_definition_bytes", "max_tools"])
async def test_a_call_beyond_a_limit_is_413_and_names_the_limit_and_its_option(
    dialect: str, limit: str, readers: Readers
) -> None:
    bodies = {
        "max_body_bytes": lambda: body_of(dialect, said(dialect, 1, "a" * 400_000)),
        "max_messages": lambda: body_of(dialect, said(dialect, 3001)),
        "max_parts": lambda: body_of(dialect, said(dialect, 1, num_parts=4001)),
        "max_definition_bytes": lambda: body_of(dialect, said(dialect, 1), metadata={"a": "b" * 4096}),
        "max_tools": lambda: body_of(dialect, said(dialect, 1), tools=[{}] * 9),
    }
    async with proxied({}, limits=SMALL, readers=readers) as running:
        status, answer, _ = await post(running, dialect, bodies[limit]())
        assert status == 413, answer
        message = json.dumps(answer["error"])
        assert limit in message
        assert "--call-limits" in message
        assert running.journal.completions == []
        status, answer, _ = await post(running, dialect, body_of(dialect, said(dialect, 1)))
        assert status == 200, answer


@pytest.mark.parametrize("limit", ["max_body_bytes", "max_messages", "max_in_flight_bytes"])
async def test_after_a_call_beyond_a_limit_the_next_ones_of_its_session_wait_and_other_sessions_do_not(
    limit: str, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "REFUSED_EVERY_S", 60.0)
    limits = SMALL.model_copy(update={"max_in_flight_bytes": 300_000}) if limit == "max_in_flight_bytes" else SMALL
    bodies = {
        "max_body_bytes": body_of("chat", said("chat", 1, "a" * 400_000)),
        "max_messages": body_of("chat", said("chat", 3001)),
        "max_in_flight_bytes": body_of("chat", said("chat", 1, "a" * 350_000)),
    }
    small = body_of("chat", said("chat", 1))
    async with proxied({}, limits=limits, readers=readers) as running:
        spec = SessionSpec(session_id="s2", attempt=1, key="gls-other")
        running.proxy.add(ModelSession(spec, running.engine, running.journal))
        assert (await post(running, "chat", small))[0] == 200
        status, answer, _ = await post(running, "chat", bodies[limit])
        assert status in (413, 429), answer
        waiting = asyncio.create_task(post(running, "chat", small))
        url, headers = f"{running.url}/s/s2/v1/chat/completions", {"Authorization": "Bearer gls-other"}
        async with aiohttp.ClientSession() as http, http.post(url, data=small, headers=headers) as response:
            assert response.status == 200, await response.text()
        assert not waiting.done()
        waiting.cancel()


async def test_calls_after_one_beyond_a_limit_are_taken_one_a_second_until_one_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = 100.0, list[float]()

    async def sleeps(duration_s: float) -> None:
        slept.append(round(duration_s, 3))

    monkeypatch.setattr(body_module, "REFUSED_EVERY_S", 1.0)
    monkeypatch.setattr(body_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(body_module, "asyncio", SimpleNamespace(sleep=sleeps))
    held = BytesInFlight(1)
    await held.its_turn()
    held.was_refused()
    now += 0.25
    for _ in range(3):
        await held.its_turn()
    assert slept == [0.75, 1.75, 2.75]
    now += 2.0
    held.was_refused()  # the first of the three: the others keep their turns
    await held.its_turn()
    assert slept[3:] == [1.75]
    now += 10
    await held.its_turn()
    assert slept[4:] == []


async def test_a_body_that_unpacks_beyond_the_limit_is_413_and_nothing_more_of_it_is_unpacked(readers: Readers) -> None:
    packed = gzip.compress(b" " * (256 << 20), 9)
    async with proxied({}, limits=SMALL, readers=readers) as running:
        status, answer, _ = await post(running, "chat", packed, **{"Content-Encoding": "gzip"})
        assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_a_refused_body_is_freed_without_the_garbage_collector(readers: Readers) -> None:
    packed = gzip.compress(b" " * (16 << 20), 9)
    limits = SMALL.model_copy(update={"max_body_bytes": 8 << 20, "max_in_flight_bytes": 16 << 20})
    async with proxied({}, limits=limits, readers=readers) as running:
        await post(running, "chat", packed, **{"Content-Encoding": "gzip"})
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(4):
                status, answer, _ = await post(running, "chat", packed, **{"Content-Encoding": "gzip"})
                assert (status, answer["error"]["code"]) == (413, "request_too_large")
            assert tracemalloc.get_traced_memory()[0] < 4 << 20
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_a_field_that_is_not_known_may_hold_some_runs_of_digits_like_reply_ids_but_not_thousands(
    readers: Readers,
) -> None:
    async with proxied({}, readers=readers) as running:
        for num, expected in ((100, 200), (3000, 413)):
            body = body_of("chat", said("chat", 1), undeclared=[f"{number:016x}" for number in range(num)])
            status, answer, _ = await post(running, "chat", body)
            assert status == expected, answer


@pytest.mark.parametrize("dialect", ROUTES)
async def test_a_large_call_leaves_the_same_record_as_read_on_the_loop(dialect: str, readers: Readers) -> None:
    messages = [*said(dialect, 1200, "a word, \u00e9 and \U0001f600"), *said(dialect, 1, "2026-11-22 " * 50)]
    records: list[Any] = []
    for where in (None, readers):
        async with proxied({}, readers=where) as running:
            for size in (1100, 1201):  # the second one continues from nothing that was sampled
                status, answer, _ = await post(running, dialect, body_of(dialect, messages[:size]))
                assert status == 200, answer
            records.append(
                [
                    (one.new_messages, one.messages_shared, one.branch_key, one.prompt_suffix_ids.tolist(), one.lineage)
                    for one in running.journal.completions
                ]
            )
    assert records[0] == records[1]


@pytest.mark.parametrize("dialect", ROUTES)
async def test_a_large_call_is_read_in_another_process_and_a_small_one_here(
    dialect: str, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[int] = []

    def noted(dialect: Any, request: Any, *rest: Any) -> Any:
        here.append(len(request.body))
        return read_here(dialect, request, *rest)

    monkeypatch.setattr("gangline.node.calls.proxy.read_here", noted)
    small = body_of(dialect, said(dialect, 1))
    bodies = [
        small,
        small + b" " * 200_000,
        body_of(dialect, said(dialect, 1, "1:2 " * 4000)),
        body_of(dialect, said(dialect, 1, num_parts=1100)),
    ]
    async with proxied({}, readers=readers) as running:
        for body in bodies:
            status, answer, _ = await post(running, dialect, body)
            assert status == 200, answer
    assert here == [len(small)]


async def test_a_document_of_many_percent_escapes_is_413(readers: Readers) -> None:
    url = "data:text/plain,;base64," + "a%20" * 10_001  # read as it is, for its head does not end in base64
    body = body_of("chat", [{"role": "user", "content": [{"type": "file", "file": {"file_data": url}}]}])
    async with proxied({}, readers=readers) as running:
        status, answer, _ = await post(running, "chat", body)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert "base64" in answer["error"]["message"]


async def test_a_large_conversation_goes_on_from_what_was_sampled(readers: Readers) -> None:
    async with proxied({}, readers=readers) as running, running.client() as client:
        messages: Any = [ASKED, *[{"role": "user", "content": "a, b"}] * 1200]
        for _ in range(3):
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, ASKED]
        first, second, third = running.journal.completions
        assert (second.parent_id, third.parent_id) == (first.completion_id, second.completion_id)


async def test_a_session_with_too_much_in_flight_is_429_until_its_calls_have_ended(readers: Readers) -> None:
    slow = body_of("chat", [{"role": "user", "content": "slow"}]) + b" " * 390_000
    async with proxied(SLOW, limits=SMALL, readers=readers) as running:
        other = ModelSession(SessionSpec(session_id="s2", attempt=1, key="gls-other"), running.engine, running.journal)
        running.proxy.add(other)
        answers = await asyncio.gather(*(post(running, "chat", slow) for _ in range(3)))
        assert sorted(status for status, _, _ in answers) == [200, 200, 429]
        refused = next(answer for status, answer, _ in answers if status == 429)
        assert "max_in_flight_bytes" in refused["error"]["message"]
        assert (await post(running, "chat", slow))[0] == 200
        await other.fence("the test is over")


async def test_the_sdk_is_refused_a_huge_conversation_at_once_and_its_neighbour_answered(readers: Readers) -> None:
    async with proxied({}, readers=readers) as running, running.client() as client:
        other = ModelSession(SessionSpec(session_id="s2", attempt=1, key="gls-other"), running.engine, running.journal)
        running.proxy.add(other)
        neighbour = running.client(base_url=f"{running.url}/s/s2/v1", api_key="gls-other")
        huge: Any = [ASKED] * 200_000

        async def attack() -> None:
            with pytest.raises(openai.APIStatusError) as refused:
                # Not `create`, which looks at each message for half a minute before it sends anything.
                await client.post("/chat/completions", body={"model": "m", "messages": huge}, cast_to=dict[str, Any])
            assert refused.value.status_code == 413

        attacking = asyncio.create_task(attack())
        while not attacking.done():
            assert (await neighbour.chat.completions.create(model="m", messages=[ASKED])).choices
        await attacking
        await neighbour.close()
        await other.fence("the test is over")


async def test_a_request_that_is_not_read_in_time_is_413_and_the_next_one_is_read() -> None:
    readers = Readers(num_processes=1, max_s=0.01)
    try:
        async with proxied({}, readers=readers) as running:
            status, answer, _ = await post(running, "chat", body_of("chat", [ASKED] * 4000))
            assert (status, answer["error"]["code"]) == (413, "request_too_large")
            assert (await post(running, "chat", body_of("chat", [ASKED])))[0] == 200
    finally:
        await readers.close()
