"""The official Anthropic SDK through the proxy: what it sees, and what is recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from aiohttp import web
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock

from gangline.domain.conversation import Message as CanonicalMessage
from gangline.domain.conversation import ModelCall, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import (
    ContextOverflow,
    EngineIncapable,
    EngineUnavailable,
    GanglineError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    SessionOver,
    Unauthorized,
)
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, ToolCallDelta
from gangline.wire.dialects.anthropic.dialect import AnthropicDialect
from support.node.proxy import Proxied, proxied

SHELL: Any = {
    "name": "shell",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
SCRIPT = {
    "context_length": 4096,
    "rules": [
        {"turn": 0, "thinking": "List first.", "text": "Looking.", "tool_calls": [{"run": "ls"}, {"run": "pwd"}]},
        {"turn": 1, "thinking": "Now read.", "tool_calls": [{"run": "cat a.txt"}]},
        {"turn": 2, "text": "It says 42."},
    ],
    "default": {"text": "Hello world."},
}
ASK: Any = {"model": "scripted", "max_tokens": 200}
SYSTEM: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]


def client_of(running: Proxied, **options: Any) -> anthropic.AsyncAnthropic:
    base_url = f"{running.url}/s/{running.session.session_id}"
    return anthropic.AsyncAnthropic(
        **({"base_url": base_url, "api_key": running.session.key, "max_retries": 0} | options)
    )


async def ask(client: anthropic.AsyncAnthropic, stream: bool, **request: Any) -> Message:
    if not stream:
        return await client.messages.create(**ASK | request)
    async with client.messages.stream(**ASK | request) as events:
        return await events.get_final_message()


def results(reply: Message) -> dict[str, Any]:
    calls = [block for block in reply.content if isinstance(block, ToolUseBlock)]
    content = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"out of {call.input}", "is_error": i == 1}
        for i, call in enumerate(calls)
    ]
    return {"role": "user", "content": content}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echoes_thinking", [False, True])
async def test_a_conversation_with_tools_and_thinking_is_exact_all_the_way(stream: bool, echoes_thinking: bool) -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        messages: list[Any] = [{"role": "user", "content": "What is here?"}]
        replies: list[Message] = []
        for _ in range(3):
            reply = await ask(client, stream, system=SYSTEM, messages=messages, tools=[SHELL])
            replies.append(reply)
            echo = [b.to_dict() for b in reply.content if echoes_thinking or not isinstance(b, ThinkingBlock)]
            messages += [{"role": "assistant", "content": echo}, results(reply)]
        first, _, third = replies
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [b.input for b in first.content if isinstance(b, ToolUseBlock)] == [
            {"command": "ls"},
            {"command": "pwd"},
        ]
        assert [reply.stop_reason for reply in replies] == ["tool_use", "tool_use", "end_turn"]
        assert isinstance(third.content[0], TextBlock)
        assert third.content[0].text == "It says 42."

        records = running.journal.completions
        assert [record.certificate.context for record in records] == ["first", "exact", "exact"]
        assert [record.parent_id for record in records[1:]] == [record.completion_id for record in records[:2]]
        for reply, record in zip(replies, records, strict=True):
            usage = reply.usage
            num_prompt = len(running.session.tree.prompt_ids(record))
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == num_prompt
            assert usage.output_tokens == len(record.sampled_ids)
            shown = [block.id for block in reply.content if isinstance(block, ToolUseBlock)]
            assert shown == [part.call_id for part in record.response.parts if isinstance(part, ToolCall)]


async def test_a_streamed_reply_is_the_whole_reply() -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        request: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [SHELL]}
        whole, streamed = await ask(client, False, **request), await ask(client, True, **request)
        assert _values(whole) == _values(streamed)


def _values(reply: Message) -> list[Any]:
    """Ids and signatures are of one reply only."""
    own = {"id", "signature"}
    blocks = [{k: v for k, v in block.to_dict().items() if k not in own} for block in reply.content]
    return [blocks, reply.stop_reason, reply.usage.input_tokens, reply.usage.output_tokens]


async def test_the_prompt_is_counted_without_being_sampled() -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        request: dict[str, Any] = {
            "model": "scripted",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [SHELL],
        }
        counted = await client.messages.count_tokens(**request)
        assert running.journal.completions == []
        reply = await client.messages.create(max_tokens=9, **request)
        assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == counted.input_tokens


async def test_the_first_event_of_a_stream_knows_the_length_of_the_prompt() -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        stream = await client.messages.create(**ASK, messages=[{"role": "user", "content": "x"}], stream=True)
        events = [event async for event in stream]
        (record,) = running.journal.completions
        assert events[0].type == "message_start"
        assert events[0].message.usage.input_tokens == len(record.prompt_suffix_ids)


async def test_models_are_listed_and_found() -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == ["scripted"]
        assert (await client.models.retrieve("scripted")).max_input_tokens == 4096
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("other")


async def test_the_beta_routes_are_the_same_routes() -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        request: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "betas": ["anything-2026-01-01"]}
        thinking: Any = {"type": "adaptive"}
        reply = await client.beta.messages.create(**ASK, **request, thinking=thinking)
        assert reply.content[0].type == "text"
        (record,) = running.journal.completions
        assert record.dialect == "anthropic"


async def test_a_stop_sequence_is_named() -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        reply = await ask(client, False, messages=[{"role": "user", "content": "x"}], stop_sequences=["world"])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "world")


async def test_what_is_wrong_with_a_request_is_said_and_nothing_is_recorded() -> None:
    async with proxied(SCRIPT) as running, client_of(running) as client:
        unread: Any = [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.type"):
            await client.messages.create(**ASK, messages=unread)
        long: Any = [{"role": "user", "content": "word " * 5000}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
            await client.messages.create(**ASK, messages=long)
        assert running.journal.completions == []


async def test_the_key_may_be_a_bearer_token_and_must_be_right() -> None:
    hello: Any = [{"role": "user", "content": "x"}]
    async with proxied(SCRIPT) as running:
        async with client_of(running, api_key=None, auth_token=running.session.key) as client:
            assert (await client.messages.create(**ASK, messages=hello)).stop_reason is not None
        async with client_of(running, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**ASK, messages=hello)


async def test_a_stream_that_breaks_raises_in_the_client() -> None:
    script = {"default": {"text": "one two three four", "faults": {"drop_connection": 3, "times": None}}}
    async with proxied(script) as running, client_of(running) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client, True, messages=[{"role": "user", "content": "x"}])
        assert "overloaded_error" in str(caught.value)


# -- the dialect alone, behind a server that answers one thing -------------------------------------------------------


@asynccontextmanager
async def answering(answer: Any, **options: Any) -> AsyncGenerator[tuple[anthropic.AsyncAnthropic, list[str]], None]:
    """A client of a server that always answers so, and the paths it was asked for."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        return answer()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", **options) as client:
            yield client, asked
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("error", "kind", "num_asked"),
    [
        (InvalidRequest("x"), anthropic.BadRequestError, 1),
        (Unauthorized("x"), anthropic.AuthenticationError, 1),
        (SessionOver("x"), anthropic.PermissionDeniedError, 1),
        (NotFound("x"), anthropic.NotFoundError, 1),
        (LimitExceeded("x"), anthropic.APIStatusError, 1),
        (LimitExceeded("x", status=429, retry_after_s=0.001), anthropic.RateLimitError, 2),
        (ContextOverflow("x"), anthropic.BadRequestError, 1),
        (EngineIncapable("x"), anthropic.InternalServerError, 1),
        (EngineUnavailable("x"), anthropic.InternalServerError, 2),
    ],
)
async def test_the_client_knows_each_error_and_retries_only_what_may_pass(
    error: GanglineError, kind: type[anthropic.APIStatusError], num_asked: int
) -> None:
    shaped = AnthropicDialect().error_answer(error)

    def answer() -> web.Response:
        return web.Response(
            body=shaped.body, status=shaped.status, headers=dict(shaped.headers), content_type="application/json"
        )

    async with answering(answer, max_retries=1) as (client, asked):
        with pytest.raises(kind) as caught:
            await client.messages.create(**ASK, messages=[{"role": "user", "content": "x"}])
    assert caught.value.status_code == shaped.status
    assert caught.value.body == json.loads(shaped.body)
    assert len(asked) == num_asked


async def test_signs_of_life_are_accepted_before_within_and_between_blocks() -> None:
    call = ModelCall(dialect="anthropic", model="m", messages=(), stream=True)
    writer = AnthropicDialect().event_writer(call, reply_id="r1", model="m", created_at=1)
    deltas = [
        ReplyDelta(thinking="Hm"),
        ReplyDelta(text="So."),
        ReplyDelta(tool_calls=(ToolCallDelta(0, '{"command":', "c0", "shell"),)),
        ReplyDelta(tool_calls=(ToolCallDelta(0, '"ls"}'), ToolCallDelta(1, "not json", "c1", "shell"))),
    ]
    pieces = [writer.start(3), *map(writer.delta, deltas), writer.finish(_reply_of_two_calls())]
    body = writer.keep_alive() + writer.keep_alive().join(pieces)

    async with answering(lambda: web.Response(body=body, content_type="text/event-stream")) as (client, _):
        reply = await ask(client, True, messages=[{"role": "user", "content": "x"}])
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [b.input for b in reply.content if isinstance(b, ToolUseBlock)] == [{"command": "ls"}, {}]
    assert isinstance(reply.content[0], ThinkingBlock)
    assert reply.content[0].signature


def _reply_of_two_calls() -> Reply:
    calls = (ToolCall("c0", "shell", '{"command":"ls"}'), ToolCall("c1", "shell", "not json"))
    message = CanonicalMessage("assistant", (Thinking("Hm"), Text("So."), *calls))
    choice = ReplyChoice(index=0, message=message, finish_reason="tool_calls")
    usage = Usage(num_prompt_tokens=3, num_sampled_tokens=9)
    return Reply(reply_id="r1", model="m", created_at=1, choices=(choice,), usage=usage)
