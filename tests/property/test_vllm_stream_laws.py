"""However a stream's bytes are cut into reads, a harness is shown the same, and the record holds the same."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import EngineMalformed, EngineUnavailable
from gangline.domain.reply import ReplyDelta
from gangline.models.engines.contract import EngineDelta, EngineReply, ReplyAccumulator
from gangline.models.engines.vllm.calls import CallsOfChoices
from gangline.models.engines.vllm.engine import decode_events, engine_deltas
from gangline.models.engines.vllm.wire import ShownReply, WireReply
from gangline.wire.http.event_stream import SseEvents

_words = st.text(max_size=3)
_arguments = st.text('a"\u00e9', max_size=3)  # never whole, so that no piece can be refused
_calls = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"arguments": _arguments}, optional={"name": st.just("f")})},
        optional={"index": st.integers(0, 1), "id": st.sampled_from(["x", "y"])},
    ),
    max_size=2,
)
_deltas = st.fixed_dictionaries(
    {}, optional={"content": _words, "reasoning": _words, "reasoning_content": _words, "tool_calls": _calls}
)


@st.composite
def _choices(draw: st.DrawFn) -> dict[str, Any]:
    ids = draw(st.lists(st.integers(0, 99), max_size=2))
    entries = [{"token": str(token), "logprob": -token / 100, "bytes": [token], "top_logprobs": []} for token in ids]
    fields: dict[str, Any] = {"index": draw(st.integers(0, 2)), "delta": draw(_deltas)}
    if draw(st.booleans()):
        fields |= {"token_ids": ids, "logprobs": {"content": entries}}
    if draw(st.integers(0, 9)) == 0:
        fields |= {"finish_reason": "stop", "stop_reason": draw(st.sampled_from([None, 7, "end"]))}
    if draw(st.integers(0, 9)) == 0:
        fields["weight_versions"] = [{"version": draw(st.integers(0, 9)), "start": 0, "end": 1}]
    return fields


_chunks = st.lists(
    st.fixed_dictionaries(
        {"choices": st.lists(_choices(), max_size=3)},
        optional={"usage": st.just({"prompt_tokens": 3, "completion_tokens": 2})},
    ),
    max_size=12,
)


def _deltas_of(chunks: list[dict[str, Any]], cuts: list[int], *, shown: bool) -> list[EngineDelta]:
    """The stream's first chunk has the prompt's ids; its bytes are cut where `cuts` say."""
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2, 3]}
    chunks = [opening, *chunks]
    data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    lines, calls, deltas = SseEvents(), CallsOfChoices(), list[EngineDelta]()
    for start, end in itertools.pairwise(places):
        if events := lines.feed(data[start:end]):
            deltas += engine_deltas(decode_events(events, ShownReply if shown else WireReply, "engine"), calls)
    return deltas


def _folded(deltas: list[EngineDelta]) -> EngineReply:
    folded = ReplyAccumulator()
    for delta in deltas:
        folded.feed(delta)
    return folded.reply()


def _in_order(deltas: list[EngineDelta]) -> dict[int, list[tuple[str, ...]]]:
    """Of each choice: every piece of thinking, text, arguments, log-probs, joined where one kind continues."""
    pieces: dict[int, list[tuple[str, ...]]] = {}
    for shown in (delta.shown for delta in deltas):
        mine = pieces.setdefault(shown.choice_index, [])
        for kind, text in _pieces(shown):
            if mine and mine[-1][0] == kind:
                mine[-1] = (kind, mine[-1][1] + text)
            else:
                mine.append((kind, text))
    return {index: found for index, found in pieces.items() if found}


def _pieces(shown: ReplyDelta) -> list[tuple[str, str]]:
    found = [("thinking", shown.thinking), ("text", shown.text)]
    for call in shown.tool_calls:
        head = f"<{call.call_id}>" if call.call_id is not None else ""
        found.append((f"call {call.index}", head + call.arguments))
    return [(kind, text) for kind, text in found if text]


@given(_chunks, st.lists(st.integers(0, 5000), max_size=8), st.booleans())
def test_the_cuts_of_a_stream_change_nothing(chunks: list[dict[str, Any]], cuts: list[int], shown: bool) -> None:
    whole = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    try:
        one_by_one = _deltas_of(chunks, list(range(len(whole) + 100)), shown=shown)
    except EngineMalformed:  # pieces that could be of two calls
        with pytest.raises(EngineMalformed):
            _deltas_of(chunks, cuts, shown=shown)
        return
    cut = _deltas_of(chunks, cuts, shown=shown)

    assert _in_order(cut) == _in_order(one_by_one)
    a, b = _folded(cut), _folded(one_by_one)
    assert [choice.message for choice in a.choices] == [choice.message for choice in b.choices]
    assert str(a) == str(b)


def test_tokens_of_one_read_are_one_delta_of_each_choice() -> None:
    chunks = [{"choices": [{"index": i, "delta": {"content": w}, "token_ids": [1]}]} for w in "abc" for i in (0, 1)]

    deltas = _deltas_of(chunks, [], shown=False)

    assert deltas[0].prompt_ids is not None
    assert [(delta.shown.choice_index, delta.shown.text, delta.sampled_ids) for delta in deltas] == [
        (0, "abc", [1, 1, 1]),
        (1, "abc", [1, 1, 1]),
    ]


def test_one_event_that_is_no_reply_is_the_engines_fault() -> None:
    with pytest.raises(EngineUnavailable, match="no chat reply"):
        decode_events([b'{"choices": []}', b"<html>"], WireReply, "engine")
