"""Real templates of other families on a route of ids: found out, rendered, and their replies read as they stream."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, ToolDefinition
from gangline.models.engines.contract import EngineReply, EngineRequest, ReplyAccumulator
from gangline.models.engines.generate.engine import GenerateEngine
from gangline.models.engines.generate.template import TemplateText
from gangline.models.engines.http import EngineHttp
from gangline.models.language.parsing.detect import detect_parsers
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.tokenizer import HfChatTokenizer
from gangline.serving.scripted.server import scripted_server
from support.engines.tokenizers import glm, gpt_oss, llama31

HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
    '<|constrain|>json<|message|>{"at": "日", "n": 2}'
)
FAMILIES: dict[str, tuple[Callable[[], HfChatTokenizer], Parsers, str, list[Part]]] = {
    "llama3": (
        llama31,
        Parsers("llama3_json"),
        '{"name": "look", "parameters": {"at": "日", "n": 2}}',
        [],
    ),
    "gpt_oss": (gpt_oss, Parsers("harmony", "harmony"), HARMONY, [Thinking("Hm.")]),
    "glm": (
        glm,
        Parsers("glm", "qwen3"),
        "<think>Hm.</think>\nSo.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>日</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        [Thinking("Hm."), Text("\nSo.\n")],
    ),
}
TOOL = ToolDefinition(
    name="look",
    description="Look somewhere.",
    parameters={"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
)
CALL = ModelCall(dialect="test", model="", messages=(Message("user", (Text("Where?"),)),), tools=(TOOL,))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_read_off_the_template(name: str) -> None:
    load, parsers, _, _ = FAMILIES[name]
    assert detect_parsers(load()) == parsers


# Harmony's marks are single tokens in any spelling, which a script cannot split.
@pytest.mark.parametrize(
    ("name", "split"),
    [("llama3", None), ("llama3", "chars"), ("gpt_oss", None), ("glm", None), ("glm", "chars")],
)
async def test_a_reply_in_the_familys_format_is_a_call(name: str, split: str | None) -> None:
    load, _, said, before = FAMILIES[name]
    tokenizer = load()
    async with scripted_server({"default": {"text": said, "split": split}}, tokenizer) as url:
        engine = GenerateEngine(EngineHttp(url), TemplateText(tokenizer))
        replies = [await engine.chat(EngineRequest(call=CALL)), await streamed(engine)]
        await engine.close()
    for reply in replies:
        *others, tool_call = reply.choices[0].message.parts
        assert others == before
        assert isinstance(tool_call, ToolCall)
        assert (tool_call.name, json.loads(tool_call.arguments)) == ("look", {"at": "日", "n": 2})
        assert (reply.choices[0].parse, reply.choices[0].finish_reason) == ("ok", "tool_calls")


async def streamed(engine: GenerateEngine) -> EngineReply:
    folded = ReplyAccumulator()
    async for delta in engine.stream(EngineRequest(call=CALL)):
        folded.feed(delta)
    return folded.reply()


def test_a_text_side_says_whether_it_finds_calls() -> None:
    assert TemplateText(glm()).reads_calls
    assert not TemplateText(glm(), Parsers(thinking="qwen3")).reads_calls
