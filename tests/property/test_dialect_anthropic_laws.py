"""Any conversation survives the way in; any cut of a reply is one message; any body is a call or a clear refusal."""

from __future__ import annotations

import json
import random
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gangline.domain.conversation import Message, ModelCall, Part, SamplingParams, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import InvalidRequest
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, ToolCallDelta
from gangline.wire.dialects.anthropic.dialect import AnthropicDialect
from gangline.wire.dialects.contract import RawRequest
from support.sdk.anthropic_bodies import calls, request_body, texts, tool_calls

DIALECT = AnthropicDialect()
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CALL = ModelCall(dialect="anthropic", model="m", messages=(), stream=True, sampling=SamplingParams(stop=("END",)))
SIGNATURE = "Z2FuZ2xpbmU6cjE="


# -- requests --------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(calls())
def test_a_call_survives_the_way_through_a_request_body(call: ModelCall) -> None:
    body = json.dumps(request_body(call)).encode()
    parsed = DIALECT.parse_call(RawRequest(body=body))
    assert _comparable(parsed) == _comparable(call)
    assert DIALECT.parse_count(RawRequest(body=body)) == parsed


def _comparable(call: ModelCall) -> list[Any]:
    """Arguments as values: a client writes the same JSON in its own way."""
    messages = [(m.role, [_part_value(part) for part in m.parts]) for m in call.messages]
    settings_of = {name: getattr(call, name) for name in ModelCall.__struct_fields__ if name != "messages"}
    return [messages, settings_of]


def _part_value(part: Part) -> Any:
    return (part.call_id, part.name, json.loads(part.arguments)) if isinstance(part, ToolCall) else part


BASE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "metadata": {"user_id": "u"},
    "tools": [{"name": "bash", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "w"}],
    "tool_choice": {"type": "tool", "name": "bash"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["a"],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "tool_reference", "tool_name": "b"}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                {"type": "document", "source": {"type": "url", "url": "https://e.invalid/a.pdf"}},
            ],
        },
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "bash"}}]},
    ],
}
JUNK: list[Any] = [None, True, -1, 0, 1e308, 2**70, "", "x", "tool_use", "\u0000", [], [1], [[]], {}, {"type": "x"}]
JUNK += [
    {"type": "text"},
    {"type": "tool_use", "id": "1", "name": "n", "input": 1},
    [{"type": "thinking"}],
    "assistant",
]


def _mutated(body: Any, chance: random.Random) -> Any:
    """One place of the body, any depth, is removed, doubled or replaced by junk."""
    if isinstance(body, dict | list) and body and chance.random() < 0.85:
        keys = list(body) if isinstance(body, dict) else list(range(len(body)))
        key = chance.choice(keys)
        copy = body.copy()
        copy[key] = _mutated(body[key], chance)
        if chance.random() < 0.1:
            del copy[key]
        return copy
    return chance.choice(JUNK)


def test_ten_thousand_malformed_bodies_are_calls_or_refusals_in_shape() -> None:
    chance = random.Random(20261121)
    num_refused = 0
    for i in range(10_000):
        mutant = _mutated(_mutated(BASE, chance), chance)
        body = json.dumps(mutant).encode()
        if i % 3 == 0:  # bytes too, not only values
            at = chance.randrange(len(body))
            body = body[:at] + chance.randbytes(chance.randrange(4)) + body[at + chance.randrange(4) :]
        num_refused += _is_refused(body)
    assert 2_000 < num_refused < 10_000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_junk_is_refused_in_shape(body: bytes) -> None:
    assert _is_refused(body)


def _is_refused(body: bytes) -> bool:
    try:
        call = DIALECT.parse_call(RawRequest(body=body))
    except InvalidRequest as refused:
        answer = DIALECT.error_answer(refused)
        said = json.loads(answer.body)
        assert (answer.status, said["type"], said["error"]["type"]) == (400, "error", "invalid_request_error")
        return True
    for message in call.messages:
        for part in message.parts:
            assert not isinstance(part, ToolCall) or isinstance(json.loads(part.arguments), dict)
    return False


# -- replies ---------------------------------------------------------------------------------------------------------

_any_arguments = tool_calls.map(lambda call: call.arguments) | texts | st.just('{"a": 1')


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    parts: list[Part] = []
    if thought := draw(texts):
        parts.append(Thinking(thought))
    if text := draw(texts):
        parts.append(Text(text))
    arguments = draw(st.lists(_any_arguments, max_size=3))
    parts += [ToolCall(f"call_{i}", f"tool_{i}", text) for i, text in enumerate(arguments)]
    reason = draw(st.sampled_from(["stop", "length", "tool_calls", "abort", "content_filter"]))
    choice = ReplyChoice(index=0, message=Message("assistant", tuple(parts)), finish_reason=reason)
    usage = Usage(num_prompt_tokens=12, num_sampled_tokens=3, num_cached_tokens=4, num_thinking_tokens=1)
    return Reply(reply_id="r1", model="m", created_at=1, choices=(choice,), usage=usage)


def cut(text: str, data: st.DataObject) -> list[str]:
    marks = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]


def deltas_of(reply: Reply, data: st.DataObject) -> list[ReplyDelta]:
    """Thinking, then text, then the calls; each call in order, the calls shuffled into each other."""
    deltas: list[ReplyDelta] = []
    queues: list[list[ToolCallDelta]] = []
    for part in reply.choices[0].message.parts:
        match part:
            case Thinking():
                deltas += [ReplyDelta(thinking=piece) for piece in cut(part.text, data)]
            case Text():
                deltas += [ReplyDelta(text=piece) for piece in cut(part.text, data)]
            case ToolCall():
                first, *rest = cut(part.arguments, data)
                index = len(queues)
                head = ToolCallDelta(index, first, part.call_id, part.name)
                queues.append([head, *(ToolCallDelta(index, piece) for piece in rest)])
            case _:
                raise AssertionError(part)
    while live := [queue for queue in queues if queue]:
        deltas.append(ReplyDelta(tool_calls=(data.draw(st.sampled_from(live)).pop(0),)))
    return deltas


def events_of(stream: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """By the SDK's own accumulator; the grammar is checked on the way."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    open_block: int | None = None
    num_blocks, arguments = 0, dict[int, str]()
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (None, num_blocks)
                open_block, num_blocks = num_blocks, num_blocks + 1
            case "content_block_delta":
                assert event["index"] == open_block
                if event["delta"]["type"] == "input_json_delta":
                    arguments[open_block] = arguments.get(open_block, "") + event["delta"]["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_block
                assert isinstance(json.loads(arguments.get(open_block, "{}")), dict)
                open_block = None
            case _:
                assert open_block is None
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    return without_nulls(snapshot.to_dict())


def whole_body(reply: Reply) -> dict[str, Any]:
    return without_nulls(json.loads(DIALECT.reply_body(CALL, reply)))


def without_nulls(value: Any) -> Any:
    """The client's models do not tell null from absent."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value


def streamed(reply: Reply, deltas: list[ReplyDelta]) -> bytes:
    writer = DIALECT.event_writer(CALL, reply_id="r1", model="m", created_at=1)
    return writer.start(12) + b"".join(map(writer.delta, deltas)) + writer.finish(reply)


@settings(max_examples=400, deadline=None)
@given(replies(), st.data())
def test_any_cut_of_a_reply_is_the_same_message_as_the_whole_body(reply: Reply, data: st.DataObject) -> None:
    message = accumulated(events_of(streamed(reply, deltas_of(reply, data))))
    body = whole_body(reply)
    assert message == body
    kinds = {"thinking": Thinking, "text": Text, "tool_use": ToolCall}
    parts = reply.choices[0].message.parts
    assert [kinds[block["type"]] for block in body["content"]] == [type(part) for part in parts or (Text(""),)]


@settings(max_examples=200, deadline=None)
@given(replies(), st.data())
def test_deltas_in_any_order_lose_nothing_and_keep_the_grammar(reply: Reply, data: st.DataObject) -> None:
    deltas = deltas_of(reply, data)
    said = [delta for delta in deltas if not delta.tool_calls]
    for delta in said:  # text that comes after calls have begun
        deltas.remove(delta)
        deltas.insert(data.draw(st.integers(0, len(deltas))), delta)
    blocks = accumulated(events_of(streamed(reply, deltas)))["content"]
    whole = whole_body(reply)["content"]
    assert [b for b in blocks if b["type"] == "tool_use"] == [b for b in whole if b["type"] == "tool_use"]
    for kind in ("text", "thinking"):
        shown = sorted("".join(b[kind] for b in blocks if b["type"] == kind))
        assert shown == sorted("".join(b[kind] for b in whole if b["type"] == kind))
    assert all(b["signature"] == SIGNATURE for b in blocks if b["type"] == "thinking")


@given(replies())
def test_a_reply_shown_by_no_delta_goes_out_whole(reply: Reply) -> None:
    assert accumulated(events_of(streamed(reply, []))) == whole_body(reply)
