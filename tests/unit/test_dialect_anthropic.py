"""Anthropic Messages to the letter: what is read, what is dropped and refused, what an error looks like."""

from __future__ import annotations

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
    Usage,
)
from gangline.domain.errors import (
    Conflict,
    ContextOverflow,
    EngineIncapable,
    EngineMalformed,
    EngineRefused,
    EngineUnavailable,
    GanglineError,
    InvalidRequest,
    LimitExceeded,
    NodeError,
    NotFound,
    RequestTimeout,
    SessionOver,
    Unauthorized,
)
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, ToolCallDelta
from gangline.wire.dialects.anthropic.dialect import AnthropicDialect
from gangline.wire.dialects.contract import RawRequest

DIALECT = AnthropicDialect()
USER = {"role": "user", "content": "hi"}
BASH = {"name": "bash", "input_schema": {"type": "object"}}


def parse(**fields: Any) -> ModelCall:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    return DIALECT.parse_call(RawRequest(body=json.dumps(body).encode()))


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.details["param"] is not None
    return caught.value


# -- requests --------------------------------------------------------------------------------------------------------


def test_system_text_comes_first_and_inline_system_messages_keep_their_place() -> None:
    call = parse(system="top", messages=[USER, {"role": "system", "content": "inline"}, USER])
    assert [message.role for message in call.messages] == ["system", "user", "system", "user"]
    assert call.messages[0].parts == (Text("top"),)


def test_an_empty_system_text_is_no_message() -> None:
    assert [message.role for message in parse(system="").messages] == ["user"]


def test_the_billing_line_of_claude_code_is_left_out_and_named() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=4f;"}
    call = parse(system=[billing, {"type": "text", "text": "You are an agent."}])
    assert call.messages[0].parts == (Text("You are an agent."),)
    assert call.dropped == ("system[0]: x-anthropic-billing-header",)
    glued = parse(system="x-anthropic-billing-header: 1;\nYou are an agent.")
    assert glued.messages[0].parts == (Text("You are an agent."),)


def test_the_agent_that_claude_code_names_in_a_header_is_kept() -> None:
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"x-claude-code-agent-id": "a1"}
    assert DIALECT.parse_call(RawRequest(body=body, headers=headers)).agent_id == "a1"
    assert DIALECT.parse_call(RawRequest(body=body)).agent_id is None


def test_tool_results_become_messages_of_their_own_in_order() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": "one"},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    assert parse(messages=[{"role": "user", "content": content}]).messages == (
        Message("tool", (ToolResult("a", (Text("one"),)),)),
        Message("tool", (ToolResult("b", (), is_error=True),)),
        Message("user", (Text("go on"),)),
    )


def test_assistant_messages_in_a_row_are_one_turn() -> None:
    said = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]}]
    said += [{"role": "assistant", "content": "text"}]
    said += [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "n", "input": {"a": 1}}]}]
    turn = Message("assistant", (Thinking("t", "s"), Text("text"), ToolCall("1", "n", '{"a": 1}')))
    assert parse(messages=[USER, *said]).messages[1:] == (turn,)


def test_the_echo_of_an_empty_reply_is_an_empty_turn() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    assert parse(messages=[USER, said, USER]).messages[1] == Message("assistant", ())


def test_a_redacted_thought_keeps_its_data_as_the_signature() -> None:
    said = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "opaque"}]}
    assert parse(messages=[USER, said]).messages[1].parts == (Thinking("", "opaque"),)


def test_what_a_model_can_read_as_text_becomes_text() -> None:
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]}
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "T"}
    inner = {"type": "document", "source": {"type": "content", "content": "c"}, "context": "why"}
    call = parse(messages=[{"role": "user", "content": [found, plain, inner]}])
    assert call.messages[0].parts == (Text("t\ns\nx"), Text("T\nd"), Text("why"), Text("c"))


LATE = {"name": "late", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True}
LATE_SHOWN = (
    '<functions>\n<function>{"description":"d","name":"late","parameters":{"type":"object"}}</function>\n</functions>'
)


def test_a_deferred_tool_is_shown_where_the_conversation_refers_to_it_and_the_offer_stays() -> None:
    found = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "late"}]}
    before = parse(tools=[BASH])
    after = parse(tools=[BASH, LATE], messages=[USER, {"role": "user", "content": [found]}])
    assert (after.tools, after.dropped) == (before.tools, ())
    assert after.messages[1].parts == (ToolResult("a", (Text(LATE_SHOWN),)),)


def test_deferred_tools_are_offered_at_once_where_only_the_provider_could_search_them() -> None:
    call = parse(tools=[BASH, LATE, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}])
    assert [tool.name for tool in call.tools] == ["bash", "late"]
    assert call.dropped == ("tools[1].defer_loading", "tools[2]: tool_search_tool_regex")


def test_tools_that_come_and_go_on_the_way_are_told_in_their_place() -> None:
    def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    definition = {name: value for name, value in LATE.items() if name != "defer_loading"}
    said = [
        change("tool_addition", {"type": "tool_reference", "name": "late"}),
        change("tool_addition", {"type": "tool_definition", "definition": definition}),
        change("tool_removal", {"type": "tool_reference", "name": "late"}),
        change("tool_addition", {"type": "mcp_toolset_reference", "server_name": "s"}),
        {"role": "system", "output_config": {"effort": "low"}},
        {"role": "system", "content": "Now.", "clear_at": "next_user_message"},
    ]
    call = parse(tools=[BASH, LATE], messages=[USER, *said])
    texts = (LATE_SHOWN, LATE_SHOWN, "The tool late is no longer available.")
    assert [message.parts for message in call.messages[1:]] == [(Text(text),) for text in (*texts, "Now.")]
    assert call.dropped == ("messages.4.content[0]: mcp_toolset", "messages[5].output_config", "messages[6].clear_at")


def test_images_and_documents_in_tool_results() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    paper = {"type": "document", "title": "p", "source": {"type": "url", "url": "https://example.invalid/p.pdf"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image, paper]}
    expected = (Image("data:image/png;base64,aGk="), Document("https://example.invalid/p.pdf", "p"))
    assert parse(messages=[{"role": "user", "content": [result]}]).messages[0].parts == (ToolResult("a", expected),)


def test_hosted_tools_and_unknown_fields_are_dropped_by_name() -> None:
    tools = [BASH, {"type": "web_search_20260318", "name": "web_search"}, {"type": "mcp_toolset"}]
    tools.append({"name": "b", "input_schema": {}, "input_examples": [{}], "cache_control": {"type": "ephemeral"}})
    call = parse(
        tools=tools,
        metadata={"user_id": "u"},
        context_management={},
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high"},
    )
    assert [tool.name for tool in call.tools] == ["bash", "b"]
    assert call.dropped == (
        *("metadata", "thinking.budget_tokens"),
        *("tools[1]: web_search", "tools[2]: mcp_toolset", "tools[3].input_examples"),
    )


def test_tool_choice_and_parallel_calls() -> None:
    for choice, mode in (("auto", "auto"), ("any", "required"), ("none", "none")):
        call = parse(tools=[BASH], tool_choice={"type": choice, "disable_parallel_tool_use": True})
        assert call.tool_choice is not None
        assert (call.tool_choice.mode, call.parallel_tool_calls) == (mode, False)
    named = parse(tools=[BASH], tool_choice={"type": "tool", "name": "bash"})
    assert named.tool_choice is not None
    assert (named.tool_choice.name, named.parallel_tool_calls) == ("bash", None)
    assert parse(tool_choice={"type": "auto"}).tool_choice is None
    assert named.tools == (ToolDefinition("bash", parameters={"type": "object"}),)


def test_structured_output_is_asked_for_in_the_words_of_engines() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wish = {"type": "json_schema", "schema": schema}
    expected = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
    assert parse(output_config={"format": wish}).response_format == expected
    assert parse(output_format=wish).response_format == expected


def assistant(block: dict[str, Any]) -> list[Any]:
    return [USER, {"role": "assistant", "content": [block]}]


def user(block: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [block]}]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least one message is required"),
        ({"max_tokens": None}, "max_tokens", "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"model": ""}, "model", "length >= 1"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages.0.role", "Invalid enum value 'x'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: Field required"),
        ({"messages": user({"type": "text"})}, "messages.0.content.0.text", "Field required"),
        ({"messages": user({"type": "container_upload"})}, "messages.0.content.0.type", "'container_upload'"),
        ({"messages": assistant({"type": "server_tool_use"})}, "messages.1.content.0.type", "'server_tool_use'"),
        (
            {"messages": assistant({"type": "tool_result", "tool_use_id": "a"})},
            "messages.1.content.0.type",
            "'tool_result' cannot stand here",
        ),
        (
            {"messages": assistant({"type": "tool_use", "id": "a", "name": "n", "input": [1]})},
            "messages.1.content.0.input",
            "Input should be an object",
        ),
        (
            {"messages": user({"type": "tool_use", "id": "a", "name": "n", "input": {}})},
            "messages.0.content.0.type",
            "'tool_use' cannot stand here",
        ),
        (
            {"messages": user({"type": "image", "source": {"type": "file", "file_id": "f"}})},
            "messages.0.content.0.source.file_id",
            "files are not kept here",
        ),
        (
            {"messages": user({"type": "image", "source": {"type": "base64", "media_type": "image/x", "data": ""}})},
            "messages.0.content.0.source.media_type",
            "image/png",
        ),
        (
            {"messages": user({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}})},
            "messages.0.content.0.source.url",
            "HTTP(S)",
        ),
        ({"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "t"}]}]}, None, "holds text"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema", "Field required"),
        ({"tools": [BASH, BASH]}, "tools", "unique"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"maximum": 2**70}}]}, "tools.0.input_schema.maximum", "64 bits"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "tool_choice",
            "needs a tool",
        ),
        ({"tools": [BASH], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "'x' is not offered"),
        ({"thinking": {"type": "x"}}, "thinking.type", "Invalid enum value"),
        ({"stop_sequences": [1]}, "stop_sequences.0", "Expected `str`"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], param: str | None, says: str
) -> None:
    error = refused(**fields)
    assert says in error.message
    assert param is None or error.details["param"] == param


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Bash"}])
@pytest.mark.parametrize("tools", [{"tools": []}, {"tools": None}, {}])
def test_a_choice_among_no_tools_is_left_out_and_named(choice: dict[str, Any], tools: dict[str, Any]) -> None:
    call = parse(**tools, tool_choice=choice | {"disable_parallel_tool_use": True})
    assert (call.tools, call.tool_choice, call.parallel_tool_calls) == ((), None, None)
    assert call.dropped == ("tool_choice",)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_choice_that_may_choose_none_loses_nothing_among_no_tools(choice: str) -> None:
    call = parse(tools=[], tool_choice={"type": choice})
    assert (call.tool_choice, call.dropped) == (None, ())


def test_a_count_needs_no_max_tokens() -> None:
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    assert DIALECT.parse_count(RawRequest(body=body)).messages == (Message("user", (Text("hi"),)),)
    assert json.loads(DIALECT.count_body(7)) == {"input_tokens": 7}


def test_the_key_and_the_dialect_are_told_by_headers() -> None:
    def key(**headers: str) -> str | None:
        return DIALECT.key_of(RawRequest(headers={name.replace("_", "-"): value for name, value in headers.items()}))

    assert key(x_api_key="k") == key(authorization="Bearer k") == key(authorization="bearer  k ") == "k"
    assert key() is key(authorization="Basic k") is key(x_api_key=" ") is None
    assert DIALECT.speaks(RawRequest(headers={"anthropic-version": "2023-06-01"}))
    assert not DIALECT.speaks(RawRequest(headers={"authorization": "Bearer k"}))


# -- replies ---------------------------------------------------------------------------------------------------------

CALL = ModelCall(dialect="anthropic", model="m", messages=(), sampling=SamplingParams(stop=("END",)))


def reply(*parts: Any, finish: str = "stop", stop_reason: str | None = None) -> Reply:
    choice = ReplyChoice(index=0, message=Message("assistant", parts), finish_reason=finish, stop_reason=stop_reason)
    usage = Usage(num_prompt_tokens=10, num_sampled_tokens=4, num_cached_tokens=8, num_thinking_tokens=2)
    return Reply(reply_id="r1", model="m", created_at=1, choices=(choice,), usage=usage)


def body(*parts: Any, **options: Any) -> dict[str, Any]:
    return json.loads(DIALECT.reply_body(CALL, reply(*parts, **options)))


@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", "151645", ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("abort", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
        ("tool_calls", None, ("tool_use", None)),
    ],
)
def test_stop_reasons(finish: str, stop_reason: str | None, expected: tuple[str, str | None]) -> None:
    said = body(Text("x"), finish=finish, stop_reason=stop_reason)
    assert (said["stop_reason"], said["stop_sequence"]) == expected


def test_a_reply_of_calls_stops_for_tool_use_unless_it_was_cut() -> None:
    call = ToolCall("c", "bash", "{}")
    assert body(call, finish="stop")["stop_reason"] == "tool_use"
    assert body(call, finish="length")["stop_reason"] == "max_tokens"


def test_cached_tokens_are_counted_apart_and_thinking_tokens_named() -> None:
    usage = body(Text("x"))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (2, 8, 0)
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (4, {"thinking_tokens": 2})


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"a": NaN}', "not json", '{"a": "\\ud800"}', "[" * 99_999])
def test_arguments_that_are_no_object_go_out_as_an_empty_one(arguments: str) -> None:
    assert body(ToolCall("c", "bash", arguments))["content"][0]["input"] == {}


def test_an_empty_reply_is_one_empty_text() -> None:
    assert body()["content"] == [{"type": "text", "text": "", "citations": []}]


def events(*deltas: ReplyDelta, whole: Reply) -> list[dict[str, Any]]:
    writer = DIALECT.event_writer(CALL, reply_id="r1", model="m", created_at=1)
    stream = writer.start(10) + b"".join(map(writer.delta, deltas)) + writer.finish(whole)
    return [json.loads(block.split("\ndata: ")[1]) for block in stream.decode().strip().split("\n\n")]


def test_the_first_event_says_how_long_the_prompt_is() -> None:
    assert events(whole=reply())[0]["message"]["usage"]["input_tokens"] == 10


def test_a_call_that_is_whole_goes_out_when_the_next_begins() -> None:
    writer = DIALECT.event_writer(CALL, reply_id="r1", model="m", created_at=1)
    writer.start(1)
    first = writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(0, '{"a"', "c0", "one"),)))
    assert b"content_block_start" in first
    assert writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(0, ": 1}"),))) == b""
    second = writer.delta(ReplyDelta(tool_calls=(ToolCallDelta(1, "", "c1", "two"),)))
    assert [line for line in second.split(b"\n") if line.startswith(b"event")] == [
        *(b"event: content_block_delta", b"event: content_block_stop", b"event: content_block_start")
    ]


def test_a_long_input_that_is_held_back_gives_signs_of_life() -> None:
    writer = DIALECT.event_writer(CALL, reply_id="r1", model="m", created_at=1)
    writer.start(1)
    pieces = [ToolCallDelta(0, "", "c0", "one"), *(ToolCallDelta(0, "x") for _ in range(200))]
    sent = [writer.delta(ReplyDelta(tool_calls=(piece,))) for piece in pieces]
    assert sent.count(writer.keep_alive()) == 3


def test_text_after_a_call_waits_for_the_calls() -> None:
    call = ToolCallDelta(0, "{}", "c0", "one")
    said = events(
        ReplyDelta(tool_calls=(call,)), ReplyDelta(text="late"), whole=reply(Text("late"), ToolCall("c0", "one", "{}"))
    )
    starts = [event["content_block"]["type"] for event in said if event["type"] == "content_block_start"]
    assert starts == ["tool_use", "text"]


# -- errors and models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error", {"x-should-retry": "false"}),
        (Unauthorized("x"), 401, "authentication_error", {"x-should-retry": "false"}),
        (SessionOver("x"), 403, "permission_error", {"x-should-retry": "false"}),
        (NotFound("x"), 404, "not_found_error", {"x-should-retry": "false"}),
        (RequestTimeout("x"), 408, "timeout_error", {}),
        (Conflict("x"), 409, "invalid_request_error", {"x-should-retry": "false"}),
        (LimitExceeded("x"), 413, "request_too_large", {"x-should-retry": "false"}),
        (LimitExceeded("x", status=429), 429, "rate_limit_error", {"retry-after": "1"}),
        (LimitExceeded("x", status=429, retry_after_s=7), 429, "rate_limit_error", {"retry-after": "7"}),
        (ContextOverflow("x"), 400, "invalid_request_error", {"x-should-retry": "false"}),
        (EngineRefused("x", status=400), 400, "invalid_request_error", {"x-should-retry": "false"}),
        (EngineRefused("x", status=401), 502, "api_error", {"x-should-retry": "false"}),
        (EngineIncapable("x"), 502, "api_error", {"x-should-retry": "false"}),
        (EngineUnavailable("x"), 529, "overloaded_error", {}),
        (EngineMalformed("x"), 502, "api_error", {}),
        (NodeError("x"), 500, "api_error", {}),
    ],
)
def test_errors_have_the_providers_status_type_and_advice(
    error: GanglineError, status: int, kind: str, headers: dict[str, str]
) -> None:
    answer = DIALECT.error_answer(error)
    said = json.loads(answer.body)
    assert (answer.status, said["type"], said["error"]["type"]) == (status, "error", kind)
    assert dict(answer.headers) == headers
    assert "x" in said["error"]["message"]


@pytest.mark.parametrize(
    ("engine_says", "expected"),
    [
        (
            "the prompt has 5000 tokens and the context 4096: no room for a reply",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens.",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is 4096 "
            "tokens and your request has 120 input tokens (32000 > 4096 - 120).",
            "input length and `max_tokens` exceed context limit: 120 + 32000 > 4096, "
            "decrease input length or `max_tokens` and try again",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 4000 output tokens and your "
            "prompt contains 120 input tokens, for a total of 4120 tokens.",
            "input length and `max_tokens` exceed context limit: 120 + 4000 > 4096, "
            "decrease input length or `max_tokens` and try again",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 0 output tokens and your "
            "prompt contains at least 4097 input tokens, for a total of at least 4097 tokens.",
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),
        ("too long", "prompt is too long: too long"),
    ],
)
def test_context_overflow_is_said_in_the_words_that_clients_look_for(engine_says: str, expected: str) -> None:
    answer = DIALECT.error_answer(ContextOverflow(engine_says))
    assert json.loads(answer.body)["error"]["message"] == expected


def test_the_model_list_is_a_page() -> None:
    page = json.loads(DIALECT.model_list(["a", "b"], 4096))
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)
    assert page["data"][0] == json.loads(DIALECT.model_card("a", 4096))
    assert page["data"][0]["max_input_tokens"] == 4096
