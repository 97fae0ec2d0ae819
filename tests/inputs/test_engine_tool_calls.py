"""Tool calls in chat streams and replies, as servers mark their pieces: no two calls become one, and none is lost."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.conversation import Message, ModelCall, Text, ToolCall, ToolDefinition
from gangline.domain.errors import EngineMalformed
from gangline.domain.reply import ReplyDelta, ToolCallDelta
from gangline.models.engines.contract import EngineDelta, EngineReply, EngineRequest, ReplyAccumulator
from gangline.models.engines.replies import WireMessage, decode, message_of
from gangline.models.engines.text.parsed import ParsedEngine
from gangline.models.engines.vllm.calls import CallsOfChoices
from gangline.models.engines.vllm.engine import decode_events, engine_deltas
from gangline.models.engines.vllm.wire import WireReply
from gangline.models.language.parsing.parser import Parsers
from support.engines.engine import TemplateEngine

F, G = ("f", '{"city": "Bern"}'), ("g", '{"x": [1, 2]}')

_LEFT_OUT: Any = object()


def piece(arguments: Any = _LEFT_OUT, *, name: Any = _LEFT_OUT, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return fields | {"function": {key: value for key, value in function.items() if value is not _LEFT_OUT}}


def begun(name: Any, arguments: Any = "", **fields: Any) -> dict[str, Any]:
    return {"type": "function"} | piece(arguments, name=name, **fields)


def shown(*lists: list[dict[str, Any]] | dict[str, Any]) -> list[ToolCallDelta]:
    """What a harness is shown of a stream with one list of pieces, or one delta, in each chunk."""
    deltas = [one if isinstance(one, dict) else {"tool_calls": one} for one in lists]
    data = [json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() for delta in deltas]
    found: list[list[ToolCallDelta]] = []
    messages: list[tuple[ToolCall, ...]] = []
    for reads in ([[one] for one in data], [data]):  # a read for each event, and all in one
        calls, folded = CallsOfChoices(), ReplyAccumulator()
        found.append([])
        for events in reads:
            for delta in engine_deltas(decode_events(events, WireReply, "URL"), calls):
                folded.feed(delta)
                found[-1] += delta.shown.tool_calls
        calls.finish()
        parts = folded.reply().choices[0].message.parts
        messages.append(tuple(part for part in parts if isinstance(part, ToolCall)))
    assert messages[0] == messages[1]
    assert read(found[0]) == read(found[1]) == [(call.name, call.arguments) for call in messages[0]]
    return found[0]


def read(pieces: list[ToolCallDelta]) -> list[tuple[str, str]]:
    """As a strict client reads them: id and name in the first piece of a call only, numbers from 0 in order."""
    calls: list[list[str]] = []
    for one in pieces:
        if one.index == len(calls):
            assert one.name, "a call begins with its name"
            calls.append([one.name, one.arguments])
        else:
            assert one.name is None
            assert one.call_id is None
            calls[one.index][1] += one.arguments
    return [(name, arguments) for name, arguments in calls]


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


F1, F2 = halves(F[1])
G1, G2 = halves(G[1])

STREAMS: dict[str, list[list[dict[str, Any]] | dict[str, Any]]] = {
    "as OpenAI writes it": [
        [begun("f", index=0, id="a")],
        *([piece(half, index=0)] for half in (F1, F2)),
        [begun("g", index=1, id="b")],
        *([piece(half, index=1)] for half in (G1, G2)),
    ],
    "one index, different ids": [
        [begun("f", index=0, id="a")],
        [piece(F1, index=0)],
        [piece(F2, index=0)],
        [begun("g", index=0, id="b")],
        [piece(G1, index=0)],
        [piece(G2, index=0)],
    ],
    "one index, whole calls": [[begun(*F, index=0, id="a")], [begun(*G, index=0, id="b")]],
    "one index, both in one delta": [[begun(*F, index=0, id="a"), begun(*G, index=0, id="b")]],
    "one index, an id with every piece": [
        [begun("f", index=0, id="a")],
        [piece(F[1], index=0, id="a")],
        [begun("g", index=0, id="b")],
        [piece(G1, index=0, id="b")],
        [piece(G2, index=0, id="b")],
    ],
    "one index, interleaved by their ids": [
        [begun("f", F1, index=0, id="a")],
        [begun("g", G1, index=0, id="b")],
        [piece(F2, index=0, id="a")],
        [piece(G2, index=0, id="b")],
    ],
    "no index": [[begun("f", id="a")], [piece(F1)], [piece(F2)], [begun("g", id="b")], [piece(G[1])]],
    "no index, both in one delta": [[begun(*F, id="a"), begun(*G, id="b")]],
    "no index, no id, both in one delta": [[begun(*F), begun(*G)]],
    "no index, no id, one after the other": [[begun(*F)], [begun(*G)]],
    "index null": [[begun("f", F1, index=None, id="a")], [piece(F2, index=None)], [begun(*G, index=None, id="b")]],
    "an index that only later pieces have": [
        [begun("f", id="a")],
        [piece(F[1], index=0)],
        [begun(*G, index=1, id="b")],
    ],
    "indexes that jump": [[begun(*F, index=3, id="a")], [begun("g", index=7, id="b")], [piece(G[1], index=7)]],
    "indexes that fall": [[begun(*F, index=1, id="a")], [begun("g", index=0, id="b")], [piece(G[1], index=0)]],
    "indexes that begin at 1": [[begun(*F, index=1, id="a")], [begun(*G, index=2, id="b")]],
    "an index that restarts without ids": [[begun("f", F1, index=0)], [piece(F2, index=0)], [begun(*G, index=0)]],
    "an index that restarts, the name first": [[begun(*F, index=0)], [begun("g", index=0)], [piece(G[1], index=0)]],
    "interleaved": [
        [begun("f", index=0, id="a")],
        [begun("g", index=1, id="b")],
        [piece(F1, index=0), piece(G1, index=1)],
        [piece(G2, index=1), piece(F2, index=0)],
    ],
    "empty ids later": [
        [begun("f", index=0, id="a")],
        [piece(F[1], index=0, id="", name="")],
        [begun(*G, index=1, id="b")],
    ],
    "nulls later": [
        [begun("f", index=0, id="a")],
        [piece(F[1], index=0, id=None, name=None)],
        [begun(*G, index=1, id="b")],
    ],
    "no ids at all": [[begun("f", index=0)], [piece(F[1], index=0)], [begun("g", index=1)], [piece(G[1], index=1)]],
    "one id for every call": [[begun(*F, index=0, id="x")], [begun("g", index=1, id="x")], [piece(G[1], index=1)]],
    "one id for every call, no index": [[begun(*F, id="x"), begun(*G, id="x")]],
    "id and name with every piece": [
        [begun("f", F1, index=0, id="a")],
        [begun("f", F2, index=0, id="a")],
        [begun("f", "", index=0, id="a")],
        [begun("g", G1, index=1, id="b")],
        [begun("g", G2, index=1, id="b")],
    ],
    "one id that comes with another index": [
        [begun("f", F1, index=0, id="a")],
        [piece(F2, index=5, id="a")],
        [begun(*G, index=1, id="b")],
    ],
    "an id that comes late": [
        [begun("f", F1, index=0)],
        [piece(F2, index=0, id="a")],
        [begun("g", index=0, id="b")],
        [piece(G[1], index=0)],
    ],
    "a name that comes after the id": [
        [piece(index=0, id="a")],
        [piece(index=0, name="f")],
        [piece(F[1], index=0)],
        [begun(*G, index=1, id="b")],
    ],
    "a name that comes after the arguments": [
        [piece(F1, index=0, id="a")],
        [piece(F2, index=0)],
        [piece("", index=0, name="f")],
        [begun(*G, index=1, id="b")],
    ],
    "arguments as an object": [
        [begun("f", {"city": "Bern"}, index=0, id="a")],
        [begun("g", {"x": [1, 2]}, index=1, id="b")],
    ],
    "arguments null": [[begun("f", None, index=0, id="a")], [piece(F[1], index=0)], [begun(*G, index=1, id="b")]],
    "pieces without a function": [
        [{"index": 0, "id": "a", "function": None}],
        [begun("f", index=0, id="a")],
        [{"index": 0}],
        [piece(F[1], index=0)],
        [],
        [begun(*G, index=1, id="b")],
    ],
    "after content": [
        {"content": "I look it up. "},
        [begun(*F, index=0, id="a")],
        {"content": " "},
        [begun(*G, index=1, id="b")],
    ],
    "content and calls in one delta": [
        {"content": "Both:", "tool_calls": [begun(*F, index=0, id="a"), begun(*G, index=0, id="b")]}
    ],
    "the old form, and the new one": [
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": F1}},
        {"function_call": {"name": None, "arguments": F2}},
        [begun(*G, index=0, id="b")],
    ],
}


@pytest.mark.parametrize("name", STREAMS)
def test_two_calls_of_a_stream_are_two_calls(name: str) -> None:
    assert read(shown(*STREAMS[name])) == [F, G]


def test_calls_of_one_function_with_one_text_stay_apart() -> None:
    same = [[begun(*F, index=0, id="a")], [begun(*F, index=0, id="b")]]
    for stream in (
        same,
        [[begun(*F), begun(*F)]],
        [[begun(*F, id="x"), begun(*F, id="x")]],
        [[begun(*F)], [begun(*F)]],
    ):
        assert read(shown(*stream)) == [F, F]


def test_calls_without_arguments_stay_apart() -> None:
    for stream in (
        [[begun("f", index=0, id="a")], [begun("f", index=0, id="b")]],
        [[begun("f", index=0, id="a"), begun("f", index=0, id="b")]],
        [[begun("f"), begun("f")]],
        [[begun("f", None, id="a")], [begun("f", None, id="b")]],
    ):
        assert read(shown(*stream)) == [("f", ""), ("f", "")]


def test_what_a_model_wrote_after_its_arguments_stays_with_the_call() -> None:
    """Also what is not JSON: it is the model's own."""
    stream = [
        [begun("f", index=0, id="a")],
        [piece("{}", index=0)],
        [piece("{}", index=0)],
        [piece(" x", index=0, id="a")],
    ]
    assert read(shown(*stream)) == [("f", "{}{} x")]


@pytest.mark.parametrize(
    "stream",
    [
        [[begun("get_", index=0, id="a")], [piece("{}", name="weather", index=0)]],
        [[begun("get_", index=0, id="a")], [piece("{}", name="weather", index=0, id="a")]],
        [[begun("f", index=0)], [begun("g", index=0)]],
        [[begun("f", "{", index=0)], [begun("g", "{", index=0)]],
        [[begun(*F, index=0)], [begun("f", index=0)], [piece("{}", index=0)]],
        [[begun("f", index=0, id="a")], [piece("{}", index=0, id="b")]],
        [[piece("{}", index=0, id="a")]],
        [[begun("f", index=0, id="a")], [piece("{}", index=1)]],
        [[piece("{}")]],
        [[begun("f", id="a"), begun("g", id="b")], [piece('{"x":1}'), piece('{"y":2}')]],
        [[begun("f"), begun("g")], [piece('{"x":'), piece('{"y":')], [piece("1}"), piece("2}")]],
        [[piece(index=0, id="a")]],
    ],
)
def test_pieces_that_cannot_be_told_apart_are_refused(stream: list[list[dict[str, Any]]]) -> None:
    with pytest.raises(EngineMalformed, match="tool call"):
        shown(*stream)


_CALLS = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=3), st.integers())), min_size=1, max_size=4
)


@given(_CALLS, st.data())
def test_any_calls_with_ids_of_their_own_are_read_whole_under_any_indexes(
    calls: list[tuple[str, dict[str, int]]], data: st.DataObject
) -> None:
    chunks: list[list[dict[str, Any]]] = []
    expected = [(name, json.dumps(arguments)) for name, arguments in calls]
    for number, (name, arguments) in enumerate(expected):
        where = data.draw(
            st.sampled_from([{}, {"index": None}, {"index": 0}, {"index": number}, {"index": 9 - number}])
        )
        cut = data.draw(st.integers(0, len(arguments)))
        own = {"id": f"call_{number}"}
        again = data.draw(st.sampled_from([{}, own, {"id": ""}, {"id": None}]))
        pieces = [begun(name, arguments[:cut], **where, **own), piece(arguments[cut:], **where, **again)]
        chunks += data.draw(st.sampled_from([[pieces], [[one] for one in pieces]]))
    joined = data.draw(st.booleans())
    assert read(shown(*([[one for many in chunks for one in many]] if joined else chunks))) == expected


# -- whole replies ----------------------------------------------------------------------------------------------------


def whole(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    parts = message_of(decode(json.dumps(message).encode(), WireMessage, "URL")).parts
    return [(part.call_id, part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ({"tool_calls": [begun(*F, id="a"), begun(*F, id="a")]}, [("a", *F), ("a", *F)]),
        ({"tool_calls": [begun(*F), begun(*G, id=None)]}, [("", *F), ("", *G)]),
        (
            {"tool_calls": [begun("f", {"n": 10**20, "r": 1.5, "t": "\u00e9"}, id="a")]},
            [("a", "f", '{"n": 100000000000000000000, "r": 1.5, "t": "\u00e9"}')],
        ),
        ({"tool_calls": [begun("f", None, id="a")]}, [("a", "f", "")]),
        ({"tool_calls": [begun(*F, id="a", index=None)]}, [("a", *F)]),
        ({"tool_calls": None, "function_call": {"name": "f", "arguments": F[1]}}, [("", *F)]),
        ({"tool_calls": [begun(*F, id="a")], "function_call": {"name": "f", "arguments": F[1]}}, [("a", *F)]),
        ({"tool_calls": [], "function_call": None}, []),
    ],
)
def test_the_calls_of_a_whole_reply_are_read_whatever_their_form(
    message: dict[str, Any], calls: list[tuple[str, str, str]]
) -> None:
    assert whole({"role": "assistant", "content": None} | message) == calls


@pytest.mark.parametrize(
    "message",
    [{"tool_calls": [piece("{}", id="a")]}, {"tool_calls": [{"id": "a"}]}, {"function_call": {"arguments": "{}"}}],
)
def test_a_call_of_a_whole_reply_without_a_name_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(EngineMalformed, match="without a name"):
        whole(message)


# -- calls that the engine read, and calls that are read here, in one reply -------------------------------------------


class _OwnCalls(TemplateEngine):
    """It reads one call, and leaves another one in the text."""

    def __init__(self) -> None:
        super().__init__(None)

    async def chat(self, request: EngineRequest) -> EngineReply:
        folded = ReplyAccumulator()
        async for delta in self.stream(request):
            folded.feed(delta)
        return folded.reply()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        yield EngineDelta(shown=ReplyDelta(tool_calls=(ToolCallDelta(0, F1, "a", "f"),)))
        yield EngineDelta(shown=ReplyDelta(text='<tool_call>{"name": "g", "arguments": '))
        yield EngineDelta(shown=ReplyDelta(tool_calls=(ToolCallDelta(0, F2),)))
        yield EngineDelta(shown=ReplyDelta(text=G[1] + "}</tool_call>"), finish_reason="stop")


async def test_a_call_that_is_read_here_is_not_glued_to_one_that_the_engine_read() -> None:
    tools = tuple(ToolDefinition(name, None, {"type": "object"}) for name in "fg")
    engine = ParsedEngine(_OwnCalls(), Parsers(tools="hermes"))
    call = ModelCall(dialect="d", model="m", messages=(Message("user", (Text("hi"),)),), tools=tools)
    deltas = [delta.shown async for delta in engine.stream(EngineRequest(call=call))]
    assert read([piece for delta in deltas for piece in delta.tool_calls]) == [F, G]
    parts = (await engine.chat(EngineRequest(call=call))).choices[0].message.parts
    assert [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)] == [F, G]
