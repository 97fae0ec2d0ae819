"""Options of engine plug-ins: through the pool, whoever names them."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition
from gangline.domain.errors import InvalidRequest
from gangline.models.engines.contract import EngineRequest
from gangline.models.language.parsing.parser import Parsers
from gangline.node.backends.pool import BackendPool
from gangline.serving.scripted.server import scripted_server
from support.engines.tokenizers import qwen3_folder

CALL = ModelCall(
    dialect="test",
    model="",
    messages=(Message("user", (Text("x"),)),),
    tools=(ToolDefinition(name="look", parameters={"type": "object"}),),
)
SCRIPT = {"default": {"thinking": "Hm.", "text": "So.", "tool_calls": [{"name": "look"}]}}
PARSERS = {"thinking": "qwen3", "tools": "hermes"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("auto", {"parsers": PARSERS}),
        ("vllm", {"parsers": PARSERS}),
        ("generate", {"parsers": PARSERS, "route": "vllm"}),
        ("generate_template", {"tokenizer": "qwen3"}),
        ("generate_renderers", {"tokenizer": "qwen3", "renderer": "qwen3"}),
    ],
)
async def test_a_raw_engine_calls_tools_with_the_options_of_its_kind(kind: str, options: dict[str, Any]) -> None:
    folder = qwen3_folder()
    if "tokenizer" in options:
        options = options | {"tokenizer": folder}
    pool = BackendPool()
    async with scripted_server(SCRIPT, folder, parsers=Parsers()) as url:
        await pool.add(url, kind, options=options)
        (spec,) = pool.members()
        reply = await pool.engine_for("s1", "t1").chat(EngineRequest(call=CALL))
        await pool.close()
    assert spec.options == options
    assert [type(part) for part in reply.choices[0].message.parts] == [Thinking, Text, ToolCall]
    assert reply.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("vllm", {"parser": PARSERS}, "no option 'parser'.*parsers"),
        ("vllm", {"parsers": "hermes"}, "must be an object"),
        ("vllm", {"parsers": {"tools": "no-such"}}, "one of hermes"),
        ("vllm", {"parsers": {"thinking": "harmony", "tools": "harmony"}}, "route of ids"),
        ("vllm", {"parsers": {"thinking": "qwen3", "tools": "kimi_k2"}}, "marks of kimi_k2 and qwen3.*route of ids"),
        ("vllm", {"api_key": "secret"}, "no option 'api_key'"),
        ("generate", {"parsers": {"tools": "no-such"}}, "one of hermes"),
        ("generate_template", {}, "needs the model's tokenizer"),
    ],
)
async def test_options_that_a_kind_does_not_have_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    pool = BackendPool()
    with pytest.raises(InvalidRequest, match=message):
        await pool.add("http://127.0.0.1:1", kind, options=options)
    await pool.close()
