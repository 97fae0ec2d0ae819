"""The client of vLLM's routes: what a probe finds out, and how faults are named."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    SamplingParams,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolResult,
)
from gangline.domain.errors import ContextOverflow, EngineIncapable, EngineRefused, EngineUnavailable
from gangline.domain.template_findings import features, lacks
from gangline.domain.tokens import token_ids
from gangline.models.engine_server.app import serving
from gangline.models.engines.contract import EngineRequest, ReplyAccumulator
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app, scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer


@asynccontextmanager
async def _engine(script: dict[str, Any], **options: Any) -> AsyncGenerator[VllmEngine, None]:
    async with scripted_server(script) as url:
        engine = VllmEngine(url, **options)
        try:
            yield engine
        finally:
            await engine.close()


def _request(text: str = "hello", **fields: Any) -> EngineRequest:
    return EngineRequest(call=ModelCall(dialect="d", model="m", messages=(Message("user", (Text(text),)),), **fields))


async def test_a_probe_finds_what_the_engine_can_do() -> None:
    async with _engine({"model": "m1", "context_length": 4096, "weight_version": 3}) as engine:
        found = await engine.probe()
        assert (found.model, found.max_context, found.engine) == ("m1", 4096, "vllm")
        assert found.reports_ids
        assert found.takes_prompt_ids
        assert found.streams_ids
        assert found.renders
        assert found.reports_versions
        assert found.logprob_kind == "raw"  # the script's log-probs know nothing of top_k
        assert await engine.capabilities() is found


@web.middleware
async def without_ends(request: web.Request, handler: Handler) -> web.StreamResponse:
    """As an engine answers that samples ends of turn, and reports none."""
    response = await handler(request)
    if request.path.endswith("/chat/completions") and isinstance(response, web.Response):
        body = json.loads(cast("bytes", response.body))
        for choice in body["choices"]:
            if choice["finish_reason"] == "stop":
                del choice["token_ids"][-1], choice["logprobs"]["content"][-1]
        return web.json_response(body)
    return response


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("text", "ended"), [("x", True), ("", True), ("a long reply", False)])
async def test_a_probe_sees_whether_ids_have_the_end_of_turn(text: str, ended: bool, ends: bool) -> None:
    script = Script.model_validate({"default": {"text": text}})
    app = create_scripted_app(ScriptedSampler(script, TinyTokenizer()))
    app.middlewares.extend([] if ends else [without_ends])
    async with serving(app) as url:
        engine = VllmEngine(url)
        facts = (await engine.probe()).template
        await engine.close()
    assert facts.reports_ends is (ends if ended else None)
    is_told = ended and not ends
    assert ("the engine leaves ends of turns out of its ids" in features(facts)) is is_told
    assert any("leaves the end of turn out" in one for one in lacks(facts)) is is_told


async def test_log_probs_of_the_sampled_distribution_are_called_processed() -> None:
    async with _engine({"default": {"text": "hi", "logprob": 0.0}}) as engine:
        assert (await engine.probe()).logprob_kind == "processed"


async def test_an_engine_that_ignores_exact_ids_is_not_stitched() -> None:
    async with _engine({"default": {"text": "hi", "faults": {"ignore_prompt_ids": True}}}) as engine:
        assert not (await engine.probe()).takes_prompt_ids


async def test_an_engine_without_ids_is_incapable_and_the_message_says_what_to_start() -> None:
    async with _engine({"default": {"text": "hi", "faults": {"no_token_ids": True}}}) as engine:
        with pytest.raises(EngineIncapable, match=r"no token ids.*gangline engine"):
            await engine.probe()


async def test_an_engine_that_is_down_is_unavailable_and_named() -> None:
    engine = VllmEngine("http://127.0.0.1:9/v1")
    with pytest.raises(EngineUnavailable, match=r"http://127\.0\.0\.1:9 "):
        await engine.probe()
    await engine.close()


async def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    async with _engine({"model": "m1"}, model="m2") as engine:
        with pytest.raises(EngineRefused, match="it serves: m1"):
            await engine.probe()


async def test_a_stream_folds_to_the_whole_reply() -> None:
    script = {"default": {"thinking": "So.", "text": "héllo wörld 🙂", "split": "bytes"}}
    async with _engine(script) as engine:
        whole = await engine.chat(_request())
        folded = ReplyAccumulator()
        async for delta in engine.stream(_request()):
            folded.feed(delta)
        streamed = folded.reply()
        assert streamed.choices[0].message == whole.choices[0].message
        assert np.array_equal(streamed.choices[0].sampled_ids, whole.choices[0].sampled_ids)
        assert np.array_equal(streamed.choices[0].logprobs, whole.choices[0].logprobs)
        assert np.array_equal(streamed.prompt_ids, whole.prompt_ids)
        assert streamed.choices[0].version_spans == whole.choices[0].version_spans != ()
        assert streamed.usage == whole.usage


async def test_exact_prompt_ids_are_what_the_engine_conditions_on() -> None:
    async with _engine({}) as engine:
        ids = token_ids([5, 6, 7])
        request = EngineRequest(call=_request().call, prompt_ids=ids)
        assert np.array_equal((await engine.chat(request)).prompt_ids, ids)


async def test_rendering_and_decoding_are_the_engines() -> None:
    async with _engine({}) as engine:
        ids = await engine.render(_request().call.messages)
        assert await engine.detokenize(ids.tolist()) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_overflow_and_refusals_have_their_own_errors() -> None:
    async with _engine({"context_length": 50}) as engine:
        with pytest.raises(ContextOverflow):
            await engine.chat(_request("word " * 100))
        with pytest.raises(ContextOverflow):
            async for _ in engine.stream(_request("word " * 100)):
                pass
        with pytest.raises(EngineRefused) as refused:
            await engine.render(())
        assert refused.value.details["status"] == 400


async def test_what_an_engine_of_text_cannot_read_is_refused_and_never_dropped() -> None:
    image = ModelCall(dialect="d", model="m", messages=(Message("user", (Image("data:image/png;base64,AA=="),)),))
    async with _engine({}) as engine:
        with pytest.raises(EngineRefused, match="reads text only") as refused:
            await engine.chat(EngineRequest(call=image))
        assert refused.value.details["status"] == 400


async def test_a_call_with_everything_in_it_is_taken_as_it_is() -> None:
    tool = ToolDefinition("patch", kind="custom", grammar={"syntax": "lark", "definition": "start: WORD"})
    call = ModelCall(
        dialect="d",
        model="m",
        messages=(
            Message("developer", (Text("Be brief."),)),
            Message("user", (Document("data:text/plain;base64,aGk=", "a.txt"), Text("go"))),
            Message("assistant", (Thinking("Hm."), ToolCall("c1", "patch", '{"input": "x"}'))),
            Message("tool", (ToolResult("c1", (Text("no"),), is_error=True),)),
        ),
        tools=(tool,),
        tool_choice=ToolChoice("auto"),
        parallel_tool_calls=False,
        sampling=SamplingParams(max_tokens=64, top_k=5, seed=1, stop=("END",), presence_penalty=0.5),
        num_choices=2,
        num_top_logprobs=1,
        response_format={"type": "json_object"},
    )
    async with _engine({"default": {"text": "done"}}) as engine:
        reply = await engine.chat(EngineRequest(call=call))
        assert [choice.message for choice in reply.choices] == [Message("assistant", (Text("done"),))] * 2
        assert all(choice.token_logprobs for choice in reply.choices)
        assert reply.prompt_ids is not None
        seen = await engine.detokenize(reply.prompt_ids.tolist())
        for part in ("Be brief.", "hi", "Error: no", "start: WORD"):
            assert part in seen


async def test_a_stream_that_is_cut_off_is_unavailable() -> None:
    script = {"rules": [{"pattern": "hello", "text": "a b c d", "faults": {"drop_connection": 2, "times": None}}]}
    async with _engine(script) as engine:
        with pytest.raises(EngineUnavailable):
            async for _ in engine.stream(_request()):
                pass


async def test_silence_is_unavailable_after_the_timeout() -> None:
    script = {"rules": [{"pattern": "hello", "text": "a", "faults": {"hang": True}}]}
    async with _engine(script, timeout_s=0.2) as engine:
        with pytest.raises(EngineUnavailable, match="did not answer"):
            await engine.chat(_request())
