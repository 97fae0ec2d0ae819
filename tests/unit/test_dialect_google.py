"""Google generateContent: what each field becomes, what is refused by name, and the shape of answers and errors."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gangline.domain.conversation import (
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
    EngineIncapable,
    EngineMalformed,
    EngineRefused,
    EngineUnavailable,
    GanglineError,
    InvalidRequest,
    LimitExceeded,
    NodeError,
    NotFound,
    SessionOver,
    Unauthorized,
)
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.google.dialect import GoogleDialect

GOOGLE = GoogleDialect()
USER = {"role": "user", "parts": [{"text": "Hi."}]}
LS = {"functionDeclarations": [{"name": "ls"}]}
PNG = {"inlineData": {"mimeType": "image/png", "data": "-_8="}}


def _request(body: dict[str, Any], **query: str) -> RawRequest:
    body = {"contents": [USER]} | body
    params = {"model": "org/name", "method": "streamGenerateContent" if query else "generateContent"}
    return RawRequest(body=json.dumps(body).encode(), params=params, query=query)


def _call(body: dict[str, Any], **query: str) -> ModelCall:
    return GOOGLE.parse_call(_request(body, **query))


def _config(**config: Any) -> ModelCall:
    return _call({"generationConfig": config})


def _messages(*contents: dict[str, Any]) -> tuple[Message, ...]:
    return _call({"contents": list(contents)}).messages


def _model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def _results(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": [{"functionResponse": part} if "name" in part else part for part in parts]}


# -- requests ----------------------------------------------------------------------------------------------------


def test_names_may_be_snake_case_and_one_object_stands_for_a_list_of_one() -> None:
    snake = _call(
        {
            "system_instruction": {"parts": {"text": "Be brief."}},
            "contents": {"parts": {"inline_data": {"mime_type": "image/png", "data": "AAAA"}}},
            "tools": {"function_declarations": {"name": "ls", "parameters_json_schema": {"type": "object"}}},
            "generation_config": {"max_output_tokens": "7", "stop_sequences": ["END"]},
        }
    )
    assert snake.messages == (
        Message("system", (Text("Be brief."),)),
        Message("user", (Image("data:image/png;base64,AAAA"),)),
    )
    assert snake.tools[0].parameters == {"type": "object"}
    assert (snake.sampling.max_tokens, snake.sampling.stop) == (7, ("END",))
    assert snake.dropped == ()


def test_half_a_character_in_a_body_is_replaced_not_refused() -> None:
    body = b'{"contents":[{"parts":[{"text":"a\\ud83d b\\ud83d\\ude00"}]}]}'
    assert GOOGLE.parse_call(RawRequest(body=body)).messages[0].parts == (Text("a\ufffd b\U0001f600"),)
    with pytest.raises(InvalidRequest):
        GOOGLE.parse_call(RawRequest(body=body + b"}"))


def test_a_model_s_name_may_hold_slashes_and_the_path_says_whether_to_stream() -> None:
    assert _call({}).model == "org/name"
    assert not _call({}).stream
    assert _call({}, alt="sse").stream
    assert not _call({}, alt="sse").echo["array"]
    assert _call({}, key="k").echo["array"]


def test_sampling_fields_are_carried() -> None:
    call = _config(
        temperature=0, topP=0.5, topK=40.0, maxOutputTokens=9, seed=-3, presencePenalty=1, frequencyPenalty="0.5"
    )
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 0.5, 40, 9)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (-3, 1.0, 0.5)
    assert _config(candidateCount=3).num_choices == 3
    assert _config(responseLogprobs=True).num_top_logprobs == 0
    assert _config(responseLogprobs=True, logprobs=5).num_top_logprobs == 5
    assert _config(logprobs=5).num_top_logprobs is None


def test_thoughts_are_shown_to_a_client_that_asks_for_them() -> None:
    assert _config(thinkingConfig={"includeThoughts": True}).echo["thoughts"]


def test_structured_output_is_the_canonical_json_schema() -> None:
    schema = {"type": "OBJECT", "properties": {"type": {"type": "STRING", "enum": ["a"], "nullable": True}}}
    call = _config(responseMimeType="application/json", responseSchema=schema)
    written = {"type": "object", "properties": {"type": {"type": ["string", "null"], "enum": ["a", None]}}}
    assert call.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "response", "schema": written, "strict": True},
    }
    assert _config(responseMimeType="application/json").response_format == {"type": "json_object"}
    assert _config(responseMimeType="text/plain").response_format is None


def test_google_s_schema_becomes_json_schema() -> None:
    parameters = {
        "type": "OBJECT",
        "propertyOrdering": ["a"],
        "required": ["a"],
        "properties": {"a": {"type": "ARRAY", "minItems": "1", "items": {"any_of": [{"type": "INTEGER"}]}}},
    }
    call = _call({"tools": [{"functionDeclarations": [{"name": "f", "description": "F.", "parameters": parameters}]}]})
    items = {"anyOf": [{"type": "integer"}]}
    assert call.tools[0].parameters == {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "array", "minItems": 1, "items": items}},
    }


@pytest.mark.parametrize(
    ("calling", "choice"),
    [
        ({"mode": "AUTO"}, ToolChoice("auto")),
        ({"mode": "VALIDATED"}, ToolChoice("auto")),
        ({"mode": "NONE"}, ToolChoice("none")),
        ({"mode": "ANY"}, ToolChoice("required")),
        ({"mode": "any", "allowedFunctionNames": ["a"]}, ToolChoice("named", "a")),
        ({"mode": "ANY", "allowed_function_names": ["b", "a"]}, ToolChoice("required")),
    ],
)
def test_tool_choice(calling: dict[str, Any], choice: ToolChoice) -> None:
    tools = [{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}]
    call = _call({"tools": tools, "toolConfig": {"functionCallingConfig": calling}})
    assert call.tool_choice == choice


def test_hosted_tools_and_fields_without_meaning_are_dropped_by_name() -> None:
    call = _call(
        {
            "tools": [LS, {"googleSearch": {}}, {"codeExecution": {}}],
            "safetySettings": [{"category": "X"}],
            "generationConfig": {"thinkingConfig": {"thinkingBudget": 512}, "mediaResolution": "LOW"},
            "fancy": 1,
        }
    )
    assert [tool.name for tool in call.tools] == ["ls"]
    assert call.dropped == (
        "fancy",
        "generationConfig.mediaResolution",
        "generationConfig.thinkingConfig.thinkingBudget",
        "safetySettings",
        "tools[1]: googleSearch",
        "tools[2]: codeExecution",
    )


def test_calls_and_responses_without_ids_find_each_other_by_name_and_order() -> None:
    ls, cat = {"functionCall": {"name": "ls"}}, {"functionCall": {"name": "cat", "args": {"f": 1}}}
    answers = [{"name": "cat", "response": {"output": "1"}}, {"name": "ls", "response": {"result": "2"}}]
    answers += [{"name": "ls", "response": {"output": "3"}}]
    _, assistant, *results = _messages(USER, _model(ls, cat, ls), _results(*answers))
    called = [part.call_id for part in assistant.parts if isinstance(part, ToolCall)]
    assert len(set(called)) == 3
    parts = [message.parts[0] for message in results]
    assert parts == [
        ToolResult(called[1], (Text("1"),)),
        ToolResult(called[0], (Text("2"),)),
        ToolResult(called[2], (Text("3"),)),
    ]


def test_gemini_cli_s_prefix_is_taken_off_ids() -> None:
    call = {"functionCall": {"id": "ls__call_1", "name": "ls"}}
    result = {"id": "ls__call_1", "name": "ls", "response": {"output": "a"}}
    _, assistant, answer = _messages(USER, _model(call), _results(result))
    assert assistant.parts == (ToolCall("call_1", "ls", "{}"),)
    assert answer.parts == (ToolResult("call_1", (Text("a"),)),)


def test_results_carry_errors_structure_and_media_and_what_stands_beside_them() -> None:
    failed = {"id": "1", "name": "ls", "response": {"error": "gone"}}
    table = {"id": "2", "name": "ls", "response": {"rows": [1, 2]}, "parts": [PNG]}
    messages = _messages(_results(failed, {"text": "see"}, table, {"text": "this"}))
    assert messages == (
        Message("tool", (ToolResult("1", (Text("gone"),), is_error=True),)),
        Message("user", (Text("see"),)),
        Message("tool", (ToolResult("2", (Text('{"rows":[1,2]}'), Image("data:image/png;base64,+/8="))),)),
        Message("user", (Text("this"),)),
    )


def test_a_signature_on_a_call_belongs_to_the_thought_before_it() -> None:
    call = {"functionCall": {"id": "1", "name": "ls"}, "thoughtSignature": "-_8="}
    after_a_thought = _messages(USER, _model({"text": "Hm.", "thought": True}, {"text": "So."}, call))[-1]
    assert after_a_thought.parts == (Thinking("Hm.", "+/8="), Text("So."), ToolCall("1", "ls", "{}"))
    without_one = _messages(USER, _model({"text": "So."}, call))[-1]
    assert without_one.parts == (Text("So."), Thinking("", "+/8="), ToolCall("1", "ls", "{}"))


def test_thoughts_and_signatures_that_a_client_made_up_are_no_model_s() -> None:
    made_up = "skip_thought_signature_validator"
    call = _call(
        {
            "contents": [
                USER,
                _model({"text": "Binary content received.", "thought": True, "thoughtSignature": made_up}),
                USER,
                _model({"functionCall": {"id": "1", "name": "ls"}, "thoughtSignature": made_up}),
            ]
        }
    )
    assert [message.role for message in call.messages] == ["user", "user", "assistant"]
    assert call.messages[-1].parts == (ToolCall("1", "ls", "{}"),)
    assert call.dropped == ("contents[1].parts[0]: a thought that the client made up",)


def test_an_echo_of_an_empty_reply_is_still_a_turn() -> None:
    for echo in (_model({"text": ""}), {"role": "model", "parts": []}, {"role": "model"}):
        assert _messages(USER, echo, USER)[1] == Message("assistant", ())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [{"role": "user", "parts": []}]}, "contents[0].parts"),
        ({"contents": [USER, {"role": "bot", "parts": []}]}, "contents[1].role"),
        ({"contents": [{"parts": [{"text": 1}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0].data"),
        ({"contents": [{"parts": [{"text": "a"} | PNG]}]}, "contents[0].parts[0].data"),
        ({"contents": [_model({"executableCode": {"code": "1"}})]}, "contents[0].parts[0].executableCode"),
        ({"contents": [{"parts": [{"functionCall": {"name": "a"}}]}]}, "contents[0].parts"),
        ({"contents": [_results({"name": "ls", "response": {}})]}, "contents[0].parts[0].functionResponse"),
        ({"contents": [_model({"functionCall": {"name": ""}})]}, "contents[0].parts[0].functionCall.name"),
        (
            {"contents": [{"parts": [{"inlineData": {"mimeType": "audio/mp3", "data": "AAAA"}}]}]},
            "contents[0].parts[0].inlineData.mimeType",
        ),
        (
            {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "?"}}]}]},
            "contents[0].parts[0].inlineData.data",
        ),
        (
            {"contents": [{"parts": [{"fileData": {"mimeType": "image/png", "fileUri": "gs://a"}}]}]},
            "contents[0].parts[0].fileData.fileUri",
        ),
        ({"systemInstruction": {"parts": [PNG]}}, "systemInstruction"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"tools": [LS, LS]}, "tools[1].functionDeclarations[0].name"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [LS], "toolConfig": {"functionCallingConfig": {"mode": "X"}}},
            "toolConfig.functionCallingConfig.mode",
        ),
        (
            {"tools": [LS], "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        ({"generationConfig": {"maxOutputTokens": 1.5}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"maxOutputTokens": -1}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"seed": 1 << 40}}, "generationConfig.seed"),
        ({"generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences[0]"),
        ({"generationConfig": {"candidateCount": 9}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": {"type": "OBJECT"}}}, "generationConfig.responseMimeType"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _call(body)
    assert refused.value.details["param"] == param
    inner = json.loads(GOOGLE.error_answer(refused.value).body)["error"]
    assert (inner["code"], inner["status"]) == (400, "INVALID_ARGUMENT")
    assert inner["details"][-1]["fieldViolations"][0]["field"] == param


def test_a_count_reads_a_whole_request_or_its_contents_alone() -> None:
    inner = {"model": "models/m", "contents": [USER], "systemInstruction": {"parts": [{"text": "S."}]}, "tools": [LS]}
    counted = GOOGLE.parse_count(RawRequest(body=json.dumps({"generateContentRequest": inner}).encode()))
    assert [message.role for message in counted.messages] == ["system", "user"]
    assert [tool.name for tool in counted.tools] == ["ls"]
    assert GOOGLE.parse_count(_request({})).messages == (Message("user", (Text("Hi."),)),)
    assert json.loads(GOOGLE.count_body(7))["totalTokens"] == 7


@pytest.mark.parametrize(
    ("headers", "query", "key"),
    [
        ({"x-goog-api-key": "a"}, {"key": "b"}, "a"),
        ({}, {"key": "b"}, "b"),
        ({"authorization": "Bearer c"}, {}, "c"),
        ({"authorization": "Basic c"}, {}, None),
        ({}, {}, None),
    ],
)
def test_the_key_is_found_wherever_google_s_clients_put_it(
    headers: dict[str, str], query: dict[str, str], key: str | None
) -> None:
    assert GOOGLE.key_of(RawRequest(headers=headers, query=query)) == key


# -- replies -----------------------------------------------------------------------------------------------------

STREAM = ModelCall(dialect="google", model="m", messages=(), stream=True, echo={"thoughts": True, "array": False})
USAGE = Usage(num_prompt_tokens=10, num_sampled_tokens=7, num_cached_tokens=4, num_thinking_tokens=3)


def _reply(*parts: Any, finish_reason: str = "stop", logprobs: tuple[TokenLogprob, ...] | None = None) -> Reply:
    message = Message("assistant", parts)
    choice = ReplyChoice(index=0, message=message, finish_reason=finish_reason, logprobs=logprobs)
    return Reply(reply_id="abc", model="m", created_at=1, choices=(choice,), usage=USAGE)


def _streamed(reply: Reply, *deltas: ReplyDelta, call: ModelCall = STREAM) -> list[dict[str, Any]]:
    writer = GOOGLE.event_writer(call, reply_id="abc", model="m", created_at=1)
    stream = writer.start(10) + b"".join(writer.delta(delta) for delta in deltas) + writer.finish(reply)
    return [json.loads(line[6:]) for line in stream.split(b"\n\n") if line]


def _parts(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    return chunk["candidates"][0]["content"]["parts"]


def test_a_whole_reply_has_parts_reason_usage_and_a_signature_on_its_first_call() -> None:
    reply = _reply(
        Thinking("Hm."),
        Text("So."),
        ToolCall("c1", "ls", '{"a": 1.0}'),
        ToolCall("c2", "ls", ""),
        finish_reason="tool_calls",
    )
    body = json.loads(GOOGLE.reply_body(STREAM, reply))
    assert _parts(body) == [
        {"text": "Hm.", "thought": True},
        {"text": "So."},
        {
            "functionCall": {"id": "c1", "name": "ls", "args": {"a": 1.0}},
            "thoughtSignature": "Z2FuZ2xpbmU6YWJj",
        },
        {"functionCall": {"id": "c2", "name": "ls", "args": {}}},
    ]
    assert body["candidates"][0]["finishReason"] == "STOP"
    assert body["usageMetadata"] == {
        "promptTokenCount": 10,
        "candidatesTokenCount": 4,
        "totalTokenCount": 17,
        "thoughtsTokenCount": 3,
        "cachedContentTokenCount": 4,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 10}],
    }
    assert (body["responseId"], body["modelVersion"]) == ("abc", "m")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("stop", "STOP"),
        ("length", "MAX_TOKENS"),
        ("abort", "MAX_TOKENS"),
        ("content_filter", "SAFETY"),
        ("eos", "STOP"),
    ],
)
def test_finish_reasons(reason: str, shown: str) -> None:
    body = json.loads(GOOGLE.reply_body(STREAM, _reply(Text("a"), finish_reason=reason)))
    assert body["candidates"][0]["finishReason"] == shown


def test_an_empty_reply_is_one_empty_text() -> None:
    assert _parts(json.loads(GOOGLE.reply_body(STREAM, _reply()))) == [{"text": ""}]
    assert [_parts(chunk) for chunk in _streamed(_reply())] == [[{"text": ""}]]


def test_the_newest_text_is_held_back_for_the_last_chunk() -> None:
    chunks = _streamed(
        _reply(Thinking("Hm."), Text("One two")),
        ReplyDelta(thinking="Hm."),
        ReplyDelta(text="One"),
        ReplyDelta(text=" two"),
    )
    signed = {"text": " two", "thoughtSignature": "Z2FuZ2xpbmU6YWJj"}
    assert [_parts(chunk) for chunk in chunks] == [[{"text": "Hm.", "thought": True}], [{"text": "One"}], [signed]]
    assert ["usageMetadata" in chunk for chunk in chunks] == [False, False, True]
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"


def test_calls_go_out_whole_with_the_last_chunk() -> None:
    pieces = [ToolCallDelta(0, "", "c1", "ls"), ToolCallDelta(1, '{"b"', "c2", "ls"), ToolCallDelta(0, '{"a":1}')]
    chunks = _streamed(
        _reply(Text("So."), ToolCall("c1", "ls", '{"a":1}'), ToolCall("c2", "ls", '{"b":2}')),
        ReplyDelta(text="So."),
        *(ReplyDelta(tool_calls=(piece,)) for piece in [*pieces, ToolCallDelta(1, ":2}")]),
    )
    assert len(chunks) == 1
    assert [part["functionCall"]["args"] for part in _parts(chunks[0])[1:]] == [{"a": 1}, {"b": 2}]


def test_a_reply_without_deltas_is_said_at_the_end() -> None:
    chunks = _streamed(_reply(Thinking("Hm."), Text("One two")), ReplyDelta(thinking="H"))
    said = [part for chunk in chunks for part in _parts(chunk)]
    assert "".join(part["text"] for part in said if part.get("thought")) == "Hm."
    assert said[-1]["text"] == "One two"


def test_thoughts_are_kept_from_a_client_that_did_not_ask() -> None:
    call = msgspec.structs.replace(STREAM, echo={})
    reply = _reply(Thinking("Hm."), Text("So."))
    chunks = _streamed(reply, ReplyDelta(thinking="Hm."), ReplyDelta(text="So."), call=call)
    for body in (json.loads(GOOGLE.reply_body(call, reply)), *chunks):
        assert [part["text"] for part in _parts(body)] == ["So."]


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", '"a"', "ls -l", '{"a":1e999}'])
def test_arguments_that_are_no_object_travel_under_one_name_and_come_back(arguments: str) -> None:
    body = json.loads(GOOGLE.reply_body(STREAM, _reply(ToolCall("c1", "ls", arguments))))
    assert _parts(body)[0]["functionCall"]["args"] == {"_malformed_arguments": arguments}
    echoed = _messages(USER, body["candidates"][0]["content"])[-1]
    assert [part for part in echoed.parts if isinstance(part, ToolCall)] == [ToolCall("c1", "ls", arguments)]


def test_no_character_in_a_stream_ends_a_line_but_a_line_s_end() -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne"
    writer = GOOGLE.event_writer(STREAM, reply_id="abc", model="m", created_at=1)
    arguments = json.dumps({"a": text}, indent=1, ensure_ascii=False)
    stream = writer.finish(_reply(Text(text), ToolCall("c1", "ls", arguments))).decode()
    assert len(stream.splitlines()) == 2
    parts = _parts(json.loads(stream.removeprefix("data: ")))
    assert (parts[0]["text"], parts[1]["functionCall"]["args"]["a"]) == (text, text)


def test_log_probs_go_out_once_each_where_the_client_asked() -> None:
    call = msgspec.structs.replace(STREAM, num_top_logprobs=1)
    entries = tuple(TokenLogprob(str(i), -0.5 * i, top=(TokenLogprob("t", -0.1),)) for i in range(4))
    reply = _reply(Text("012"), logprobs=entries)
    deltas = [ReplyDelta(logprobs=entries[:1]), *(ReplyDelta(text=str(i), logprobs=entries[i : i + 1]) for i in (1, 2))]
    chunks = _streamed(_reply(Text("12"), logprobs=entries), *deltas, call=call)
    results = [chunk["candidates"][0]["logprobsResult"] for chunk in chunks]
    assert [entry["token"] for result in results for entry in result["chosenCandidates"]] == ["0", "1", "2", "3"]
    whole = json.loads(GOOGLE.reply_body(call, reply))["candidates"][0]
    assert whole["avgLogprobs"] == pytest.approx(-0.75)
    assert whole["logprobsResult"]["topCandidates"][0]["candidates"] == [{"token": "t", "logProbability": -0.1}]
    assert "logprobsResult" not in json.loads(GOOGLE.reply_body(STREAM, reply))["candidates"][0]


def test_a_stream_that_breaks_ends_with_a_bare_error() -> None:
    writer = GOOGLE.event_writer(STREAM, reply_id="abc", model="m", created_at=1)
    end = writer.error(EngineUnavailable("the engine died"))
    assert not end.startswith(b"data:")
    assert json.loads(end)["error"]["status"] == "UNAVAILABLE"


def test_an_array_stays_an_array_when_it_breaks_and_when_it_is_kept_alive() -> None:
    call = msgspec.structs.replace(STREAM, echo={"array": True})
    writer = GOOGLE.event_writer(call, reply_id="abc", model="m", created_at=1)
    pieces = [writer.keep_alive(), writer.delta(ReplyDelta(text="a")), writer.delta(ReplyDelta(text="b"))]
    pieces += [writer.keep_alive(), writer.error(EngineUnavailable("the engine died"))]
    chunk, error = json.loads(b"".join(pieces))
    assert _parts(chunk) == [{"text": "a"}]
    assert error["error"]["code"] == 503


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "status", "never_again"),
    [
        (InvalidRequest("x"), 400, "INVALID_ARGUMENT", False),
        (ContextOverflow("x"), 400, "INVALID_ARGUMENT", True),
        (Unauthorized("x"), 401, "UNAUTHENTICATED", False),
        (SessionOver("x"), 403, "PERMISSION_DENIED", True),
        (NotFound("x"), 404, "NOT_FOUND", False),
        (LimitExceeded("x"), 413, "INVALID_ARGUMENT", False),
        (LimitExceeded("x", retry_after_s=1.5), 429, "RESOURCE_EXHAUSTED", False),
        (EngineIncapable("x"), 400, "FAILED_PRECONDITION", True),
        (EngineRefused("x", status=422), 400, "INVALID_ARGUMENT", False),
        (EngineRefused("x", status=404), 500, "INTERNAL", True),
        (EngineUnavailable("x"), 503, "UNAVAILABLE", False),
        (EngineMalformed("x"), 502, "UNAVAILABLE", False),
        (NodeError("x"), 503, "UNAVAILABLE", False),
        (GanglineError("x"), 500, "INTERNAL", True),
    ],
)
def test_errors_have_google_s_shape(error: GanglineError, code: int, status: str, never_again: bool) -> None:
    answer = GOOGLE.error_answer(error)
    inner = json.loads(answer.body)["error"]
    assert (answer.status, inner["code"], inner["status"], inner["message"]) == (code, code, status, "x")
    assert (answer.headers.get("x-should-retry") == "false") == never_again
    assert inner["details"][0]["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"


def test_a_429_says_when_to_come_back_in_both_ways() -> None:
    answer = GOOGLE.error_answer(LimitExceeded("x", retry_after_s=1.5))
    assert answer.headers["retry-after"] == "2"
    assert json.loads(answer.body)["error"]["details"][-1]["retryDelay"] == "2s"


def test_models_are_listed_under_google_s_names() -> None:
    card = json.loads(GOOGLE.model_card("org/name", 4096))
    assert json.loads(GOOGLE.model_list(["org/name"], 4096)) == {"models": [card]}
    assert (card["name"], card["inputTokenLimit"]) == ("models/org/name", 4096)
    assert "inputTokenLimit" not in json.loads(GOOGLE.model_card("m"))
