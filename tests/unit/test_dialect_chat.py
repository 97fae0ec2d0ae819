"""The OpenAI Chat dialect: bodies in, bodies and events out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
    ToolResult,
    Usage,
)
from gangline.domain.errors import (
    ContextOverflow,
    DiskFull,
    EngineIncapable,
    EngineMalformed,
    EngineRefused,
    EngineUnavailable,
    GanglineError,
    InvalidRequest,
    LimitExceeded,
    SessionOver,
    Unauthorized,
)
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.wire.dialects.chat.dialect import ChatDialect
from gangline.wire.dialects.contract import RawRequest

CHAT = ChatDialect()
USER = {"role": "user", "content": "hello"}


def _parse(**fields: Any) -> ModelCall:
    return CHAT.parse_call(RawRequest(body=json.dumps({"model": "m", "messages": [USER]} | fields).encode()))


def _user(*content: Any) -> Any:
    return {"role": "user", "content": list(content)}


PIXEL = "data:image/png;base64,AAAA"


def test_images_and_files_are_carried_also_in_tool_results() -> None:
    image = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "QUJD"}}
    call = _parse(
        messages=[
            _user({"type": "text", "text": "see"}, image, file),
            {"role": "tool", "tool_call_id": "1", "content": [image]},
        ]
    )
    seen = Image(PIXEL, "low")
    assert call.messages == (
        Message("user", (Text("see"), seen, Document("data:application/pdf;base64,QUJD", "a.pdf"))),
        Message("tool", (ToolResult("1", (seen,)),)),
    )


GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "d", "format": GRAMMAR}}


def test_a_custom_tool_is_a_function_of_one_string_on_its_way_in_and_itself_on_its_way_out() -> None:
    echo = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'say "x"'}}
    call = _parse(
        tools=[PATCH, {"type": "web_search_preview"}],
        tool_choice={"type": "custom", "custom": {"name": "patch"}},
        messages=[USER, {"role": "assistant", "tool_calls": [echo]}],
    )
    (tool,) = call.tools
    assert (tool.kind, tool.grammar) == ("custom", GRAMMAR)
    assert "start: WORD" in str(tool.parameters)
    assert call.dropped == ("tools[1]: web_search_preview",)
    assert call.tool_choice == ToolChoice("named", "patch")
    called = call.messages[1].parts[0]
    assert called == ToolCall("c1", "patch", '{"input":"say \\"x\\""}')

    assert isinstance(called, ToolCall)
    message = Message("assistant", (Text("ok"), called, ToolCall("c2", "f", "{}")))
    reply = _reply(ReplyChoice(index=0, message=message, finish_reason="tool_calls"))
    whole = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert json.loads(CHAT.reply_body(call, reply))["choices"][0]["message"]["tool_calls"] == [echo, whole]

    writer = CHAT.event_writer(call, reply_id="k", model="m", created_at=7)
    data = writer.start(3)
    data += writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(0, '{"input": "sa', "c1", "patch"),)))
    data += writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(0, 'y"}'), ToolCallDelta(1, "{}", "c2", "f"))))
    data += writer.finish(reply)
    pieces = [p for e in _events(data)[:-1] for p in e["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces == [{"index": 1} | whole, {"index": 0} | echo]


def test_every_message_kind_is_carried_in_order() -> None:
    call = _parse(
        messages=[
            {"role": "system", "content": "S"},
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "U", "name": "ann"},
            {
                "role": "assistant",
                "content": "T",
                "reasoning_content": "R",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                    {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "out"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "more"}]},
            {"role": "system", "content": "late"},
        ]
    )
    assert call.messages == (
        Message("system", (Text("S"),)),
        Message("developer", (Text("a"), Text("b"))),
        Message("user", (Text("U"),), "ann"),
        Message("assistant", (Thinking("R"), Text("T"), ToolCall("1", "f", '{"x":1}'), ToolCall("2", "g", ""))),
        Message("tool", (ToolResult("1", (Text("out"),)),)),
        Message("tool", (ToolResult("2", (Text("more"),)),)),
        Message("system", (Text("late"),)),
    )


def test_an_assistant_turn_without_content_is_an_empty_message() -> None:
    for content in (None, "", []):
        assert _parse(messages=[{"role": "assistant", "content": content}]).messages == (Message("assistant"),)


def test_parameters_are_carried() -> None:
    call = _parse(
        max_tokens=5,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.9,
        seed=1,
        stop="x",
        presence_penalty=0.1,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=3,
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        response_format={"type": "json_object"},
        chat_template_kwargs={"enable_thinking": False},
    )
    assert (call.sampling.max_tokens, call.sampling.temperature, call.sampling.stop) == (7, 0, ("x",))
    assert (call.num_choices, call.stream, call.include_usage, call.num_top_logprobs) == (2, True, True, 3)
    assert call.tool_choice == ToolChoice("named", "f")
    assert call.template_kwargs == {"enable_thinking": False}
    assert call.response_format == {"type": "json_object"}


def test_fields_without_meaning_here_are_named_in_dropped() -> None:
    assert _parse(user="me", store=False, verbosity="low", logit_bias={}).dropped == (
        "store",
        "user",
        "verbosity",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER | {"function_call": {}}]}, "messages[0]"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "alien", "alien": {"name": "x"}}]}, "tools[0]"),
        (
            {"messages": [_user({"type": "image_url", "image_url": {"url": "x"}})]},
            "messages[0].content[0].image_url.url",
        ),
        ({"messages": [_user({"type": "image_url"})]}, "messages[0].content[0].image_url"),
        ({"messages": [_user({"type": "file", "file": {"file_id": "f"}})]}, "messages[0].content[0].file"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"model": None}, "model"),
        ({"stop": 4}, "stop"),
    ],
)
def test_what_cannot_be_carried_is_refused_and_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _parse(**fields)
    assert refused.value.details["param"] == param
    assert CHAT.error_answer(refused.value).status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model":1}', b"[" * 10000])
def test_bodies_that_are_no_requests_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        CHAT.parse_call(RawRequest(body=body))


def _reply(*choices: ReplyChoice) -> Reply:
    usage = Usage(num_prompt_tokens=3, num_sampled_tokens=2, num_cached_tokens=1)
    return Reply(reply_id="k", model="m", created_at=7, choices=choices, usage=usage)


CALLED = Message("assistant", (Thinking("R"), ToolCall("call_1", "f", "{}")))


def test_a_reply_with_calls_has_null_content_and_both_names_of_thinking() -> None:
    choice = ReplyChoice(index=0, message=CALLED, finish_reason="tool_calls")
    body = json.loads(CHAT.reply_body(_parse(), _reply(choice)))
    assert body["id"] == "chatcmpl-k"
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (None, "R", "R")
    assert message["tool_calls"] == [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["total_tokens"] == 5
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls"), ("abort", "length"), ("repetition", "stop")],
)
def test_finish_reasons_are_ones_that_clients_know(reason: str, shown: str) -> None:
    choice = ReplyChoice(index=0, message=CALLED, finish_reason=reason)
    assert json.loads(CHAT.reply_body(_parse(), _reply(choice)))["choices"][0]["finish_reason"] == shown


def _events(data: bytes) -> list[Any]:
    return [
        event if event == "[DONE]" else json.loads(event)
        for event in (line.removeprefix("data: ") for line in data.decode().split("\n\n") if line)
    ]


def test_a_stream_has_role_deltas_finish_usage_and_done_in_that_order() -> None:
    call = _parse(stream=True, stream_options={"include_usage": True}, logprobs=True)
    writer = CHAT.event_writer(call, reply_id="k", model="m", created_at=7)
    logprob = TokenLogprob("a", -1.0, (97,))
    data = writer.delta(ReplyDelta(thinking="R"))
    data += writer.delta(ReplyDelta(text="a", logprobs=(logprob,)))
    data += writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(0, "{", "call_1", "f"),)))
    data += writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(0, "}"),)))
    data += writer.finish(_reply(ReplyChoice(index=0, message=CALLED, finish_reason="tool_calls")))
    *chunks, usage, done = _events(data)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "R", "reasoning": "R"},
        {"content": "a"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]
    assert chunks[2]["choices"][0]["logprobs"]["content"][0]["bytes"] == [97]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert done == "[DONE]"


def test_an_empty_reply_still_has_its_role_and_its_finish() -> None:
    writer = CHAT.event_writer(_parse(stream=True), reply_id="k", model="m", created_at=7)
    data = writer.finish(_reply(ReplyChoice(index=0, message=Message("assistant"), finish_reason="stop")))
    role, finish, done = _events(data)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


def test_a_stream_that_broke_ends_with_its_error_and_is_not_done() -> None:
    writer = CHAT.event_writer(_parse(stream=True), reply_id="k", model="m", created_at=7)
    assert _events(writer.error(SessionOver("too late"))) == [
        {"error": {"message": "too late", "type": "permission_error", "param": None, "code": "session_over"}}
    ]


def test_a_stream_that_broke_tells_agents_in_its_message_to_try_again() -> None:
    """pi and opencode read nothing else of an error in a stream."""
    writer = CHAT.event_writer(_parse(stream=True), reply_id="k", model="m", created_at=7)
    (event,) = _events(writer.error(EngineUnavailable("engine down")))
    assert event["error"]["message"] == "server_error: engine down"


@pytest.mark.parametrize(
    ("error", "status", "code", "may_retry"),
    [
        (Unauthorized("x"), 401, "invalid_api_key", True),
        (SessionOver("x"), 403, "session_over", True),
        (LimitExceeded("x"), 413, "request_too_large", True),
        (ContextOverflow("x"), 400, "context_length_exceeded", True),
        (EngineRefused("x", status=400), 400, "engine_refused", True),
        (EngineRefused("x", status=401), 502, "engine_refused", False),
        (EngineUnavailable("x"), 503, "engine_unavailable", True),
        (EngineMalformed("x"), 502, "engine_malformed", True),
        (EngineIncapable("x"), 502, "engine_incapable", False),
        (DiskFull("x"), 507, "disk_full", True),
    ],
)
def test_errors_have_the_providers_status_and_code(
    error: GanglineError, status: int, code: str, may_retry: bool
) -> None:
    answer = CHAT.error_answer(error)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code)
    assert (answer.headers.get("x-should-retry") != "false") == may_retry
