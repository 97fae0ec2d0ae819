"""The server that NeMo RL opens over its vLLM, and others of few routes: the tier they allow, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, ToolDefinition
from gangline.domain.errors import EngineRefused, EngineUnavailable
from gangline.domain.task import SamplingPolicy
from gangline.models.engine_server.app import serving
from gangline.models.engines.auto import detect_engine
from gangline.models.engines.contract import EngineRequest, ReplyAccumulator
from gangline.models.engines.text.engine import OpenAITextEngine
from gangline.models.engines.vllm.engine import VllmEngine
from support.engines.nemo_rl import nemo_rl_server
from support.node.proxy import proxied_engine

SCRIPT = {"default": {"text": "two words"}, "context_length": 4096}
LS, CAT = ({"name": name, "arguments": {"path": "/"}} for name in ("ls", "cat"))
CALLS = {"rules": [{"pattern": "hello", "thinking": "Hm.", "text": "So.", "tool_calls": [LS, CAT]}]}
AS_THE_TRAINER = {"temperature": {"override": 1}, "top_p": {"override": 1}, "top_k": {"override": -1}}


async def test_it_is_taken_in_the_observe_tier_which_says_why() -> None:
    async with nemo_rl_server(SCRIPT) as url:
        engine = await detect_engine(f"{url}/v1")
        found = await engine.capabilities()
        assert (found.engine, found.model, found.max_context) == ("vllm", "scripted", 4096)
        assert (found.reports_ids, found.streams_ids, found.renders, found.takes_prompt_ids) == (
            True,
            True,
            True,
            False,
        )
        assert found.tier.startswith("observe: takes no exact prompt ids")
        assert found.logprob_kind == "raw"
        assert found.num_ids is not None
        assert found.template.renders_tools
        await engine.check_health(5.0)
    with pytest.raises(EngineUnavailable):
        await engine.check_health(5.0)
    await engine.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_records_the_ids_that_its_replies_tell(stream: bool) -> None:
    async with nemo_rl_server(SCRIPT) as url, proxied_engine(url) as running, running.client() as client:
        said: list[Any] = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            reply: Any = await client.chat.completions.create(model="m", messages=said, stream=stream)
            if stream:
                text = "".join([one.delta.content or "" async for chunk in reply for one in chunk.choices])
            else:
                text = reply.choices[0].message.content
            said += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        assert text == "two words"
        for number, completion in enumerate(running.journal.completions):
            turns = [Message(one["role"], (Text(one["content"]),)) for one in said[: 1 + 2 * number]]
            assert np.array_equal(running.session.tree.prompt_ids(completion), await running.engine.render(turns))
            assert len(completion.sampled_ids) == len(completion.logprobs) > 0
            assert completion.certificate.prompt_source == "engine"
            assert completion.trainable
        assert len(running.journal.completions) == 2


@pytest.mark.parametrize("wish", [{"temperature": 0.0}, {"top_p": 0.9}, {"extra_body": {"top_k": 20}}])
async def test_a_call_of_another_sampling_is_told_what_to_write(wish: dict[str, Any]) -> None:
    hello: Any = [{"role": "user", "content": "hello"}]
    async with nemo_rl_server(SCRIPT) as url:
        async with proxied_engine(url) as running, running.client() as client:
            with pytest.raises(openai.InternalServerError, match=r"NeMo RL.*capture") as refused:
                await client.chat.completions.create(model="m", messages=hello, **wish)
            assert refused.value.status_code == 503
            assert running.session.failures.engine is not None  # no fault of the agent's
        policy = SamplingPolicy.model_validate(AS_THE_TRAINER)
        async with proxied_engine(url, sampling=policy) as running, running.client() as client:
            await client.chat.completions.create(model="m", messages=hello, **wish)
            (completion,) = running.journal.completions
            assert (completion.certificate.sampling.temperature, completion.certificate.sampling.top_p) == (1, 1)


async def test_a_trainer_of_another_temperature_is_told_so_when_the_engine_is_added() -> None:
    async with nemo_rl_server(SCRIPT, train=(0.8, 1.0), val=(0.0, 1.0)) as url:
        with pytest.raises(EngineUnavailable, match="Train with temperature 1 and top_p 1"):
            await detect_engine(url)


@pytest.mark.parametrize("capture", ["ids", "text"])
async def test_a_url_of_no_engine_is_told_so(capture: Any) -> None:
    async with serving(web.Application()) as url:
        with pytest.raises(EngineRefused, match=r"no /v1/models.*no chat route either.*Name the URL of an engine"):
            await detect_engine(url, capture=capture)


@pytest.mark.parametrize("names", [True, False])
async def test_a_server_of_text_without_a_list_is_served_where_its_model_has_a_name(names: bool) -> None:
    async def chat(_request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]} | ({"model": "plain"} if names else {}))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with serving(app) as url:
        engine = OpenAITextEngine(url, capture="text")
        if names:
            assert (await engine.probe()).model == "plain"
            await engine.check_health(5.0)
        else:
            with pytest.raises(EngineRefused, match=r"its replies name none.*--engine-options"):
                await engine.probe()
        await engine.close()


@pytest.mark.parametrize("script", [SCRIPT, CALLS])
async def test_a_whole_reply_to_a_stream_is_understood(script: dict[str, Any]) -> None:
    message = Message("user", (Text("hello"),))
    tools, sampling = (ToolDefinition("ls"), ToolDefinition("cat")), SamplingParams(max_tokens=200)
    call = ModelCall(dialect="d", model="m", messages=(message,), tools=tools, sampling=sampling)
    request = EngineRequest(call=call)
    async with nemo_rl_server(script, streams=False) as url:
        engine = VllmEngine(url)
        whole = await engine.chat(request)
        folded = ReplyAccumulator()
        async for delta in engine.stream(request):
            folded.feed(delta)
        streamed, told = folded.reply(), whole.choices[0]
        assert streamed.choices[0].message == told.message
        assert streamed.choices[0].finish_reason == told.finish_reason
        assert np.array_equal(streamed.choices[0].sampled_ids, told.sampled_ids)
        assert np.array_equal(streamed.choices[0].logprobs, told.logprobs)
        assert np.array_equal(streamed.prompt_ids, whole.prompt_ids)
        assert streamed.usage == whole.usage
        assert (await engine.probe()).streams_ids
        await engine.close()
