"""Engines that hang, that count wrong, that report nothing: what the client is told, and what the record says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import openai
import pytest

from gangline.domain.task import SamplingPolicy
from gangline.domain.tokens import logprobs
from gangline.models.engines.contract import EngineDelta, EngineReply, EngineRequest
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.backends.gate import Gate
from gangline.serving.scripted.server import scripted_server
from support.engines.held import HeldEngine
from support.node.proxy import Proxied, proxied, proxied_engine

HELLO: Any = [{"role": "user", "content": "hello"}]
HANGS = {"rules": [{"pattern": "hello", "text": "hi", "faults": {"hang": True}}]}


async def _complete(running: Proxied, *, stream: bool = False, **fields: Any) -> str:
    async with running.client() as client:
        if not stream:
            reply = await client.chat.completions.create(model="scripted", messages=HELLO, **fields)
            return reply.choices[0].message.content or ""
        chunks = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True, **fields)
        return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_hangs_is_given_up_and_named(stream: bool) -> None:
    async with scripted_server(HANGS) as url:
        engine = VllmEngine(url, timeout_s=0.2)
        async with proxied_engine(engine) as running:
            with pytest.raises(openai.InternalServerError) as failed:
                await _complete(running, stream=stream)
            assert failed.value.status_code == 503
            assert url in str(failed.value)
            assert running.journal.completions == []
            assert running.session.failures.engine is not None


class MiscountingEngine(HeldEngine):
    """Gives one log-prob too few."""

    async def chat(self, request: EngineRequest) -> EngineReply:
        reply = await super().chat(request)
        choice = msgspec.structs.replace(reply.choices[0], logprobs=logprobs([-1.0]))
        return msgspec.structs.replace(reply, choices=(choice,))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        async for delta in super().stream(request):
            is_first = delta.sampled_ids == [10]
            yield delta if is_first else msgspec.structs.replace(delta, logprobs=None)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_of_another_length_make_the_record_untrainable(stream: bool) -> None:
    engine = MiscountingEngine()
    async with proxied_engine(engine) as running:
        asked = asyncio.create_task(_complete(running, stream=stream))
        (await engine.asked(1)).finish("a", "b")
        assert await asked == "ab"
        (completion,) = running.journal.completions
        assert completion.certificate.untrainable == "1 log-probs for 2 sampled ids"
        assert len(completion.logprobs) == 2
        assert not completion.trainable


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_without_ids_that_the_operator_admit_ready_is_recorded_as_text(stream: bool) -> None:
    engine = HeldEngine(reports_ids=False, streams_ids=False, logprob_kind="missing")
    async with proxied_engine(engine) as running:
        asked = asyncio.create_task(_complete(running, stream=stream))
        (await engine.asked(1)).finish("a", "b")
        assert await asked == "ab"
        (completion,) = running.journal.completions
        assert completion.status == "complete"
        assert completion.certificate.untrainable == "the engine reports no token ids"
        assert len(completion.sampled_ids) == 0


async def test_what_the_operator_says_is_sent_and_what_the_harness_wished_is_kept() -> None:
    policy = SamplingPolicy.model_validate({"temperature": {"override": 1.0}, "max_tokens": {"max": 3}})
    async with proxied(
        {"rules": [{"pattern": ".", "text": "one two three four five six"}]}, sampling=policy
    ) as running:
        await _complete(running, temperature=0.0, top_p=0.5)
        (completion,) = running.journal.completions
        used = completion.certificate.sampling
        assert (used.temperature, used.top_p, used.max_tokens) == (1.0, 0.5, 3)
        assert len(completion.sampled_ids) == 3
        wished = completion.metadata["sampling_wished"]
        assert (wished["temperature"], wished["max_tokens"]) == (0.0, None)


async def test_a_call_that_waits_at_the_gate_is_aborted_without_a_record_when_the_session_ends() -> None:
    engine, gate = HeldEngine(), Gate()
    async with proxied_engine(engine, gate=gate) as running:
        await gate.pause("keep", 600)
        asked = asyncio.create_task(_complete(running))
        async with asyncio.timeout(10):
            while gate.state.num_waiting == 0:
                await asyncio.sleep(0.005)
        await running.session.fence("the session has ended")
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await asked
        assert (engine.calls, running.journal.completions, gate.state.num_waiting) == ([], [], 0)


async def test_a_drain_ends_with_the_last_call_in_flight_and_new_ones_go_on_under_the_new_version() -> None:
    engine, gate = HeldEngine(), Gate()
    gate.set_version(1)
    async with proxied_engine(engine, gate=gate) as running:
        old = asyncio.create_task(_complete(running, stream=True))
        call = await engine.asked(1)
        pausing = asyncio.create_task(gate.pause("drain", 600))
        async with asyncio.timeout(10):
            while not gate.state.is_paused:
                await asyncio.sleep(0)
        new = asyncio.create_task(_complete(running))
        call.finish("a")
        assert (await pausing).is_drained
        assert await old == "a"
        gate.set_version(2)
        gate.resume()
        (await engine.asked(2)).finish("b")
        assert await new == "b"
        versions = [c.certificate.version_spans[0].version for c in running.journal.completions]
        assert versions == [1, 2]


async def test_media_in_a_conversation_is_never_stitched() -> None:
    engine = HeldEngine(takes_prompt_ids=True)
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with proxied_engine(engine) as running, running.client() as client:
        first: Any = [{"role": "user", "content": [image]}]
        for number, messages in enumerate(
            [first, [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]], start=1
        ):
            asked = asyncio.create_task(client.chat.completions.create(model="scripted", messages=messages))
            call = await engine.asked(number)
            assert call.request.prompt_ids is None
            call.finish("a")
            await asked
        one, two = running.journal.completions
        assert two.parent_id == one.completion_id
        assert "images" in (two.certificate.fallback or "")


async def test_a_client_that_does_not_read_holds_up_neither_the_record_nor_the_end_of_the_session() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine) as running:
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
        head = f"POST /s/s1/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.session.key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        (await engine.asked(1)).finish(*["word " * 20_000] * 300)
        async with asyncio.timeout(20):
            while not running.journal.completions:
                await asyncio.sleep(0.005)
            await running.session.fence("the session has ended")
        (completion,) = running.journal.completions
        assert (completion.status, len(completion.sampled_ids)) == ("complete", 300)
        writer.transport.abort()


BROKEN = '<tool_call>\n{"name": "run", "arguments": {"command": \n</tool_call>'
READ: Any = {"name": "run", "arguments": {"command": "ls"}}
RUN: Any = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "status"),
    [
        ({"text": BROKEN}, "failed"),
        ({"text": BROKEN, "tool_calls": [READ]}, "partial"),
        ({"text": "hi", "tool_calls": [READ]}, None),
    ],
)
async def test_a_chat_reply_says_when_a_tool_call_in_it_was_not_read(
    reply: dict[str, Any], status: str | None, stream: bool
) -> None:
    async with proxied({"default": reply}) as running, running.client() as client:
        fields: Any = {"model": "scripted", "messages": HELLO, "tools": [RUN]}
        if stream:
            chunks = await client.chat.completions.create(stream=True, **fields)
            last = [choice async for chunk in chunks for choice in chunk.choices][-1]
        else:
            last = (await client.chat.completions.create(**fields)).choices[0]
        assert (last.model_extra or {}).get("parse_status") == status
        (record,) = running.journal.completions
        assert record.certificate.parse == (status or "ok")


async def test_a_full_context_is_the_sessions_state_until_a_call_is_answered() -> None:
    async with proxied({"default": {"text": "hi"}, "context_length": 200}) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "long " * 500}])
        assert refused.value.code == "context_length_exceeded"
        full = running.session.failures.context
        assert full is not None
        assert (full.boundary, full.code, full.retryable) == ("harness", "context_length_exceeded", False)
        assert running.session.failures.broken is None
        await _complete(running)
        assert running.session.failures.context is None
