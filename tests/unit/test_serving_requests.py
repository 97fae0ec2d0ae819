"""What a request may say, and how it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.models.engine_server.generation import exact_prompt_ids, plan
from gangline.models.engine_server.wire import ApiError, ChatRequest, decode_request
from gangline.models.language.messages import check_tools, template_messages
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer

USER = {"role": "user", "content": "hi"}
BASH: dict[str, Any] = {"type": "function", "function": {"name": "bash"}}


def chat(**fields: Any) -> ChatRequest:
    return decode_request(json.dumps({"messages": [USER], **fields}).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"temperature": [1]}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ],
)
def test_a_wrong_or_unsupported_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as refused:
        decode_request(b"{}", ChatRequest)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[]", b"", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON"):
        decode_request(body, ChatRequest)


def test_neutral_values_of_unsupported_fields_and_unknown_fields_are_accepted() -> None:
    asked = chat(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, store=False, max_tokens=None)
    assert asked.max_tokens is None


def test_penalties_reach_the_sampler_and_a_response_format_is_accepted() -> None:
    asked = chat(presence_penalty=0.5, frequency_penalty=-1, response_format={"type": "json_schema", "json_schema": {}})
    request = plan(ScriptedSampler(Script(), TinyTokenizer()), asked, [1, 2], max_tokens=None)
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_sampling_value_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    sampler = ScriptedSampler(Script(), TinyTokenizer())
    asked = chat(**fields)
    with pytest.raises(ApiError) as refused:
        plan(sampler, asked, [1, 2], max_tokens=asked.max_tokens)
    assert refused.value.param == param


def test_what_is_left_of_the_context_is_the_default_budget() -> None:
    sampler = ScriptedSampler(Script(context_length=100), TinyTokenizer())
    assert plan(sampler, chat(), [1] * 60, max_tokens=None).max_tokens == 40
    assert plan(sampler, chat(), [1] * 60, max_tokens=40).max_tokens == 40
    with pytest.raises(ApiError, match="maximum context length is 100 tokens"):
        plan(sampler, chat(), [1] * 60, max_tokens=41)
    with pytest.raises(ApiError, match="contains 100 input tokens"):
        plan(sampler, chat(), [1] * 100, max_tokens=None)


def test_ending_the_turn_can_be_ignored_and_other_ids_can_end_it() -> None:
    sampler = ScriptedSampler(Script(), TinyTokenizer())
    assert plan(sampler, chat(), [1], max_tokens=1).stop_ids == sampler.tokenizer.eos_ids
    asked = chat(ignore_eos=True, stop_token_ids=[7])
    assert plan(sampler, asked, [1], max_tokens=1).stop_ids == {7}


@pytest.mark.parametrize("ids", [[], [-1], ["a"], "abc", [1.5]])
def test_exact_prompt_ids_that_are_no_ids_are_refused(ids: object) -> None:
    with pytest.raises(ApiError) as refused:
        exact_prompt_ids(chat(kv_transfer_params={"prompt_token_ids": ids}))
    assert refused.value.param == "kv_transfer_params.prompt_token_ids"


def test_messages_become_what_templates_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    system, user, assistant = template_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        ]
    )
    assert system["role"] == "system"
    assert user["content"] == "a\nb"
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == assistant["reasoning"] == "hm"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}


def test_arguments_that_are_no_json_reach_the_template_as_text() -> None:
    call = {"function": {"name": "f", "arguments": "{broken"}}
    (message,) = template_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "{broken"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "messages[0].tool_calls"),
    ],
)
def test_a_message_that_a_text_template_cannot_carry_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        template_messages([message])
    assert refused.value.details["param"] == param


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "function"}], None, "tools[0].function.name"),
        ([], "required", "tool_choice"),
        ([BASH], "sometimes", "tool_choice"),
        ([BASH], {"type": "function", "function": {"name": "python"}}, "tool_choice"),
    ],
)
def test_a_tool_choice_that_cannot_be_met_is_refused(tools: list[dict[str, Any]], choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_tools(tools, choice)
    assert refused.value.details["param"] == param


def test_a_tool_that_is_there_can_be_chosen() -> None:
    for choice in (None, "none", "auto", "required", {"type": "function", "function": {"name": "bash"}}):
        check_tools([BASH], choice)
