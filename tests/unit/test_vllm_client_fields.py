"""The canonical call in OpenAI's words: media, tools of every kind, failed results, refusals."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    SamplingParams,
    Text,
    Thinking,
    ToolCall,
    ToolDefinition,
    ToolResult,
)
from gangline.domain.errors import ContextOverflow, EngineRefused, EngineUnavailable
from gangline.domain.tokens import token_ids
from gangline.models.engines.contract import EngineRequest
from gangline.models.engines.fields import call_fields, has_media, messages_fields, messages_in_turns, sent_ids
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.vllm.wire import WireReply, chat_body, decode, engine_reply
from gangline.models.language.tools import tool_fields

PIXEL = "data:image/png;base64,iVBORw0KGgo="
TEXT_FILE = "data:text/plain;base64," + base64.b64encode("drei Äpfel".encode()).decode()


def _call(*messages: Message, **fields: Any) -> ModelCall:
    return ModelCall(dialect="d", model="m", messages=messages, **fields)


def test_images_and_documents_travel_as_parts_in_their_order() -> None:
    parts = (Text("see"), Image(PIXEL, "low"), Document("data:application/pdf;base64,JVBERi0=", "a.pdf"), Text("end"))
    (fields,) = messages_fields([Message("user", parts)])
    assert fields["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0=", "filename": "a.pdf"}},
        {"type": "text", "text": "end"},
    ]


@pytest.mark.parametrize("url", [TEXT_FILE, "data:text/plain;charset=utf-8,drei%20%C3%84pfel"])
def test_a_document_of_text_is_text_and_no_media(url: str) -> None:
    message = Message("user", (Document(url, "list.txt"),))
    assert messages_fields([message])[0]["content"] == [{"type": "text", "text": "drei Äpfel"}]
    assert not has_media([message])


@pytest.mark.parametrize("url", ["data:text/plain;base64,###", "data:text/plain;base64,/w==", "https://x.test/a.txt"])
def test_a_document_that_cannot_be_read_as_text_stays_a_file(url: str) -> None:
    message = Message("user", (Document(url),))
    assert messages_fields([message])[0]["content"] == [{"type": "file", "file": {"file_data": url}}]
    assert has_media([message])


async def test_exact_prompt_ids_are_not_sent_with_media_even_inside_a_tool_result() -> None:
    ids = token_ids([1, 2])
    text = _call(Message("tool", (ToolResult("c", (Text("ok"),)),)))
    shot = _call(Message("tool", (ToolResult("c", (Text("ok"), Image(PIXEL))),)))

    async def body_of(call: ModelCall) -> dict[str, Any]:
        messages = await messages_in_turns(call.messages)
        request = EngineRequest(call=call, prompt_ids=ids)
        return json.loads(b"".join(chat_body(request, "m", messages, sent_ids(ids, call), stream=False)))

    assert "kv_transfer_params" in await body_of(text)
    body = await body_of(shot)
    assert "kv_transfer_params" not in body
    assert body["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ((Text("no such file"),), "Error: no such file"),
        ((Text("Error: no such file"),), "Error: no such file"),
        ((), "Error:"),
        ((Image(PIXEL),), [{"type": "text", "text": "Error:"}, {"type": "image_url", "image_url": {"url": PIXEL}}]),
    ],
)
def test_a_failed_tool_result_says_so_in_its_text(content: tuple[Any, ...], seen: Any) -> None:
    (fields,) = messages_fields([Message("tool", (ToolResult("c", content, is_error=True),))])
    assert (fields["role"], fields["tool_call_id"], fields["content"]) == ("tool", "c", seen)


def test_several_results_in_one_message_are_one_message_each_and_the_rest_follows() -> None:
    parts = (ToolResult("a", (Text("1"),)), Text("go on"), ToolResult("b", (Text("2"),)))
    assert messages_fields([Message("user", parts)]) == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "user", "content": "go on"},
    ]


def test_a_custom_tool_is_a_function_of_one_string_with_its_grammar_told() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    function = tool_fields(ToolDefinition("patch", "Edits.", kind="custom", grammar=grammar))["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["parameters"]["properties"]["input"]["type"] == "string"
    assert function["description"] == "Edits.\n\n`input` must match this lark grammar:\nstart: WORD"


def test_a_custom_tool_whose_dialect_made_it_a_function_is_sent_as_that() -> None:
    made = {"type": "object", "properties": {"input": {"type": "string", "description": "By this grammar: x"}}}
    tool = ToolDefinition("patch", "Edits.", made, kind="custom", grammar={"syntax": "lark", "definition": "x"})
    assert tool_fields(tool)["function"] == {"name": "patch", "description": "Edits.", "parameters": made}


def test_every_sampling_parameter_is_carried_and_none_is_made_up() -> None:
    sampling = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=7,
        stop=("END",),
        presence_penalty=0.1,
        frequency_penalty=-0.2,
    )
    schema: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    fields = call_fields(_call(sampling=sampling, num_choices=2, response_format=schema, template_kwargs={"k": 1}))
    assert fields == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
        "stop": ["END"],
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "n": 2,
        "response_format": schema,
        "chat_template_kwargs": {"k": 1},
    }
    assert call_fields(_call()) == {}


def test_an_echoed_call_without_text_has_no_content() -> None:
    (fields,) = messages_fields([Message("assistant", (ToolCall("c", "f", "{}"),))])
    assert fields["content"] is None
    assert fields["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_cached_and_thinking_tokens_are_counted_wherever_the_engine_puts_them() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    for extra in ({"completion_tokens_details": {"reasoning_tokens": 3}}, {"reasoning_tokens": 3}):
        body = json.dumps({"choices": [], "usage": usage | extra}).encode()
        found = engine_reply(decode(body, WireReply, "URL")).usage
        assert found is not None
        assert (found.num_prompt_tokens, found.num_cached_tokens, found.num_thinking_tokens) == (9, 8, 3)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 10 tokens. However, you requested 12 tokens.",
        "The decoder prompt (length 12) is longer than the maximum model length of 10.",
        "max_tokens=12 cannot be greater than max_model_len=max_total_tokens=10.",
        "The input (12 tokens) is longer than the model's context length (10 tokens).",
        "Requested token count exceeds the model's maximum context length of 10 tokens.",
        "Input length (12 tokens) exceeds the maximum allowed length (10 tokens).",
        "the request exceeds the available context size, try increasing it",
    ],
)
def test_every_engines_overflow_is_recognised(message: str) -> None:
    refused = EngineHttp("http://e").refusal(400, json.dumps({"error": {"message": message}}).encode())
    assert isinstance(refused, ContextOverflow)
    flat = EngineHttp("http://e").refusal(400, json.dumps({"object": "error", "message": message}).encode())
    assert isinstance(flat, ContextOverflow)


def test_other_refusals_are_the_callers_or_the_engines_by_their_status() -> None:
    http = EngineHttp("http://e/v1/")
    assert http.url == "http://e"
    assert isinstance(http.refusal(400, b'{"error": {"message": "max_tokens must be positive"}}'), EngineRefused)
    for status in (408, 429, 500, 503):
        assert isinstance(http.refusal(status, b"<html>"), EngineUnavailable)


async def test_a_conversation_with_long_texts_is_encoded_in_slices_as_it_is_at_once() -> None:
    long = 'a "quote", \u00e9, \U0001f600 and \n\x00 ' * 40_000
    messages = [
        Message("system", (Text("short"),)),
        Message("user", (Text(long), Image("data:image/png;base64," + "A" * 600_000, "high"))),
        Message("assistant", (Thinking(long), Text(long), ToolCall("c1", "f", json.dumps([long])))),
        Message("tool", (ToolResult("c1", (Text(long),), is_error=True), ToolResult("c2", ()))),
        Message("user", tuple(Text(f"part {number}") for number in range(2000))),
    ]
    encoded = await messages_in_turns(messages)
    assert json.loads(b"".join(encoded)) == messages_fields(messages)
    assert json.loads(b"".join(await messages_in_turns([]))) == []
    assert max(map(len, encoded)) < 2 << 20


async def test_other_tasks_run_while_a_long_conversation_is_encoded() -> None:
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await messages_in_turns([Message("user", (Text("a" * (8 << 20)),))])
    task.cancel()
    assert num_turns > 1
