"""A retry that comes in the next life of the node is given what the journal has, and samples nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gangline.domain.completion import Completion
from gangline.serving.scripted.server import scripted_server
from support.node.proxy import Proxied, proxied_engine

KEY = {"Idempotency-Key": "one-wish"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCRIPT = {"rules": [{"pattern": "look", "thinking": "hm", "text": "I look.", "tool_calls": [{"name": "look"}]}]}


def body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "mine", "messages": [{"role": "user", "content": text}], **fields}


@asynccontextmanager
async def next_life(engine_url: str, completions: list[Completion], **options: Any) -> AsyncGenerator[Proxied]:
    async with proxied_engine(engine_url, completions=completions, **options) as running:
        yield running


async def ask(running: Proxied, sent: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {running.session.key}"} | (KEY if headers is None else headers)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{running.base_url}/chat/completions", json=sent, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.read()


@pytest.mark.parametrize("sent", [body(), body(n=3), body("look", tools=[LOOK]), body("look", tools=[LOOK], n=2)])
async def test_it_gets_the_same_answer_to_the_byte(sent: dict[str, Any]) -> None:
    async with scripted_server(SCRIPT) as engine_url:
        async with proxied_engine(engine_url) as running:
            first = await ask(running, sent)
            records = running.journal.completions
        async with next_life(engine_url, records) as running:
            assert await ask(running, sent) == first
            assert await ask(running, sent) == first
            assert not running.journal.completions
            assert running.session.num_calls == 1


async def test_a_stream_gets_the_same_message_under_the_same_ids() -> None:
    async with scripted_server(SCRIPT) as engine_url:
        async with proxied_engine(engine_url) as running, running.client() as client:
            asked = {"model": "mine", "messages": body("look")["messages"], "tools": [LOOK], "extra_headers": KEY}
            async with client.chat.completions.stream(**asked) as stream:
                first = await stream.get_final_completion()
            records = running.journal.completions
        async with next_life(engine_url, records) as running, running.client() as client:
            async with client.chat.completions.stream(**asked) as stream:
                second = await stream.get_final_completion()
            assert (second.id, second.choices) == (first.id, first.choices)
            assert not running.journal.completions


@pytest.mark.parametrize(
    ("sent", "headers"),
    [
        (body(), {"Idempotency-Key": "another"}),
        (body(), {}),
        (body(), {"x-stainless-retry-count": "1"}),
        (body("hello again"), KEY),
        (body(n=2), KEY),
    ],
)
async def test_another_wish_is_sampled(sent: dict[str, Any], headers: dict[str, str]) -> None:
    async with scripted_server(SCRIPT) as engine_url:
        async with proxied_engine(engine_url) as running:
            await ask(running, body())
            records = running.journal.completions
        async with next_life(engine_url, records) as running:
            await ask(running, sent, headers)
            assert len(running.journal.completions) == sent.get("n", 1)


async def test_one_whose_conversation_went_on_is_sampled_anew() -> None:
    async with scripted_server(SCRIPT) as engine_url:
        async with proxied_engine(engine_url) as running:
            await ask(running, body())
            messages = [
                *body()["messages"],
                {"role": "assistant", "content": "Done."},
                {"role": "user", "content": "on"},
            ]
            await ask(running, body() | {"messages": messages}, {})
            records = running.journal.completions
            assert records[1].parent_id == records[0].completion_id
        async with next_life(engine_url, records) as running:
            await ask(running, body())
            assert len(running.journal.completions) == 1


async def test_one_that_is_too_old_or_asked_for_log_probs_is_sampled_anew() -> None:
    async with scripted_server(SCRIPT) as engine_url:
        async with proxied_engine(engine_url, clock=lambda: 1000.0) as running:
            await ask(running, body())
            await ask(running, body(logprobs=True))
            records = running.journal.completions
        async with next_life(engine_url, records, clock=lambda: 1700.0) as running:
            await ask(running, body())
            assert len(running.journal.completions) == 1
        async with next_life(engine_url, records, clock=lambda: 1001.0) as running:
            await ask(running, body())
            assert not running.journal.completions
            await ask(running, body(logprobs=True))
            assert len(running.journal.completions) == 1


MESSAGES = [{"role": "user", "content": "look"}]
OF_DIALECTS = {
    "anthropic": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 99,
            "messages": MESSAGES,
            "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {}}}],
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "m",
            "input": MESSAGES,
            "tools": [{"type": "function", "name": "look", "parameters": LOOK["function"]["parameters"]}],
        },
    ),
    "google": (
        "/v1beta/models/m:{verb}",
        {
            "contents": [{"role": "user", "parts": [{"text": "look"}]}],
            "tools": [{"functionDeclarations": [{"name": "look"}]}],
        },
    ),
}


@pytest.mark.parametrize("dialect", OF_DIALECTS)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_every_dialect_tells_a_kept_answer_as_it_told_a_new_one(dialect: str, is_stream: bool) -> None:
    path, sent = OF_DIALECTS[dialect]
    verb = "streamGenerateContent?alt=sse" if is_stream else "generateContent"
    sent = sent if dialect == "google" else sent | {"stream": is_stream}

    async def told(running: Proxied) -> bytes:
        headers = {"Authorization": f"Bearer {running.session.key}", **KEY}
        url = f"{running.url}/s/{running.session.session_id}{path.format(verb=verb)}"
        async with aiohttp.ClientSession() as http, http.post(url, json=sent, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async with scripted_server(SCRIPT) as engine_url:
        async with proxied_engine(engine_url, clock=lambda: 1000.0) as running:
            first = await told(running)
            again = await told(running)
            records = running.journal.completions
            assert len(records) == 1
        async with next_life(engine_url, records, clock=lambda: 1001.0) as running:
            assert await told(running) == again
            assert is_stream or again == first
            assert not running.journal.completions
