"""Text of an engine without parsers, read on this side: thinking and tool calls, streamed and not, in every dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from gangline.domain.conversation import (
    Message,
    ModelCall,
    Part,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from gangline.domain.errors import EngineRefused
from gangline.domain.tokens import token_ids
from gangline.models.engines.contract import EngineReply, EngineRequest, ReplyAccumulator
from gangline.models.engines.text.parsed import ParsedEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.parsing.parser import Parsers
from gangline.serving.scripted.server import scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.node.proxy import proxied_engine
from support.sdk.dialect_conversations import DIALECTS, two_turns

# The Google SDK derives its client session from aiohttp's, which aiohttp discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

BOTH = Parsers(tools="hermes", thinking="qwen3")
TOOL = ToolDefinition(name="look", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
SCRIPT: dict[str, Any] = {
    "rules": [
        {"turn": 0, "thinking": "Hm.", "text": "I look.", "tool_calls": [{"name": "look", "arguments": {"at": "日"}}]},
        {"turn": 1, "text": "It is here."},
    ]
}


def call(**fields: Any) -> ModelCall:
    messages = (Message("user", (Text("Where is it?"),)),)
    return ModelCall(**({"dialect": "test", "model": "", "messages": messages, "tools": (TOOL,)} | fields))


@asynccontextmanager
async def parsed(script: dict[str, Any], parsers: Parsers = BOTH) -> AsyncGenerator[ParsedEngine, None]:
    async with scripted_server(script, parsers=Parsers()) as url:
        engine = ParsedEngine(VllmEngine(url), parsers)
        await engine.probe()
        try:
            yield engine
        finally:
            await engine.close()


async def streamed(engine: ParsedEngine, asked: ModelCall) -> EngineReply:
    folded = ReplyAccumulator()
    async for delta in engine.stream(EngineRequest(call=asked)):
        folded.feed(delta)
    return folded.reply()


def parts(reply: EngineReply) -> list[Part]:
    return [ToolCall("", p.name, p.arguments) if isinstance(p, ToolCall) else p for p in reply.choices[0].message.parts]


async def test_an_engine_that_refuses_tools_calls_them_all_the_same() -> None:
    async with parsed(SCRIPT) as engine:
        whole, stream = await engine.chat(EngineRequest(call=call())), await streamed(engine, call())
    for reply in (whole, stream):
        thinking, text, tool_call = parts(reply)
        assert thinking == Thinking("\nHm.\n")
        assert text == Text("\n\nI look.\n")
        assert isinstance(tool_call, ToolCall)
        assert json.loads(tool_call.arguments) == {"at": "日"}
        assert (reply.choices[0].finish_reason, reply.choices[0].parse) == ("tool_calls", "ok")


async def test_the_tokens_are_those_that_the_engine_reported() -> None:
    async with scripted_server(SCRIPT, parsers=Parsers()) as url:
        engine = ParsedEngine(VllmEngine(url), BOTH)
        raw = VllmEngine(url)
        hidden = call(tool_choice=ToolChoice("none"))
        said, read = await raw.chat(EngineRequest(call=hidden)), await streamed(engine, call())
        await raw.close()
        await engine.close()
    assert np.array_equal(said.choices[0].sampled_ids, read.choices[0].sampled_ids)
    assert np.array_equal(said.choices[0].logprobs, read.choices[0].logprobs)


async def test_a_broken_call_stays_text_and_is_told() -> None:
    broken = '<tool_call>{"name": "look"</tool_call>'
    async with parsed({"default": {"text": broken}}) as engine:
        for reply in (await engine.chat(EngineRequest(call=call())), await streamed(engine, call())):
            assert parts(reply) == [Text(broken)]
            assert (reply.choices[0].finish_reason, reply.choices[0].parse) == ("stop", "failed")


async def test_who_wants_no_calls_gets_text() -> None:
    async with parsed(SCRIPT) as engine:
        reply = await streamed(engine, call(tool_choice=ToolChoice("none")))
    assert "<tool_call>" in "".join(p.text for p in parts(reply) if isinstance(p, Text))


async def test_several_choices_of_one_stream_are_read_apart() -> None:
    async with parsed(SCRIPT) as engine:
        reply = await streamed(engine, call(num_choices=3))
    assert [len(choice.message.parts) for choice in reply.choices] == [3, 3, 3]


async def test_a_block_that_the_prompt_opened_is_thinking() -> None:
    open_ids = TinyTokenizer().encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n")
    async with parsed({"default": {"thinking": "so", "text": "yes"}}) as engine:
        for prompt_ids, opened in ((open_ids, True), (open_ids[:-2], False)):
            request = EngineRequest(call=call(tools=()), prompt_ids=token_ids(prompt_ids))
            reply = await engine.chat(request)
            assert parts(reply) == [Thinking("so\n" if opened else "\nso\n"), Text("\n\nyes")]


async def test_an_engine_without_a_reason_to_refuse_tools_is_asked_as_it_is() -> None:
    async with scripted_server(SCRIPT) as url:
        engine = ParsedEngine(VllmEngine(url), BOTH)
        await engine.probe()
        reply = await streamed(engine, call())
        await engine.close()
    assert [type(part) for part in parts(reply)] == [Thinking, Text, ToolCall]


async def test_without_a_parser_here_the_refusal_reaches_the_caller() -> None:
    async with parsed(SCRIPT, Parsers(thinking="qwen3")) as engine:
        with pytest.raises(EngineRefused, match="tool-call-parser"):
            await engine.chat(EngineRequest(call=call()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_sees_thinking_text_and_calls_and_goes_on_exactly(dialect: str, stream: bool) -> None:
    async with (
        scripted_server(SCRIPT, parsers=Parsers()) as url,
        proxied_engine(ParsedEngine(VllmEngine(url), BOTH)) as running,
    ):
        first, second = await two_turns(running, dialect, stream=stream)
    assert [type(part) for part in first.response.parts] == [Thinking, Text, ToolCall]
    assert second.certificate.prompt_source == "stitched"
    assert second.certificate.context == "exact"
    assert [type(part) for part in second.response.parts] == [Text]
