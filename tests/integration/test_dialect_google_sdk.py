"""The official Google SDK against the proxy and the scripted engine: what its client makes of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from google import genai
from google.genai import errors, types

from gangline.domain.conversation import Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import EngineUnavailable
from gangline.domain.reply import ReplyDelta
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.google.dialect import GoogleDialect
from support.node.proxy import Proxied, proxied

# The SDK derives its client session from aiohttp's, which aiohttp discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

SHELL = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="shell",
            description="Run a command.",
            parameters=types.Schema(
                type=types.Type.OBJECT,
                properties={"command": types.Schema(type=types.Type.STRING)},
                required=["command"],
            ),
        )
    ]
)

SCRIPT = {
    "rules": [
        {"turn": 0, "thinking": "List first.", "text": "Looking.", "tool_calls": [{"run": "ls"}, {"run": "pwd"}]},
        {"turn": 1, "text": "There is a file."},
    ],
    "default": {"text": "Hello world."},
}


def _config(**options: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(
        system_instruction="Be brief.",
        tools=[SHELL],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        **options,
    )


@asynccontextmanager
async def _client(running: Proxied, key: str | None = None) -> AsyncGenerator[genai.client.AsyncClient, None]:
    base = f"{running.url}/s/{running.session.session_id}"
    client = genai.Client(
        api_key=key or running.session.key, http_options=types.HttpOptions(base_url=base, timeout=20_000)
    )
    async with client.aio as aio:
        yield aio
    client.close()


async def _ask(client: Any, contents: list[Any], stream: bool, **options: Any) -> list[types.Content]:
    """The contents that the client's user would put into the history: one, or one per chunk."""
    request = {"model": "scripted", "contents": contents, "config": _config(**options)}
    if not stream:
        return [(await client.models.generate_content(**request)).candidates[0].content]
    return [chunk.candidates[0].content async for chunk in await client.models.generate_content_stream(**request)]


def _calls(contents: list[types.Content]) -> list[types.FunctionCall]:
    return [part.function_call for content in contents for part in content.parts or [] if part.function_call]


def _text(contents: list[types.Content], *, thought: bool = False) -> str:
    parts = [part for content in contents for part in content.parts or []]
    return "".join(part.text for part in parts if part.text and bool(part.thought) == thought).strip()


def _result(call: types.FunctionCall, number: int) -> types.Part:
    response = {"output": f"out {number}"} if number == 0 else {"error": "no such file"}
    return types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response=response))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_conversation_with_thinking_continues_the_same_tokens(stream: bool) -> None:
    async with proxied(SCRIPT) as running, _client(running) as client:
        user = types.Content(role="user", parts=[types.Part(text="What is here?")])
        first = await _ask(client, [user], stream)
        calls = _calls(first)
        assert _text(first, thought=True) == "List first."
        assert _text(first) == "Looking."
        assert [call.args for call in calls] == [{"command": "ls"}, {"command": "pwd"}]
        results = types.Content(role="user", parts=[_result(call, n) for n, call in enumerate(calls)])
        second = await _ask(client, [user, *first, results], stream)
        assert _text(second) == "There is a file."
    records = running.journal.completions
    assert [record.certificate.context for record in records] == ["first", "exact"]
    assert records[1].parent_id == records[0].completion_id
    assert [part.is_error for m in records[1].new_messages for part in m.parts if isinstance(part, ToolResult)] == [
        False,
        True,
    ]


async def test_an_echo_of_a_streamed_turn_is_one_assistant_turn_with_its_signature() -> None:
    async with proxied(SCRIPT) as running, _client(running) as client:
        user = types.Content(role="user", parts=[types.Part(text="What is here?")])
        first = await _ask(client, [user], stream=True)
        assert len(first) > 1
        body = {"contents": [content.model_dump(mode="json", exclude_none=True) for content in [user, *first]]}
        echoed = _parsed(body).messages[-1]
    thought, text, *calls = echoed.parts
    assert isinstance(thought, Thinking)
    assert isinstance(text, Text)
    assert (thought.text.strip(), text.text.strip()) == ("List first.", "Looking.")
    assert thought.signature
    assert all(isinstance(call, ToolCall) for call in calls)
    assert len(calls) == 2


def _parsed(body: dict[str, Any]) -> Any:
    return GoogleDialect().parse_call(RawRequest(body=json.dumps(body).encode(), params={"model": "m"}))


async def test_thoughts_are_shown_only_to_a_client_that_asks_for_them() -> None:
    async with proxied(SCRIPT) as running, _client(running) as client:
        for stream in (False, True):
            config = types.GenerateContentConfig(tools=[SHELL])
            request: Any = {"model": "scripted", "contents": "What is here?", "config": config}
            if stream:
                chunks = [chunk async for chunk in await client.models.generate_content_stream(**request)]
            else:
                chunks = [await client.models.generate_content(**request)]
            parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
            assert not any(part.thought for part in parts)
            assert "Looking." in "".join(part.text or "" for part in parts)


async def test_the_sdk_s_chat_keeps_a_streamed_history_that_matches() -> None:
    script = {"rules": [{"turn": 0, "text": "One two."}], "default": {"text": "Three."}}
    async with proxied(script) as running, _client(running) as client:
        chat = client.chats.create(model="scripted")
        said = [[chunk.text async for chunk in await chat.send_message_stream(text)] for text in ("Hi.", "More.")]
    assert "".join(said[0]) == "One two."
    assert [record.certificate.context for record in running.journal.completions] == ["first", "exact"]


async def test_usage_finish_reason_and_log_probs_are_where_the_sdk_looks() -> None:
    async with proxied({"default": {"text": "Hello world."}}) as running, _client(running) as client:
        config = types.GenerateContentConfig(response_logprobs=True, logprobs=2, max_output_tokens=3)
        reply = await client.models.generate_content(model="scripted", contents="Hi.", config=config)
        chunks = [
            chunk
            async for chunk in await client.models.generate_content_stream(
                model="scripted", contents="Hi.", config=config
            )
        ]
    usage, candidate = reply.usage_metadata, reply.candidates[0]
    assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
    assert usage.candidates_token_count == 3
    assert candidate.finish_reason == types.FinishReason.MAX_TOKENS
    assert len(candidate.logprobs_result.chosen_candidates) == 3
    assert chunks[-1].usage_metadata == usage
    assert [chunk.candidates[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    results = [chunk.candidates[0].logprobs_result for chunk in chunks]
    streamed = [entry for result in results if result for entry in result.chosen_candidates]
    assert streamed == candidate.logprobs_result.chosen_candidates


async def test_tokens_are_counted_and_models_are_listed() -> None:
    async with proxied({"default": {"text": "Hello."}}) as running, _client(running) as client:
        counted = await client.models.count_tokens(model="scripted", contents="Hi.")
        reply = await client.models.generate_content(model="scripted", contents="Hi.")
        names = [model.name async for model in await client.models.list()]
        card = await client.models.get(model=names[0])
    assert counted.total_tokens == reply.usage_metadata.prompt_token_count
    assert names == [card.name]
    assert "generateContent" in card.supported_actions
    assert len(running.journal.completions) == 1


async def test_a_wrong_key_and_a_bad_field_are_the_sdk_s_own_errors() -> None:
    async with proxied({"default": {"text": "Hello."}}) as running:
        async with _client(running, key="wrong") as client:
            with pytest.raises(errors.ClientError) as refused:
                await client.models.generate_content(model="scripted", contents="Hi.")
        assert (refused.value.code, refused.value.status) == (401, "UNAUTHENTICATED")
        async with _client(running) as client:
            config = types.GenerateContentConfig(cached_content="cachedContents/1")
            with pytest.raises(errors.ClientError) as refused:
                await client.models.generate_content(model="scripted", contents="Hi.", config=config)
        assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
        assert "cachedContent" in refused.value.message
    assert running.journal.completions == []


async def _gather(client: Any, said: list[str | None]) -> None:
    async for chunk in await client.models.generate_content_stream(model="m", contents="Hi."):
        said.append(chunk.text)


async def test_a_stream_that_breaks_is_the_sdk_s_server_error_and_keep_alives_are_nothing_to_it() -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        call = _parsed({"contents": [{"parts": [{"text": "Hi."}]}]})
        writer = GoogleDialect().event_writer(call, reply_id="abc", model="m", created_at=1)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in (writer.keep_alive(), writer.start(3), writer.delta(ReplyDelta(text="One"))):
            await response.write(piece)
        for piece in (writer.delta(ReplyDelta(text=" two")), writer.keep_alive(), writer.error(EngineUnavailable("x"))):
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post("/{tail:.*}", broken)
    said: list[str | None] = []
    async with TestServer(app) as server:
        client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=str(server.make_url("/"))))
        async with client.aio as aio:
            with pytest.raises(errors.ServerError) as broke:
                await _gather(aio, said)
        client.close()
    assert said == ["One"]
    assert (broke.value.code, broke.value.status) == (503, "UNAVAILABLE")


async def test_the_error_of_a_broken_stream_comes_apart_and_leaves_it_open() -> None:
    """The JavaScript SDK passes over an error that came with an event, and over one that ends like an event."""
    script = {"default": {"text": "One two three four.", "faults": {"drop_connection": 3}}}
    body = {"contents": [{"parts": [{"text": "Hi."}]}]}
    async with proxied(script) as running, aiohttp.ClientSession() as http:
        url = f"{running.url}/s/s1/v1beta/models/scripted:streamGenerateContent"
        headers = {"x-goog-api-key": running.session.key}
        async with http.post(f"{url}?alt=sse", json=body, headers=headers) as response:
            pieces = [piece async for piece in response.content.iter_any()]
        assert json.loads(pieces[-1])["error"]["status"] == "UNAVAILABLE"
        assert not pieces[-1].endswith(b"\n\n")


async def test_a_stream_without_alt_sse_is_one_json_array() -> None:
    async with proxied({"default": {"text": "Hello world."}}) as running, aiohttp.ClientSession() as http:
        url = f"{running.url}/s/s1/v1beta/models/scripted:streamGenerateContent"
        body = {"contents": [{"parts": [{"text": "Hi."}]}]}
        async with http.post(url, json=body, headers={"x-goog-api-key": running.session.key}) as response:
            assert response.content_type == "application/json"
            chunks = json.loads(await response.read())
    texts = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(texts) == "Hello world."
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"
