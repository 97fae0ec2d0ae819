"""Google: any conversation survives its wire; any cut of a reply is one message; any body is a call or a clear 400."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import InvalidRequest
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, ToolCallDelta
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.google.dialect import GoogleDialect
from support.sdk.google_bodies import conversations, google_contents, names, words

GOOGLE = GoogleDialect()

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)

VALID: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Hi."}, {"inlineData": {"mimeType": "image/png", "data": "iVBORw=="}}]},
        {
            "role": "model",
            "parts": [
                {"text": "Hm.", "thought": True, "thoughtSignature": "Z2FuZ2xpbmU6YWJj"},
                {"text": "Looking."},
                {"functionCall": {"id": "call_1", "name": "ls", "args": {"path": "."}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {
                    "functionResponse": {
                        "id": "call_1",
                        "name": "ls",
                        "response": {"output": "a"},
                        "parts": [{"inlineData": {"mimeType": "application/pdf", "data": "JVBERg=="}}],
                    }
                }
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "ls",
                    "description": "List.",
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {"path": {"type": "STRING", "nullable": True, "minLength": "1"}},
                        "anyOf": [{"type": "OBJECT"}],
                    },
                }
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["ls"]}},
    "generationConfig": {
        "temperature": 0.5,
        "topK": 40.0,
        "maxOutputTokens": 100,
        "stopSequences": ["END"],
        "candidateCount": 2,
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT"},
        "responseLogprobs": True,
        "logprobs": 3,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1},
    },
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in [(*path, key), *_places(value[key], (*path, key))]]


_PLACES = _places(VALID)


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A valid body with up to three of its values replaced, removed or renamed."""
    body = copy.deepcopy(VALID)
    for place in draw(st.lists(st.sampled_from(_PLACES), min_size=1, max_size=3)):
        at: Any = body
        try:
            for key in place[:-1]:
                at = at[key]
            how = draw(st.sampled_from(["replace", "replace", "remove", "rename"]))
            if how == "replace":
                at[place[-1]] = draw(_json)
            elif how == "remove":
                del at[place[-1]]
            elif isinstance(at, dict):
                at[draw(words)] = at.pop(place[-1])
        except (KeyError, IndexError, TypeError):
            continue  # an earlier mutation took it away
    return json.dumps(body).encode()


def _check(body: bytes) -> None:
    request = RawRequest(body=body, params={"model": "m", "method": "generateContent"})
    for parse in (GOOGLE.parse_call, GOOGLE.parse_count):
        try:
            parse(request)
        except InvalidRequest as refused:
            answer = GOOGLE.error_answer(refused)
            assert answer.status == 400
            assert json.loads(answer.body)["error"]["status"] == "INVALID_ARGUMENT"


def test_the_body_that_is_mutated_is_valid() -> None:
    request = RawRequest(body=json.dumps(VALID).encode(), params={"model": "m", "method": "generateContent"})
    assert len(GOOGLE.parse_call(request).messages) == 4


@settings(max_examples=300, deadline=None)
@given(_mutated())
def test_any_mutation_of_a_body_is_a_call_or_a_400_in_shape(body: bytes) -> None:
    _check(body)


@settings(max_examples=400, deadline=None)
@given(
    st.binary(max_size=60)
    | _json.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from([*VALID]), _json).map(lambda value: json.dumps(value).encode())
)
def test_any_junk_is_a_call_or_a_400_in_shape(body: bytes) -> None:
    _check(body)


def test_a_body_nested_without_end_is_a_400() -> None:
    _check(b'{"contents":' + b"[" * 100_000)
    for depth in (100, 400, 900, 5000):
        schema = b'{"type":"OBJECT","properties":{"a":' * depth + b"{}" + b"}}" * depth
        tools = b'[{"functionDeclarations":[{"name":"f","parameters":' + schema + b"}]}]"
        _check(b'{"contents":[{"parts":[{"text":"Hi."}]}],"tools":' + tools + b"}")


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_a_conversation_survives_the_wire(messages: list[Message]) -> None:
    body = json.dumps({"contents": google_contents(messages)}).encode()
    call = GOOGLE.parse_call(RawRequest(body=body, params={"model": "m", "method": "generateContent"}))
    assert call.messages == tuple(messages)
    assert call.dropped == ()


@settings(max_examples=200, deadline=None)
@given(conversations(), st.data())
def test_a_turn_echoed_in_several_contents_is_one_turn(messages: list[Message], data: st.DataObject) -> None:
    """As the SDKs keep it: one content per streamed chunk, texts cut anywhere."""
    contents: list[dict[str, Any]] = []
    for content in google_contents(messages):
        contents += _cut(content, data) if content["role"] == "model" else [content]
    body = json.dumps({"contents": contents}).encode()
    call = GOOGLE.parse_call(RawRequest(body=body, params={"model": "m", "method": "generateContent"}))
    assert call.messages == tuple(messages)


def _cut(content: dict[str, Any], data: st.DataObject) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for part in content["parts"]:
        text = part.get("text", "")
        at = data.draw(st.integers(1, len(text))) if text else 0
        halves = [part | {"text": text[:at]}, part | {"text": text[at:]}] if 0 < at < len(text) else [part]
        pieces += [{"role": "model", "parts": [half]} for half in halves]
    return pieces or [content]


_raw_arguments = (
    st.dictionaries(words, _json, max_size=3).map(lambda value: json.dumps(value, indent=1, ensure_ascii=False)) | words
)


@st.composite
def _replies(draw: st.DrawFn) -> Reply:
    def message() -> Message:
        parts: list[Part] = [
            *draw(st.lists(words.map(Thinking), max_size=1)),
            *draw(st.lists(words.map(Text), max_size=1)),
        ]
        calls = draw(st.lists(st.tuples(names, _raw_arguments), max_size=3))
        return Message("assistant", (*parts, *(ToolCall(f"call_{i}", *call) for i, call in enumerate(calls))))

    choices = tuple(
        ReplyChoice(index=i, message=message(), finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])))
        for i in range(draw(st.integers(1, 2)))
    )
    usage = Usage(num_prompt_tokens=3, num_sampled_tokens=5, num_cached_tokens=1, num_thinking_tokens=2)
    return Reply(reply_id="abc", model="m", created_at=1, choices=choices, usage=usage)


def _deltas(reply: Reply, data: st.DataObject) -> list[ReplyDelta]:
    """Any cut: each choice in its order, choices and tool calls mixed."""
    queues = [_choice_deltas(choice, data) for choice in reply.choices]
    deltas: list[ReplyDelta] = []
    while any(queues):
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        deltas.append(queue.pop(0))
    return deltas


def _choice_deltas(choice: ReplyChoice, data: st.DataObject) -> list[ReplyDelta]:
    deltas: list[ReplyDelta] = []
    calls: list[list[ReplyDelta]] = []
    for part in choice.message.parts:
        match part:
            case Thinking(text):
                deltas += [ReplyDelta(choice_index=choice.index, thinking=piece) for piece in _pieces(text, data)]
            case Text(text):
                deltas += [ReplyDelta(choice_index=choice.index, text=piece) for piece in _pieces(text, data)]
            case ToolCall(call_id, name, arguments):
                first = ToolCallDelta(len(calls), "", call_id, name)
                rest = [ToolCallDelta(len(calls), piece) for piece in _pieces(arguments, data)]
                calls.append([ReplyDelta(choice_index=choice.index, tool_calls=(d,)) for d in (first, *rest)])
            case _:
                raise AssertionError(part)
    while any(calls):
        deltas.append(data.draw(st.sampled_from([call for call in calls if call])).pop(0))
    return deltas


def _pieces(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _accumulated(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """As Gemini CLI joins them: neighbouring texts of one kind are one part."""
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        for candidate in chunk["candidates"]:
            for part in candidate["content"]["parts"] if candidate["index"] == index else []:
                part = {name: value for name, value in part.items() if name != "thoughtSignature"}
                if parts and "text" in part and "text" in parts[-1] and part.get("thought") == parts[-1].get("thought"):
                    parts[-1] = parts[-1] | {"text": parts[-1]["text"] + part["text"]}
                else:
                    parts.append(part)
    return parts


def _is_sayable(part: dict[str, Any]) -> bool:
    return "functionCall" in part or bool(part["text"])


@settings(max_examples=300, deadline=None)
@given(_replies(), st.booleans(), st.booleans(), st.data())
def test_any_cut_of_a_reply_is_the_same_message(
    reply: Reply, thoughts: bool, as_array: bool, data: st.DataObject
) -> None:
    echo = {"thoughts": thoughts, "array": as_array}
    call = ModelCall(dialect="google", model="m", messages=(), stream=True, echo=echo)
    writer = GOOGLE.event_writer(call, reply_id="abc", model="m", created_at=1)
    pieces = [writer.keep_alive(), writer.start(3)]
    for delta in _deltas(reply, data):
        pieces += [writer.delta(delta), writer.keep_alive()]
    chunks = _read(b"".join((*pieces, writer.finish(reply))), as_array)
    whole = json.loads(GOOGLE.reply_body(call, reply))
    for candidate in whole["candidates"]:
        parts = [{k: v for k, v in part.items() if k != "thoughtSignature"} for part in candidate["content"]["parts"]]
        assert _accumulated(chunks, candidate["index"]) == parts
        assert all(isinstance(part["functionCall"]["args"], dict) for part in parts if "functionCall" in part)
    _check_the_end(chunks, whole)


def _check_the_end(chunks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """The last chunk says how it ended, and says something wherever the reply does."""
    assert chunks[-1]["usageMetadata"] == whole["usageMetadata"]
    for last, candidate in zip(chunks[-1]["candidates"], whole["candidates"], strict=True):
        assert last["finishReason"] == candidate["finishReason"]
        says = any(_is_sayable(part) for part in candidate["content"]["parts"])
        assert any(_is_sayable(part) for part in last["content"]["parts"]) == says
    assert not any("finishReason" in candidate for chunk in chunks[:-1] for candidate in chunk["candidates"])


def _read(stream: bytes, as_array: bool) -> list[dict[str, Any]]:
    if as_array:
        return json.loads(stream)
    # Line ends as a JavaScript regular expression and Python's str.splitlines see them.
    lines = [line for line in stream.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@settings(max_examples=200, deadline=None)
@given(_replies())
def test_a_reply_comes_back_as_it_went_out(reply: Reply) -> None:
    """Malformed arguments too: the history then says what was sampled."""
    call = ModelCall(dialect="google", model="m", messages=(), echo={"thoughts": True})
    content = json.loads(GOOGLE.reply_body(call, reply))["candidates"][0]["content"]
    body = json.dumps({"contents": [content]}).encode()
    echoed = GOOGLE.parse_call(RawRequest(body=body, params={"model": "m"})).messages[-1]
    sampled = reply.choices[0].message
    assert _meaning(echoed) == _meaning(sampled)


def _meaning(message: Message) -> list[Any]:
    thought = "".join(part.text for part in message.parts if isinstance(part, Thinking))
    text = "".join(part.text for part in message.parts if isinstance(part, Text))
    calls = [(part.call_id, part.name, _loaded(part.arguments)) for part in message.parts if isinstance(part, ToolCall)]
    return [thought, text, calls]


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments if arguments.strip() else {}
