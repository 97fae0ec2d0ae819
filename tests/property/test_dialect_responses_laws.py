"""Responses: any conversation survives, any split of a reply ends the same, any body is a call or a clear refusal."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import EngineUnavailable, InvalidRequest
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, ToolCallDelta
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.responses.dialect import ResponsesDialect
from support.sdk.responses_bodies import TOOLS, arguments, conversations, gathered, input_items, json_values, texts

RESPONSES = ResponsesDialect()
NAMES = ["shell", "patch", "mcp__look", "unknown"]


def _parse(fields: Any) -> ModelCall:
    return RESPONSES.parse_call(RawRequest(body=json.dumps(fields).encode()))


# -- requests --------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(conversations(), st.none() | texts.filter(bool))
def test_a_conversation_is_read_as_it_was_meant(messages: list[Message], instructions: str | None) -> None:
    call = _parse({"model": "m", "instructions": instructions, "input": input_items(messages), "tools": TOOLS})
    first = (Message("system", (Text(instructions),)),) if instructions else ()
    assert call.messages == (*first, *messages)
    assert call.dropped == ("tools[2]: web_search",)


_SAMPLE = {
    "model": "m",
    "instructions": "be brief",
    "tools": TOOLS,
    "tool_choice": {"type": "custom", "name": "patch"},
    "include": ["reasoning.encrypted_content"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    "reasoning": {"effort": "low"},
    "stream": True,
    "top_logprobs": 2,
    "max_output_tokens": 10,
    "temperature": 0.5,
    "metadata": {"a": "b"},
    "stop": ["x"],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "t"}],
            "encrypted_content": "k",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "look", "namespace": "mcp", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "+"},
        {"type": "function_call_output", "call_id": "1", "output": "ok"},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [{"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}],
        },
        {"role": "user", "content": [{"type": "input_file", "file_data": "aGk=", "filename": "a.pdf"}]},
    ],
}


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, entry in inner for place in _places(entry, (*at, key)))]


_PLACES = _places(_SAMPLE)[1:]


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """The sample with a few values replaced, removed or cut."""
    body = json.loads(json.dumps(_SAMPLE))
    for place in draw(st.lists(st.sampled_from(_PLACES), min_size=1, max_size=3)):
        _change(body, place, draw(st.sampled_from(["replace", "remove"])), draw(json_values))
    encoded = json.dumps(body).encode()
    return encoded[: draw(st.integers(0, len(encoded)))] if draw(st.integers(0, 9)) == 0 else encoded


def _change(body: Any, place: tuple[Any, ...], how: str, value: Any) -> None:
    try:
        for key in place[:-1]:
            body = body[key]
        if how == "replace":
            body[place[-1]] = value
        else:
            del body[place[-1]]
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took the place away


_junk = (
    st.binary(max_size=40)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from([*_SAMPLE, "background", "prompt", "previous_response_id"]), json_values).map(
        lambda fields: json.dumps(fields).encode()
    )
)


@settings(max_examples=1000, deadline=None)
@given(_mutated() | _junk)
@example(b'{"model":"m","input":"\\ud800"}')
@example(b"[" * 100_000)
def test_any_body_is_a_call_or_a_400_in_shape(body: bytes) -> None:
    _check_answer(body)


_ODD = ["null", "true", "-1", "1e30", "0.5", '""', '"x"', "[]", "[null]", '["x"]', "{}", '{"type":"x"}', '{"type":1}']


def test_ten_thousand_broken_bodies_are_calls_or_400s_in_shape() -> None:
    """Many more than Hypothesis has time for: each is the sample with up to four values broken."""
    chance = random.Random(3)
    plain = json.dumps(_SAMPLE)
    for _ in range(10_000):
        body = json.loads(plain)
        for place in chance.choices(_PLACES, k=chance.randint(1, 4)):
            _change(body, place, chance.choice(["replace", "replace", "remove"]), json.loads(chance.choice(_ODD)))
        encoded = json.dumps(body).encode()
        _check_answer(encoded if chance.random() < 0.9 else encoded[: chance.randrange(len(encoded))])


def _check_answer(body: bytes) -> None:
    try:
        call = RESPONSES.parse_call(RawRequest(body=body))
    except InvalidRequest as refused:
        answer = RESPONSES.error_answer(refused)
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"
    else:
        json.loads(RESPONSES.reply_body(call, _reply(Message("assistant", (Text("fine"),)))))


# -- replies ---------------------------------------------------------------------------------------------------------


def _reply(message: Message, finish_reason: str = "stop") -> Reply:
    choice = ReplyChoice(index=0, message=message, finish_reason=finish_reason)
    usage = Usage(num_prompt_tokens=7, num_sampled_tokens=5, num_cached_tokens=3, num_thinking_tokens=2)
    return Reply(reply_id="ab12", model="m", created_at=1, choices=(choice,), usage=usage)


_CALL = _parse({"model": "m", "input": "hi", "tools": TOOLS, "stream": True})
_SUMMARISED = _parse({"model": "m", "input": "hi", "tools": TOOLS, "stream": True, "reasoning": {"summary": "auto"}})


@st.composite
def _messages(draw: st.DrawFn, arguments: st.SearchStrategy[str]) -> Message:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3))
    calls = [ToolCall(f"call_{i}", name, draw(arguments)) for i, name in enumerate(names)]
    thinking = draw(st.lists(texts.filter(bool).map(Thinking), max_size=1))
    text = draw(st.lists(texts.filter(bool).map(Text), max_size=1))
    return Message("assistant", (*thinking, *text, *calls))


@st.composite
def _deltas(draw: st.DrawFn, message: Message) -> list[ReplyDelta]:
    """The message in pieces, in any interleaving that keeps the order of each part."""
    queues = [_pieces(draw, part, index) for index, part in enumerate(message.parts)]
    deltas: list[ReplyDelta] = []
    while queues := [queue for queue in queues if queue]:
        deltas.append(draw(st.sampled_from(queues)).pop(0))
    return deltas


def _pieces(draw: st.DrawFn, part: Any, index: int) -> list[ReplyDelta]:
    whole = part.arguments if isinstance(part, ToolCall) else part.text
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    texts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    match part:
        case Thinking():
            return [ReplyDelta(thinking=text) for text in texts]
        case Text():
            return [ReplyDelta(text=text) for text in texts]
        case _:
            first = ToolCallDelta(index, "", part.call_id, part.name)
            return [ReplyDelta(tool_calls=(piece,)) for piece in (first, *(ToolCallDelta(index, t) for t in texts))]


def _events(stream: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def _check_grammar(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The order of events, item by item; answers the items that the stream finished."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    inner = [event for event in events if event["type"] != "response.in_progress"]
    assert inner[0]["type"] == "response.created"
    done: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    gathered_text = ""
    for event in inner[1:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            assert open_item is None
            open_item, gathered_text = event["item"], ""
            continue
        assert open_item is not None
        if kind == "output_item.done":
            assert event["item"]["id"] == open_item["id"]
            done.append(event["item"])
            open_item = None
            continue
        assert event["item_id"] == open_item["id"]
        if kind.endswith(".delta"):
            gathered_text += event["delta"]
        elif kind in ("output_text.done", "reasoning_summary_text.done"):
            assert event["text"] == gathered_text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == gathered_text
            assert isinstance(json.loads(gathered_text), dict)
        elif kind == "custom_tool_call_input.done":
            assert event["input"] == gathered_text
    assert open_item is None
    return done


@settings(max_examples=300, deadline=None)
@given(st.data(), _messages(arguments | texts | st.just("") | st.just('{"input": "x"}')))
def test_any_split_of_a_reply_ends_in_the_same_message(data: st.DataObject, message: Message) -> None:
    call = data.draw(st.sampled_from([_CALL, _SUMMARISED]))
    writer = RESPONSES.event_writer(call, reply_id="ab12", model="m", created_at=1)
    stream = writer.keep_alive() if data.draw(st.booleans()) else b""
    stream += writer.start(7)
    for delta in data.draw(_deltas(message)):
        stream += writer.delta(delta)
        stream += writer.keep_alive() if data.draw(st.booleans()) else b""
    events = _events(stream + writer.finish(_reply(message)))
    done = _check_grammar(events)
    final = events[-1]["response"]
    whole = json.loads(RESPONSES.reply_body(call, _reply(message)))
    assert final["output"] == done
    assert gathered(done, _CALL.tools) == gathered(whole["output"], _CALL.tools)
    assert {**final, "output": None} == {**whole, "output": None}


@settings(max_examples=200, deadline=None)
@given(_messages(arguments.map(lambda text: text or "{}")))
def test_what_was_sampled_comes_back_from_an_echo_of_the_items(message: Message) -> None:
    output = json.loads(RESPONSES.reply_body(_CALL, _reply(message)))["output"]
    echoed = _parse({"model": "m", "input": output, "tools": TOOLS}).messages[0]
    assert _meaning(echoed) == _meaning(message)


@settings(max_examples=200, deadline=None)
@given(texts.filter(lambda text: text.strip() != ""))
def test_arguments_that_are_no_json_come_back_to_the_letter(raw: str) -> None:
    message = Message("assistant", (ToolCall("1", "shell", raw),))
    output = json.loads(RESPONSES.reply_body(_CALL, _reply(message)))["output"]
    assert isinstance(json.loads(output[0]["arguments"]), dict)
    assert _parse({"model": "m", "input": output, "tools": TOOLS}).messages == (message,)


def _meaning(message: Message) -> list[Any]:
    """Of custom calls, the text that the tool gets."""
    found: list[Any] = []
    for part in message.parts:
        match part:
            case ToolCall(call_id, "patch", arguments):
                fields = json.loads(arguments)
                told = fields["input"] if isinstance(fields.get("input"), str) else arguments
                found.append((call_id, told))
            case ToolCall(call_id, name, arguments):
                found.append((call_id, name, json.loads(arguments)))
            case Thinking(text) | Text(text):
                found.append(text)
            case _:
                raise AssertionError(part)
    return found


@settings(max_examples=100, deadline=None)
@given(st.data(), _messages(arguments))
def test_a_stream_that_breaks_anywhere_ends_in_a_failure(data: st.DataObject, message: Message) -> None:
    writer = RESPONSES.event_writer(_CALL, reply_id="ab12", model="m", created_at=1)
    deltas = data.draw(_deltas(message))
    stream = b"".join(writer.delta(delta) for delta in deltas[: data.draw(st.integers(0, len(deltas)))])
    events = _events(stream + writer.error(EngineUnavailable("gone")))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}
