"""The OpenAI Responses dialect: bodies in, bodies and events out."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    Part,
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
    NotFound,
    SessionOver,
    Unauthorized,
)
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.responses.dialect import ResponsesDialect

RESPONSES = ResponsesDialect()
SUMMARY = {"summary": "auto"}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": GRAMMAR}
SPACE = {"type": "namespace", "name": "mcp__fs", "description": "Files.", "tools": [{"type": "function", "name": "ls"}]}
USAGE = Usage(num_prompt_tokens=7, num_sampled_tokens=5, num_cached_tokens=3, num_thinking_tokens=2)


def _parse(**fields: Any) -> ModelCall:
    return RESPONSES.parse_call(RawRequest(body=json.dumps({"model": "m", "input": "hello"} | fields).encode()))


def _reply(*parts: Part, finish_reason: str = "stop", **fields: Any) -> Reply:
    choice = ReplyChoice(index=0, message=Message("assistant", parts), finish_reason=finish_reason, **fields)
    return Reply(reply_id="k1", model="m", created_at=9, choices=(choice,), usage=USAGE)


def _body(call: ModelCall, *parts: Part, **fields: Any) -> dict[str, Any]:
    return json.loads(RESPONSES.reply_body(call, _reply(*parts, **fields)))


def _writer(call: ModelCall) -> Any:
    return RESPONSES.event_writer(call, reply_id="k1", model="m", created_at=9)


def _events(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split("\ndata: ")[1]) for block in stream.decode().split("\n\n")[:-1]]


def _kinds(stream: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in _events(stream)]


# -- requests --------------------------------------------------------------------------------------------------------


def test_instructions_come_first_and_system_items_keep_their_place() -> None:
    call = _parse(
        instructions="S",
        input=[
            {"role": "user", "content": "U"},
            {"role": "developer", "content": "D"},
            {"role": "system", "content": ""},
        ],
    )
    assert call.messages == (
        Message("system", (Text("S"),)),
        Message("user", (Text("U"),)),
        Message("developer", (Text("D"),)),
        Message("system", (Text(""),)),
    )


def test_items_of_one_reply_are_one_turn_of_the_assistant() -> None:
    call = _parse(
        input=[
            {"role": "user", "content": "U"},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "R"}],
                "encrypted_content": "K",
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "T"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "custom_tool_call", "call_id": "2", "name": "p", "input": '"q"'},
            {"type": "function_call", "call_id": "3", "name": "ls", "namespace": "mcp__fs", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "o"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "p"}]},
            {"role": "assistant", "content": "done"},
        ]
    )
    assert call.messages[1:] == (
        Message(
            "assistant",
            (
                Thinking("R", "K"),
                Text("T"),
                ToolCall("1", "f", '{"x": 1}'),
                ToolCall("2", "p", '{"input":"\\"q\\""}'),
                ToolCall("3", "mcp__fs__ls", "{}"),
            ),
        ),
        Message("tool", (ToolResult("1", (Text("o"),)),)),
        Message("tool", (ToolResult("2", (Text("p"),)),)),
        Message("assistant", (Text("done"),)),
    )


def test_images_and_documents_are_carried() -> None:
    content = [
        {"type": "input_image", "image_url": "https://x/y.png", "detail": "low"},
        {"type": "input_file", "file_data": "aGk=", "filename": "a.pdf"},
        {"type": "input_file", "file_url": "https://x/b.pdf"},
    ]
    assert _parse(input=[{"role": "user", "content": content}]).messages[0].parts == (
        Image("https://x/y.png", "low"),
        Document("data:application/pdf;base64,aGk=", "a.pdf"),
        Document("https://x/b.pdf"),
    )


def test_custom_tools_are_functions_of_one_string_and_namespaces_are_flattened() -> None:
    shell, patch, ls = _parse(tools=[SHELL, PATCH, SPACE]).tools
    assert (shell.kind, shell.namespace) == ("function", None)
    assert (patch.kind, patch.grammar) == ("custom", GRAMMAR)
    assert patch.parameters is not None
    assert patch.parameters["required"] == ["input"]
    assert "start: /.+/" in patch.parameters["properties"]["input"]["description"]
    assert (ls.name, ls.namespace, ls.local_name) == ("mcp__fs__ls", "mcp__fs", "ls")


def test_hosted_tools_and_unknown_fields_are_left_out_by_name() -> None:
    call = _parse(
        tools=[SHELL, {"type": "web_search"}, {"type": "image_generation"}],
        input=[{"role": "user", "content": "U"}, {"type": "web_search_call", "id": "w", "status": "completed"}],
        include=["reasoning.encrypted_content", "file_search_call.results"],
        prompt_cache_key="c",
        text={"verbosity": "low"},
        reasoning={"effort": "high", "summary": "auto"},
        service_tier=None,
        whatever=1,
    )
    assert call.dropped == (
        "include: file_search_call.results",
        "input[1]: web_search_call",
        "prompt_cache_key",
        "text.verbosity",
        "tools[1]: web_search",
        "tools[2]: image_generation",
        "whatever",
    )
    assert [tool.name for tool in call.tools] == ["shell"]


def test_parameters_are_carried() -> None:
    call = _parse(
        max_output_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=1,
        stop="x",
        presence_penalty=0.1,
        frequency_penalty=0.2,
        parallel_tool_calls=False,
        stream=True,
        include=["message.output_text.logprobs"],
        previous_response_id="resp_k0",
    )
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0, 0.5, 3)
    assert (sampling.seed, sampling.stop) == (1, ("x",))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (call.parallel_tool_calls, call.stream, call.num_top_logprobs) == (False, True, 0)
    assert call.previous_reply_id == "resp_k0"
    assert _parse(top_logprobs=4).num_top_logprobs == 4
    assert _parse().num_top_logprobs is None


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "shell"}, ToolChoice("named", "shell")),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("named", "apply_patch")),
        ({"type": "function", "name": "ls"}, ToolChoice("named", "mcp__fs__ls")),
        ({"type": "function", "namespace": "mcp__fs", "name": "ls"}, ToolChoice("named", "mcp__fs__ls")),
    ],
)
def test_a_tool_choice_names_a_tool_as_the_engine_knows_it(choice: Any, read: ToolChoice) -> None:
    assert _parse(tools=[SHELL, PATCH, SPACE], tool_choice=choice).tool_choice == read


def test_structured_output_is_asked_for_in_the_engine_form() -> None:
    asked = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert _parse(text={"format": asked}).response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert _parse(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}
    assert _parse(text={"format": {"type": "text"}}).response_format is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 1}, "model"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "item_reference", "id": "file"}]}, "input[0].id"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [SHELL, SHELL]}, "tools"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [SPACE | {"tools": [{"type": "web_search", "name": "x"}]}]}, "tools[0].tools[0].type"),
        ({"tool_choice": "shell"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": True}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop": [1]}, "stop"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_what_cannot_be_carried_is_refused_and_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _parse(**fields)
    assert refused.value.details["param"] == param
    assert json.loads(RESPONSES.error_answer(refused.value).body)["error"]["param"] == param


def test_a_count_needs_no_model() -> None:
    call = RESPONSES.parse_count(RawRequest(body=b'{"input": "hi"}'))
    assert call.messages == (Message("user", (Text("hi"),)),)
    assert json.loads(RESPONSES.count_body(4)) == {"object": "response.input_tokens", "input_tokens": 4}


def test_the_key_is_a_bearer_token() -> None:
    assert RESPONSES.key_of(RawRequest(headers={"authorization": "Bearer k"})) == "k"
    assert RESPONSES.key_of(RawRequest(headers={"authorization": "Basic k"})) is None
    assert RESPONSES.speaks(RawRequest(headers={"originator": "codex_exec"}))
    assert not RESPONSES.speaks(RawRequest(headers={"authorization": "Bearer k"}))


# -- replies ---------------------------------------------------------------------------------------------------------


def test_a_reply_has_its_items_in_order_and_its_usage() -> None:
    call = _parse(tools=[SHELL, PATCH, SPACE], metadata={"a": "b"}, instructions="S", reasoning=SUMMARY)
    body = _body(
        call,
        Thinking("R"),
        Text("T"),
        ToolCall("1", "shell", '{"x":1}'),
        ToolCall("2", "apply_patch", '{"input":"+a"}'),
        ToolCall("3", "mcp__fs__ls", ""),
    )
    reasoning, message, shell, patch, ls = body["output"]
    assert base64.b64decode(reasoning["encrypted_content"]) == b"gangline:k1"
    assert reasoning["summary"] == [{"type": "summary_text", "text": "R"}]
    assert message["content"] == [{"type": "output_text", "text": "T", "annotations": [], "logprobs": []}]
    assert (shell["type"], shell["name"], shell["arguments"]) == ("function_call", "shell", '{"x":1}')
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "+a")
    assert (ls["name"], ls["namespace"], ls["arguments"]) == ("ls", "mcp__fs", "{}")
    assert len({item["id"] for item in body["output"]}) == 5
    assert (body["id"], body["status"], body["model"]) == ("resp_k1", "completed", "m")
    assert (body["metadata"], body["instructions"]) == ({"a": "b"}, "S")
    assert body["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_thinking_that_no_one_asked_a_summary_of_is_the_content_of_its_item() -> None:
    (item,) = _body(_parse(), Thinking("R"))["output"]
    assert item["summary"] == []
    assert item["content"] == [{"type": "reasoning_text", "text": "R"}]


def test_a_custom_call_without_its_shim_gets_what_the_model_wrote() -> None:
    (item,) = _body(_parse(tools=[PATCH]), ToolCall("1", "apply_patch", "*** Begin"))["output"]
    assert item["input"] == "*** Begin"


@pytest.mark.parametrize(
    ("finish_reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
        ("abort", "incomplete", {"reason": "max_output_tokens"}),
    ],
)
def test_finish_reasons(finish_reason: str, status: str, details: dict[str, str] | None) -> None:
    body = _body(_parse(), Text("T"), finish_reason=finish_reason)
    assert (body["status"], body["incomplete_details"], body["output"][0]["status"]) == (status, details, status)
    stream = _writer(_parse()).finish(_reply(Text("T"), finish_reason=finish_reason))
    assert _kinds(stream)[-1] == status


def test_a_call_that_was_cut_off_is_incomplete_and_cannot_run() -> None:
    said, call = _body(
        _parse(tools=[SHELL]), Text("T"), ToolCall("1", "shell", '{"cmd":"rm -r /t'), finish_reason="length"
    )["output"]
    assert (said["status"], call["status"]) == ("completed", "incomplete")
    assert json.loads(call["arguments"]) == {"malformed_arguments": '{"cmd":"rm -r /t'}


def test_logprobs_are_those_of_the_text() -> None:
    call = _parse(top_logprobs=1)
    tokens = tuple(
        TokenLogprob(token, -1.0, None, (TokenLogprob(token, -1.0),)) for token in ("<t>", "hm", "</t>", "é", "h")
    )
    (_, message) = _body(call, Thinking("hm"), Text("éh"), logprobs=tokens)["output"]
    entry = {"token": "é", "bytes": [195, 169], "logprob": -1.0}
    assert [shown["token"] for shown in message["content"][0]["logprobs"]] == ["é", "h"]
    assert message["content"][0]["logprobs"][0] == entry | {"top_logprobs": [entry]}


# -- streams ---------------------------------------------------------------------------------------------------------


def test_the_events_of_a_reply_with_thinking_text_and_calls() -> None:
    call = _parse(tools=[SHELL, PATCH], reasoning=SUMMARY)
    writer = _writer(call)
    stream = writer.start(7) + writer.delta(ReplyDelta(thinking="R")) + writer.delta(ReplyDelta(text="T"))
    stream += writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(0, '{"a":', "1", "shell"),)))
    calls = (ToolCall("1", "shell", '{"a":1}'), ToolCall("2", "apply_patch", '{"input":"+"}'))
    stream += writer.finish(_reply(Thinking("R"), Text("T"), *calls))
    assert _kinds(stream) == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert _events(stream)[-1]["response"] == json.loads(
        RESPONSES.reply_body(call, _reply(Thinking("R"), Text("T"), *calls))
    )


def test_a_sign_of_life_before_the_start_begins_the_stream_once() -> None:
    writer = _writer(_parse())
    stream = writer.keep_alive() + writer.start(7) + writer.keep_alive() + writer.delta(ReplyDelta(text="T"))
    assert _kinds(stream)[:4] == ["created", "in_progress", "in_progress", "output_item.added"]


def test_what_is_held_back_for_long_shows_signs_of_life() -> None:
    writer = _writer(_parse())
    writer.start(7)
    piece = ReplyDelta(tool_calls=(ToolCallDelta(0, " ", "1", "shell"),))
    stream = b"".join(writer.delta(piece) for _ in range(600))
    assert _kinds(stream) == ["in_progress", "in_progress"]


def test_other_choices_than_the_first_are_not_shown() -> None:
    assert _writer(_parse()).delta(ReplyDelta(choice_index=1, text="T")) == b""


def test_thinking_after_text_is_an_item_of_its_own() -> None:
    writer = _writer(_parse())
    stream = b"".join(
        writer.delta(delta) for delta in (ReplyDelta(text="a"), ReplyDelta(thinking="b"), ReplyDelta(text="c"))
    )
    events = _events(stream + writer.finish(_reply(Thinking("b"), Text("ac"))))
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "reasoning", "message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextOverflow("long"), "context_length_exceeded"),
        (EngineUnavailable("down"), "server_error"),
        (SessionOver("over"), "invalid_prompt"),
    ],
)
def test_a_stream_that_breaks_says_whether_to_try_again(error: GanglineError, code: str) -> None:
    events = _events(_writer(_parse()).error(error))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": code, "message": error.message}


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error", "invalid_request"),
        (Unauthorized("x"), 401, "invalid_request_error", "invalid_api_key"),
        (SessionOver("x"), 403, "permission_error", "session_over"),
        (NotFound("x"), 404, "invalid_request_error", "not_found"),
        (LimitExceeded("x"), 413, "invalid_request_error", "request_too_large"),
        (LimitExceeded("x", retry_after_s=1.5), 429, "rate_limit_error", "rate_limit_exceeded"),
        (ContextOverflow("x"), 400, "invalid_request_error", "context_length_exceeded"),
        (EngineRefused("x", status=422), 400, "invalid_request_error", "engine_refused"),
        (EngineRefused("x", status=401), 502, "server_error", "engine_refused"),
        (EngineUnavailable("x"), 503, "server_error", "engine_unavailable"),
        (EngineMalformed("x"), 502, "server_error", "engine_malformed"),
        (EngineIncapable("x"), 502, "server_error", "engine_incapable"),
        (DiskFull("x"), 507, "server_error", "disk_full"),
        (GanglineError("x"), 500, "server_error", "internal_error"),
    ],
)
def test_the_table_of_errors(error: GanglineError, status: int, kind: str, code: str) -> None:
    answer = RESPONSES.error_answer(error)
    assert answer.status == status
    assert json.loads(answer.body) == {"error": {"message": "x", "type": kind, "param": None, "code": code}}


def test_a_retry_is_discouraged_where_it_is_useless_and_timed_where_it_is_not() -> None:
    for useless in (SessionOver("x"), ContextOverflow("x"), EngineIncapable("x")):
        assert RESPONSES.error_answer(useless).headers == {"x-should-retry": "false"}
    assert RESPONSES.error_answer(EngineUnavailable("x")).headers == {}
    assert RESPONSES.error_answer(LimitExceeded("x", retry_after_s=1.5)).headers == {"Retry-After": "2"}


def test_model_cards_tell_the_context() -> None:
    card = {"id": "m", "object": "model", "created": 0, "owned_by": "gangline"}
    assert json.loads(RESPONSES.model_list(["m"])) == {"object": "list", "data": [card]}
    assert json.loads(RESPONSES.model_card("m", 4096)) == card | {"max_model_len": 4096}
