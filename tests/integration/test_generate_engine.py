"""Tier T2: an engine that takes ids and gives ids; prompts are rendered and replies are read on this side."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from transformers import PreTrainedTokenizerFast

from gangline.domain.conversation import (
    Image,
    Message,
    ModelCall,
    Part,
    SamplingParams,
    Text,
    Thinking,
    ToolCall,
    ToolDefinition,
)
from gangline.domain.errors import ContextOverflow, EngineIncapable, EngineRefused, EngineUnavailable, InvalidRequest
from gangline.domain.tokens import token_ids
from gangline.models.engine_server.app import serving
from gangline.models.engines.contract import EngineReply, EngineRequest, ReplyAccumulator
from gangline.models.engines.fields import NEUTRAL_SAMPLING
from gangline.models.engines.generate.engine import GenerateEngine
from gangline.models.engines.generate.renderers import RenderersText, renderers_engine
from gangline.models.engines.generate.routes import generate_engine
from gangline.models.engines.generate.template import TemplateText, template_engine
from gangline.models.engines.http import EngineHttp
from gangline.models.language.tokenizer import load_tokenizer
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app, scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.settings import plugins
from support.engines.sglang_engine import FakeSglang, sglang_server
from support.engines.tokenizers import qwen3_folder
from support.node.proxy import proxied_engine
from support.sdk.dialect_conversations import DIALECTS, RESULT, two_turns

# The Google SDK derives its client session from aiohttp's, which aiohttp discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

TOKENIZER = TinyTokenizer()
TOOL = ToolDefinition(name="look", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
CALLED = {"thinking": "Hm.", "text": "I look.", "tool_calls": [{"name": "look", "arguments": {"at": "日"}}]}
SCRIPT: dict[str, Any] = {
    # A route of ids knows no turns: what the tool said is how the second one is told.
    "rules": [{"pattern": RESULT, "where": "any", "text": "It is here."}, {"pattern": "Where is it", **CALLED}],
    "default": {"text": "one two STOP three"},
}
PARSERS = {"thinking": "qwen3", "tools": "hermes"}


def by_template(url: str, **options: Any) -> GenerateEngine:
    return GenerateEngine(EngineHttp(url), TemplateText(TOKENIZER), **options)


def by_routes(url: str) -> GenerateEngine:
    return generate_engine(url, parsers=PARSERS)


Make = Callable[[str], GenerateEngine]
KINDS: list[Make] = [by_template, by_routes]


def call(text: str = "Where is it?", **fields: Any) -> ModelCall:
    messages = (Message("user", (Text(text),)),)
    return ModelCall(**({"dialect": "test", "model": "", "messages": messages, "tools": (TOOL,)} | fields))


@asynccontextmanager
async def scripted(script: dict[str, Any] = SCRIPT, make: Make = by_template) -> AsyncGenerator[GenerateEngine, None]:
    async with scripted_server(script) as url:
        engine = make(url)
        try:
            yield engine
        finally:
            await engine.close()


async def streamed(engine: GenerateEngine, asked: ModelCall) -> EngineReply:
    folded = ReplyAccumulator()
    async for delta in engine.stream(EngineRequest(call=asked)):
        folded.feed(delta)
    return folded.reply()


def parts(reply: EngineReply) -> list[Part]:
    return [ToolCall("", p.name, p.arguments) if isinstance(p, ToolCall) else p for p in reply.choices[0].message.parts]


@pytest.mark.parametrize("make", KINDS)
async def test_the_probe_says_what_a_route_of_ids_can(make: Make) -> None:
    async with scripted(make=make) as engine:
        found = await engine.capabilities()
    assert (found.engine, found.model, found.prompt_source) == ("generate_vllm", "scripted", "rendered")
    assert found.takes_prompt_ids
    assert found.streams_ids
    assert found.renders
    assert found.reports_versions
    assert (found.max_context, found.logprob_kind) == (200_000, "raw")


@pytest.mark.parametrize("make", KINDS)
async def test_a_stream_says_what_the_whole_reply_says(make: Make) -> None:
    async with scripted(make=make) as engine:
        whole, stream = await engine.chat(EngineRequest(call=call())), await streamed(engine, call())
    said = parts(whole)
    assert said[:2] == [Thinking("\nHm.\n"), Text("\n\nI look.\n")]
    assert isinstance(said[2], ToolCall)
    assert json.loads(said[2].arguments) == {"at": "日"}
    assert whole.choices[0].finish_reason == "tool_calls"
    assert parts(stream) == said
    for one, other in zip(whole.choices, stream.choices, strict=True):
        assert np.array_equal(one.sampled_ids, other.sampled_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
        assert (one.finish_reason, one.version_spans, one.parse) == (
            other.finish_reason,
            other.version_spans,
            other.parse,
        )
    assert whole.usage == stream.usage
    assert np.array_equal(whole.prompt_ids, await_render(TOKENIZER))


def await_render(tokenizer: TinyTokenizer) -> list[int]:
    function = {"name": "look", "parameters": TOOL.parameters}
    tools = [{"type": "function", "function": function}]
    return tokenizer.render([{"role": "user", "content": "Where is it?"}], tools=tools)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_text_and_ids(make: Make, stream: bool) -> None:
    asked = call("x", sampling=SamplingParams(stop=("STOP", "never")), tools=())
    async with scripted(make=make) as engine:
        reply = await streamed(engine, asked) if stream else await engine.chat(EngineRequest(call=asked))
    (choice,) = reply.choices
    assert parts(reply) == [Text("one two ")]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "STOP")
    assert TOKENIZER.decode(choice.sampled_ids.tolist()) == "one two STOP"
    assert len(choice.logprobs) == len(choice.sampled_ids)


async def test_a_reply_that_is_too_long_is_cut_off_in_the_engine() -> None:
    asked = call("x", sampling=SamplingParams(max_tokens=2), tools=())
    async with scripted() as engine:
        reply = await engine.chat(EngineRequest(call=asked))
    assert reply.choices[0].finish_reason == "length"
    assert len(reply.choices[0].sampled_ids) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_numbered_and_their_tokens_counted(stream: bool) -> None:
    async with scripted() as engine:
        asked = call(num_choices=3)
        reply = await streamed(engine, asked) if stream else await engine.chat(EngineRequest(call=asked))
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None
    assert reply.usage.num_sampled_tokens == 3 * len(reply.choices[0].sampled_ids)


async def test_a_client_that_asks_for_logprobs_gets_those_of_the_tokens() -> None:
    async with scripted() as engine:
        reply = await streamed(engine, call("x", num_top_logprobs=1, tools=()))
    (choice,) = reply.choices
    texts = [entry.token for entry in choice.token_logprobs]
    assert "".join(texts) == "one two STOP three<|im_end|>"
    assert [entry.logprob for entry in choice.token_logprobs] == pytest.approx(choice.logprobs.tolist())
    assert all(len(entry.top) == 1 for entry in choice.token_logprobs)


async def test_exact_prompt_ids_are_sent_as_they_are() -> None:
    ids = token_ids(TOKENIZER.encode("any ids at all"))
    async with scripted() as engine:
        reply = await engine.chat(EngineRequest(call=call(), prompt_ids=ids))
    assert np.array_equal(reply.prompt_ids, ids)


async def test_a_prompt_beyond_the_context_is_told_before_it_is_sent() -> None:
    async with scripted(SCRIPT | {"context_length": 60}) as engine:
        with pytest.raises(ContextOverflow, match="maximum context length is 60"):
            await engine.chat(EngineRequest(call=call("word " * 60)))


async def test_images_are_refused() -> None:
    message = Message("user", (Image("data:image/png;base64,AA=="),))
    async with scripted() as engine:
        with pytest.raises(EngineRefused, match="no images"):
            await engine.chat(EngineRequest(call=call(messages=(message,))))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_goes_on_exactly_after_a_rendered_prompt(dialect: str, stream: bool) -> None:
    async with scripted() as engine, proxied_engine(engine) as running:
        first, second = await two_turns(running, dialect, stream=stream)
    assert first.certificate.prompt_source == "rendered"
    assert [type(part) for part in first.response.parts] == [Thinking, Text, ToolCall]
    assert (second.certificate.prompt_source, second.certificate.context) == ("stitched", "exact")
    assert [type(part) for part in second.response.parts] == [Text]


async def test_where_nothing_is_stitched_prompts_are_rendered_here_and_compared() -> None:
    async with scripted() as engine, proxied_engine(engine, tier="observe") as running:
        _, second = await two_turns(running, "openai_chat", stream=False)
    assert second.certificate.prompt_source == "rendered"
    assert second.certificate.context in ("exact", "diverged")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_real_qwen3_template_renders_and_parses(stream: bool) -> None:
    folder = qwen3_folder()
    async with (
        scripted_server(SCRIPT, folder) as url,
        proxied_engine(template_engine(url, tokenizer=folder)) as running,
    ):
        first, second = await two_turns(running, "anthropic", stream=stream)
    assert [type(part) for part in first.response.parts] == [Thinking, Text, ToolCall]
    assert (second.certificate.prompt_source, second.certificate.context) == ("stitched", "exact")


async def test_another_tokenizer_than_the_engines_is_refused() -> None:
    async with scripted_server(SCRIPT, qwen3_folder()) as url:
        engine = by_template(url)
        with pytest.raises(EngineIncapable, match="another tokenizer"):
            await engine.probe()
        await engine.close()


async def test_a_broken_stream_is_an_error() -> None:
    faulty = {"default": {"text": "one two three", "faults": {"drop_connection": 2, "times": None}}}
    async with scripted(SCRIPT) as probed:
        await probed.probe()
    async with scripted(SCRIPT | faulty) as engine:
        with pytest.raises(EngineUnavailable):
            await streamed(engine, call("x"))


async def test_nan_logprobs_reach_the_record() -> None:
    script = {"default": {"text": "a", "faults": {"nan_logprobs": True}}}
    async with scripted(script) as engine:
        reply = await streamed(engine, call("x"))
    assert all(math.isnan(value) for value in reply.choices[0].logprobs)


# -- SGLang ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [False, True])
async def test_sglangs_route_is_found_and_streams_either_way(incremental: bool) -> None:
    fake = FakeSglang(text="Hello <think> 日 world", incremental=incremental)
    async with sglang_server(fake) as url:
        engine = by_template(url)
        found = await engine.capabilities()
        whole, stream = await engine.chat(EngineRequest(call=call())), await streamed(engine, call())
        await engine.close()
    assert (found.engine, found.logprob_kind, found.streams_ids) == ("generate_sglang", "temperature_scaled", True)
    for reply in (whole, stream):
        (choice,) = reply.choices
        assert parts(reply) == [Text(fake.text)]
        assert TOKENIZER.decode(choice.sampled_ids.tolist()) == fake.text + "<|im_end|>"
        assert choice.logprobs.tolist() == [-0.25] * len(choice.sampled_ids)
        assert choice.finish_reason == "stop"
        assert [span.version for span in choice.version_spans] == [3]
        assert reply.usage is not None
        assert reply.usage.num_cached_tokens == 2


async def test_sglangs_sampling_parameters_have_its_names() -> None:
    fake = FakeSglang()
    sampling = SamplingParams(max_tokens=7, temperature=0.5, seed=3, top_k=4, stop=("x",))
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    async with sglang_server(fake) as url:
        engine = by_template(url)
        await engine.chat(EngineRequest(call=call(sampling=sampling, response_format=schema)))
        await engine.close()
    assert fake.bodies[-1]["sampling_params"] == NEUTRAL_SAMPLING | {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_k": 4,
        "sampling_seed": 3,
        "stop_token_ids": sorted(TOKENIZER.eos_ids),
        "json_schema": '{"type":"object"}',
        "skip_special_tokens": False,
    }


async def test_odd_logprobs_of_sglang_name_the_engine() -> None:
    async with sglang_server(FakeSglang(odd_logprobs=True)) as url:
        engine = by_template(url)
        with pytest.raises(EngineUnavailable, match="odd log-probs"):
            await engine.probe()
        await engine.close()


# -- what no engine can be made of -----------------------------------------------------------------------------------


@asynccontextmanager
async def answering(path: str, body: Any, status: int = 200) -> AsyncGenerator[str, None]:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(path, answer)
    async with serving(app) as url:
        yield url


VLLM = "/inference/v1/generate"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/nowhere", {}, 200, "no generate route"),
        (VLLM, {"error": {"message": "not enabled"}}, 403, "not enabled.*--enable-scale-out"),
        (VLLM, {"choices": [{"finish_reason": "stop"}]}, 200, "no token ids"),
        (VLLM, {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}, 200, "no log-prob"),
    ],
)
async def test_what_is_missing_is_named(path: str, body: Any, status: int, message: str) -> None:
    async with answering(path, body, status) as url:
        engine = by_template(url)
        with pytest.raises(EngineIncapable, match=message):
            await engine.probe()
        await engine.close()


def test_options_that_are_wrong_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        template_engine("http://127.0.0.1:1")
    with pytest.raises(InvalidRequest, match="route"):
        generate_engine("http://127.0.0.1:1", route="tgi")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="parsers"):
        generate_engine("http://127.0.0.1:1", parsers={"tools": "x"})


def test_they_come_through_the_door_of_plug_ins() -> None:
    assert {"generate", "generate_template", "generate_renderers"} <= set(plugins.names("engine"))
    assert plugins.load("engine", "generate") is generate_engine


# -- renderers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_renderers_renders_and_parses(stream: bool) -> None:
    folder = qwen3_folder()
    async with (
        scripted_server(SCRIPT, folder) as url,
        proxied_engine(renderers_engine(url, tokenizer=folder, renderer="qwen3")) as running,
    ):
        first, second = await two_turns(running, "openai_responses", stream=stream)
    thinking, text, tool_call = first.response.parts
    assert (thinking, text) == (Thinking("Hm."), Text("I look."))
    assert isinstance(tool_call, ToolCall)
    assert (tool_call.name, json.loads(tool_call.arguments)) == ("look", {"at": "日"})
    assert first.certificate.prompt_source == "rendered"
    assert (second.certificate.prompt_source, second.certificate.context) == ("stitched", "exact")


async def test_renderers_renders_what_the_template_renders() -> None:
    folder = qwen3_folder()
    core = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    library, template = RenderersText(core, {"name": "qwen3"}), TemplateText(load_tokenizer(folder))
    for kwargs in (None, {"enable_thinking": False}):
        ours, theirs = [await side.render(call().messages, (TOOL,), kwargs, True) for side in (library, template)]
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("stream", [False, True])
async def test_renderers_stops_at_strings_and_keeps_broken_calls(stream: bool) -> None:
    folder = qwen3_folder()
    broken = '<tool_call>\n{"name": "look"\n</tool_call>'
    script = {"rules": [{"pattern": "broken", "text": broken}], "default": SCRIPT["default"]}
    async with scripted_server(script, folder) as url:
        engine = renderers_engine(url, tokenizer=folder, renderer="qwen3")
        for text, said, parse, reason in (
            ("broken", '{"name": "look"', "failed", None),
            ("x", "one two", "ok", "STOP"),
        ):
            asked = call(text, sampling=SamplingParams(stop=("STOP",)))
            reply = await streamed(engine, asked) if stream else await engine.chat(EngineRequest(call=asked))
            (choice,) = reply.choices
            assert "".join(part.text for part in parts(reply) if isinstance(part, Text)).strip() == said
            assert (choice.parse, choice.stop_reason, choice.finish_reason) == (parse, reason, "stop")
        await engine.close()


@pytest.mark.parametrize(
    "options", [{}, {"renderer": "x"}, {"renderer": {"name": "qwen3", "x": 1}}, {"renderer": {"name": "custom"}}]
)
def test_a_renderer_that_cannot_be_made_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        renderers_engine("http://127.0.0.1:1", tokenizer=qwen3_folder(), **options)


async def test_template_arguments_that_the_renderer_does_not_know_are_refused() -> None:
    core = PreTrainedTokenizerFast.from_pretrained(qwen3_folder(), local_files_only=True)
    with pytest.raises(EngineRefused, match="no_such"):
        await RenderersText(core, {"name": "qwen3"}).render(call().messages, (), {"no_such": 1}, True)


# -- leaving early ---------------------------------------------------------------------------------------------------

ENDLESS: dict[str, Any] = {"rules": [{"pattern": "One word", "text": "a"}]}


async def test_a_stop_string_frees_the_engine() -> None:
    slow = Script.model_validate({**ENDLESS, "default": {"text": "STOP" + " and" * 5000, "token_delay_s": 0.05}})
    sampler = ScriptedSampler(slow, TOKENIZER)
    async with serving(create_scripted_app(sampler)) as url:
        engine = by_template(url)
        reply = await streamed(engine, call("x", sampling=SamplingParams(stop=("STOP",)), tools=()))
        async with asyncio.timeout(20):
            await sampler.pause("wait")
        await engine.close()
    assert reply.choices[0].stop_reason == "STOP"


async def test_a_call_that_is_cut_off_is_recorded_as_rendered() -> None:
    slow = {**ENDLESS, "default": {"text": "and " * 5000, "token_delay_s": 0.05}}
    async with scripted(slow) as engine, proxied_engine(engine) as running:
        async with running.client() as client:
            messages: Any = [{"role": "user", "content": "go on"}]
            async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
                if chunk.choices and chunk.choices[0].delta.content:
                    break
        await running.session.fence("over")
        (completion,) = running.journal.completions
    assert (completion.status, completion.certificate.prompt_source) == ("aborted", "rendered")
    assert 0 < len(completion.sampled_ids) == len(completion.logprobs)
