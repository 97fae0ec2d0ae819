"""The client of SGLang's routes, against a server that answers as SGLang's source was read."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest

from gangline.domain.completion import VersionSpan
from gangline.domain.conversation import Message, ModelCall, Text, Thinking
from gangline.domain.errors import ContextOverflow, EngineIncapable, EngineRefused, EngineUnavailable
from gangline.domain.tokens import token_ids
from gangline.models.engines.contract import EngineRequest, ReplyAccumulator
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from support.engines.sglang_engine import FakeSglang, sglang_server
from support.node.proxy import MemoryJournal, served


@asynccontextmanager
async def _engine(**answers: Any) -> AsyncGenerator[tuple[SglangEngine, FakeSglang], None]:
    fake = FakeSglang(**answers)
    async with sglang_server(fake) as url:
        engine = SglangEngine(url)
        try:
            yield engine, fake
        finally:
            await engine.close()


def _request(text: str = "hello", **fields: Any) -> EngineRequest:
    return EngineRequest(call=ModelCall(dialect="d", model="m", messages=(Message("user", (Text(text),)),), **fields))


async def test_a_probe_finds_what_sglang_can_do() -> None:
    async with _engine() as (engine, _):
        found = await engine.probe()
        assert (found.engine, found.version, found.model, found.max_context) == ("sglang", "0.5.23", "sg-model", 4096)
        assert found.reports_ids
        assert found.takes_prompt_ids
        assert found.renders
        assert found.reports_versions
        assert not found.streams_ids
        assert found.logprob_kind == "temperature_scaled"


async def test_a_server_that_ignores_input_ids_is_not_stitched() -> None:
    async with _engine(ignores_input_ids=True) as (engine, _):
        assert not (await engine.probe()).takes_prompt_ids


async def test_a_router_that_strips_the_fields_is_told_of() -> None:
    async with _engine(strips_fields=True) as (engine, _):
        with pytest.raises(EngineIncapable, match=r"no token ids.*stock routers drop"):
            await engine.probe()


async def test_a_reply_brings_ids_log_probs_version_and_usage() -> None:
    async with _engine() as (engine, fake):
        reply = await engine.chat(_request())
        ids = [*fake.tokenizer.encode("I am SGLang."), *fake.tokenizer.eos_ids]
        choice = reply.choices[0]
        assert choice.message == Message("assistant", (Thinking("Hm."), Text("I am SGLang.")))
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        assert np.array_equal(choice.sampled_ids, ids)
        assert np.array_equal(choice.logprobs, np.full(len(ids), -0.25, dtype=np.float32))
        assert choice.version_spans == (VersionSpan(3, 0, len(ids)),)
        assert np.array_equal(reply.prompt_ids, await engine.render(_request().call.messages))
        assert reply.usage is not None
        assert (reply.usage.num_cached_tokens, reply.usage.num_thinking_tokens) == (2, 1)


async def test_spans_of_versions_are_taken_where_they_are_reported() -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 9}]
    async with _engine(spans=spans) as (engine, _):
        assert (await engine.chat(_request())).choices[0].version_spans == (VersionSpan(4, 0, 1), VersionSpan(5, 1, 9))


async def test_exact_prompt_ids_are_what_the_engine_conditions_on() -> None:
    async with _engine() as (engine, fake):
        ids = token_ids([5, 6, 7])
        reply = await engine.chat(EngineRequest(call=_request().call, prompt_ids=ids))
        assert np.array_equal(reply.prompt_ids, ids)
        assert fake.bodies[-1]["input_ids"] == [5, 6, 7]


async def test_a_stream_is_never_asked_for_and_is_the_whole_reply() -> None:
    async with _engine() as (engine, fake):
        whole = await engine.chat(_request(num_choices=2))
        folded = ReplyAccumulator()
        async for delta in engine.stream(_request(stream=True, num_choices=2)):
            folded.feed(delta)
        streamed = folded.reply()
        assert [choice.message for choice in streamed.choices] == [choice.message for choice in whole.choices]
        assert np.array_equal(streamed.choices[1].sampled_ids, whole.choices[1].sampled_ids)
        assert np.array_equal(streamed.prompt_ids, whole.prompt_ids)
        assert len(streamed.choices) == 2
        assert not fake.bodies[-1]["stream"]


async def test_rendering_costs_one_token_and_decoding_keeps_special_tokens() -> None:
    async with _engine() as (engine, fake):
        ids = await engine.render(_request().call.messages)
        assert fake.bodies[-1]["max_tokens"] == 1
        assert await engine.detokenize(ids.tolist()) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        with pytest.raises(EngineRefused, match="generation prompt"):
            await engine.render(_request().call.messages, add_generation_prompt=False)


async def test_overflow_is_recognised() -> None:
    async with _engine(context_length=40) as (engine, _):
        with pytest.raises(ContextOverflow):
            await engine.chat(_request("word " * 100))


async def test_odd_log_probs_are_the_engines_fault() -> None:
    async with _engine(odd_logprobs=True) as (engine, _):
        with pytest.raises(EngineUnavailable, match="odd log-probs"):
            await engine.chat(_request())


async def test_health_is_asked_of_the_engine() -> None:
    async with _engine() as (engine, _):
        await engine.check_health(5.0)
    with pytest.raises(EngineUnavailable):
        await engine.check_health(5.0)
    await engine.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_on_sglang_is_stitched_turn_after_turn(stream: bool) -> None:
    async with _engine() as (engine, fake):
        journal, proxy = MemoryJournal(), Proxy()
        session = ModelSession(SessionSpec(session_id="s1", attempt=1, key="gls-right"), engine, journal)
        proxy.add(session)
        async with (
            served(proxy) as url,
            openai.AsyncOpenAI(base_url=f"{url}/s/s1/v1", api_key="gls-right", max_retries=0) as client,
        ):
            messages: list[Any] = [{"role": "user", "content": "one"}]
            for turn in ("two", "three"):
                reply: Any = await client.chat.completions.create(model="m", messages=messages, stream=stream)
                said = (
                    "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])
                    if stream
                    else reply.choices[0].message.content
                )
                assert said == "I am SGLang."
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": turn}]
        await session.fence("over")
    second = journal.completions[1].certificate
    assert (second.prompt_source, second.context, second.fallback) == ("stitched", "exact", None)
    assert (second.engine, second.logprobs, second.untrainable) == ("sglang", "temperature_scaled", None)
    assert "input_ids" in fake.bodies[-1]
