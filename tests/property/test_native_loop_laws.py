"""Whatever a model answers, the loop ends, its conversation is well formed, and no message is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.agents.harnesses.native.model import CalledTool, Message, ModelReply
from support.node.native_agents import Conversed, FailingTool, SayTool, conversed, said

_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_arguments = (
    st.just('{"text": "x"}')
    | _json.map(json.dumps)
    | st.dictionaries(st.sampled_from(["text", "times", "?"]), _json, max_size=3).map(json.dumps)
    | st.text(max_size=8)
)
_calls = st.builds(
    CalledTool,
    st.text(max_size=1) | st.uuids().map(str),
    st.sampled_from(["echo", "fail", "submit", "fly", ""]),
    _arguments,
)


@st.composite
def _replies(draw: st.DrawFn) -> ModelReply:
    calls = draw(st.lists(_calls, max_size=3))
    return said(draw(st.text(max_size=5)), *calls, cut_off=draw(st.booleans()), unread=draw(st.booleans()))


def _end(replies: list[ModelReply], finish: Literal["answer", "submit"], max_reminders: int) -> Conversed:
    tools = [FailingTool(), SubmitAnything()] if finish == "submit" else [FailingTool()]
    return asyncio.run(conversed(replies, tools, finish=finish, max_reminders=max_reminders))


class SubmitAnything(SayTool):
    """Submits whatever it is given."""

    async def run(self, arguments: Any, context: Any) -> Any:
        return await super().run({"text": json.dumps(arguments["text"])}, context)


def _check_form(messages: list[Message], replies: list[ModelReply]) -> None:
    """Each reply as it came, its calls answered once and in order, and at most one report."""
    rest = messages[1:]
    for reply in replies:
        assert rest.pop(0) == reply.message
        for call in reply.calls:
            result = rest.pop(0)
            assert (result["role"], result["tool_call_id"]) == ("tool", call.call_id)
            assert result["content"]
        if rest and rest[0]["role"] == "user":
            assert rest.pop(0)["content"]
    assert not rest


@settings(max_examples=150)
@given(st.lists(_replies(), min_size=1, max_size=8), st.sampled_from(["answer", "submit"]), st.integers(0, 3))
def test_every_conversation_is_well_formed_and_ends(
    replies: list[ModelReply], finish: Literal["answer", "submit"], max_reminders: int
) -> None:
    ended = _end(replies, finish, max_reminders)
    assert (ended.answer is None) != (ended.error is None)
    for number, sent in enumerate(ended.sent):
        _check_form(sent, replies[:number])
        assert sent[: len(ended.sent[number - 1])] == ended.sent[number - 1] or number == 0


@settings(max_examples=60)
@given(_replies(), st.sampled_from(["answer", "submit"]), st.integers(0, 4))
def test_a_model_that_only_repeats_a_turn_in_vain_is_given_up(
    reply: ModelReply, finish: Literal["answer", "submit"], max_reminders: int
) -> None:
    """Each repetition of a turn with calls reuses their ids, so nothing is done after the first."""
    ended = _end([reply] * 20, finish, max_reminders)
    assert ended.error is None or "403" not in ended.error
    assert len(ended.sent) <= max_reminders + 2
