"""Whatever a client makes of a conversation: the expected parent, relation and cause; and what a session stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.completion import Completion, Lineage
from gangline.domain.conversation import Message, Part, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.tokens import encode_msgpack
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.lineage import assign_roles
from support.engines.conversations import Talk, restored, result, said, system, user
from support.strategies import Sample, completion_trees

few = settings(max_examples=120, deadline=None)

TOOLS = (ToolDefinition("run", parameters={"type": "object"}), ToolDefinition("look"))
SYSTEM = system("You are an agent. The time is 2026-11-21 10:00:00.")

_words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
_json = st.dictionaries(
    _words, _words | st.integers(-5, 5) | st.floats(-2, 2) | st.none() | st.lists(_words), max_size=3
)


@st.composite
def _replies(draw: st.DrawFn, number: int) -> Message:
    """Never two of one meaning in a conversation; with thinking, text alongside calls, one call or several."""
    text = f"Reply number {number} of so many: {draw(_words)}"
    calls = [
        ToolCall(f"call_{number}_{i}", draw(st.sampled_from(["run", "look"])), json.dumps(draw(_json)))
        for i in range(draw(st.integers(0, 2)))
    ]
    return said(text + draw(st.sampled_from(["", " ", "\n\n"])), *calls, thinking=draw(_words))


def _asked_after(reply: Message, number: int) -> list[Message]:
    """Results of the calls, or a user's turn."""
    calls = [part for part in reply.parts if isinstance(part, ToolCall)]
    return [result(call.call_id, f"output of {number}") for call in calls] or [user(f"question {number}")]


@st.composite
def _conversations(draw: st.DrawFn, min_turns: int = 1) -> tuple[Talk, list[Message]]:
    """Turns that were answered, and the request that would come next, to the letter."""
    talk, history = Talk(), [SYSTEM, user("question")]
    for number in range(draw(st.integers(min_turns, 6))):
        reply = draw(_replies(number))
        talk.turn(history, reply, tools=TOOLS)
        history += [reply, *_asked_after(reply, number)]
    return talk, history


# -- what clients do to an echo ------------------------------------------------------------------------------------


def _verbatim(message: Message) -> Message:
    return message


def _without_thinking(message: Message) -> Message:
    return _kept(message, lambda part: not isinstance(part, Thinking))


def _without_text_beside_calls(message: Message) -> Message:
    has_calls = any(isinstance(part, ToolCall) for part in message.parts)
    return _kept(message, lambda part: not (has_calls and isinstance(part, Text)))


def _kept(message: Message, keep: Callable[[Part], bool]) -> Message:
    return Message(message.role, tuple(part for part in message.parts if keep(part)))


def _json_again(message: Message) -> Message:
    """As JavaScript would write it, other order."""
    return _mapped(message, ToolCall, lambda p: ToolCall(p.call_id, p.name, _javascript(json.loads(p.arguments))))


def _javascript(values: dict[str, Any]) -> str:
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in reversed(values.items())}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False)


def _trimmed(message: Message) -> Message:
    return _mapped(message, Text, lambda part: Text(part.text.strip()))


def _ids_renamed(message: Message) -> Message:
    return _mapped(message, ToolCall, lambda part: ToolCall("x" + part.call_id, part.name, part.arguments))


def _mapped(message: Message, kind: Any, change: Callable[[Any], Part]) -> Message:
    return Message(message.role, tuple(change(part) if isinstance(part, kind) else part for part in message.parts))


ECHOES = [_verbatim, _without_thinking, _without_text_beside_calls, _json_again, _trimmed]
"""Any of these at once; ids renamed alongside lost text leave nothing to tell a turn by."""


def _echoed(history: list[Message], echoes: list[Callable[[Message], Message]]) -> list[Message]:
    told: list[Message] = []
    for message in history:
        for echo in echoes if message.role == "assistant" else ():
            message = echo(message)
        told.append(message)
    return told


_behaviours = st.lists(st.sampled_from(ECHOES), unique=True, max_size=4) | st.just([_ids_renamed, _without_thinking])


def _lineage(talk: Talk, history: list[Message], **fields: Any) -> tuple[str | None, Lineage]:
    """Of the next call, and the same after a restart."""
    again = restored(talk.tree)
    told = [one.turn(history, said("The last."), **({"tools": TOOLS} | fields)) for one in (talk, again)]
    assert (told[0].parent_id, told[0].lineage) == (told[1].parent_id, told[1].lineage)
    return told[0].parent_id, told[0].lineage


def _last(talk: Talk) -> Completion:
    return list(talk.tree)[-1]


@few
@given(conversation=_conversations(), echoes=_behaviours)
def test_an_echo_in_any_form_continues_the_last_turn(conversation: Any, echoes: Any) -> None:
    talk, history = conversation
    last = _last(talk).completion_id
    later = system("You are an agent. The time is 2026-11-22 23:59:59.")
    told = [later, *_echoed(history[1:], echoes)]
    place = talk.ask(*told, tools=TOOLS).place
    assert place.pinned == ((0, SYSTEM),)
    assert len(place.new_messages) == len(history) - place.num_shared < 3
    assert _lineage(talk, told) == (last, Lineage(relation="continuation", origin_id=last))


@few
@given(conversation=_conversations(min_turns=2), echoes=_behaviours, data=st.data())
def test_an_edit_anywhere_names_the_last_turn_and_keeps_what_stands_before_it(
    conversation: Any, echoes: Any, data: st.DataObject
) -> None:
    talk, history = conversation
    last = max(place for place, message in enumerate(history) if message.role == "assistant")
    edited = data.draw(st.integers(1, last))
    told = _echoed(history, echoes)
    told[edited] = _edited(told[edited])
    before = [place for place in range(edited) if history[place].role == "assistant"]
    parent = list(talk.tree)[len(before) - 1].completion_id if before else None
    origin = _last(talk).completion_id
    assert _lineage(talk, told) == (
        parent,
        Lineage(relation="changed", origin_id=origin, cause="history_edited", first_change=edited),
    )


def _edited(message: Message) -> Message:
    if message.role == "assistant":
        return said("Rewritten by the harness.")
    if isinstance(message.parts[0], ToolResult):
        return result(message.parts[0].call_id, "(output removed)")
    return user("another question")


@few
@given(
    conversation=_conversations(), echoes=_behaviours, change=st.sampled_from(["tools", "system", "model", "template"])
)
def test_a_change_before_the_messages_is_told_as_what_it_is(conversation: Any, echoes: Any, change: str) -> None:
    talk, history = conversation
    last = _last(talk).completion_id
    told = _echoed(history, echoes)
    fields: dict[str, Any] = {
        "tools": {"tools": TOOLS[:1]},
        "model": {"model": "other"},
        "template": {"template_kwargs": {"enable_thinking": False}},
        "system": {},
    }[change]
    if change == "system":
        told[0] = system("You are a poet.")
    cause: Any = f"{change}_changed"
    expected = Lineage(relation="changed", origin_id=last, cause=cause, first_change=0 if change == "system" else None)
    assert _lineage(talk, told, **fields) == (None, expected)


@few
@given(conversation=_conversations(min_turns=2), echoes=_behaviours, data=st.data())
def test_another_question_in_the_middle_is_a_branch(conversation: Any, echoes: Any, data: st.DataObject) -> None:
    talk, history = conversation
    turns = [place for place, message in enumerate(history) if message.role == "assistant"]
    number = data.draw(st.integers(0, len(turns) - 2))
    parent = list(talk.tree)[number].completion_id
    told = _echoed([*history[: turns[number] + 1], user("something else")], echoes)
    assert _lineage(talk, told) == (parent, Lineage(relation="branch", origin_id=parent))


@few
@given(conversation=_conversations(), echoes=_behaviours, aborted=st.booleans())
def test_a_prompt_asked_twice_is_a_sibling_or_after_an_abort_a_retry(
    conversation: Any, echoes: Any, aborted: bool
) -> None:
    talk, history = conversation
    parent = _last(talk).completion_id
    first = talk.answer(talk.ask(*history, tools=TOOLS), said("x"), status="aborted" if aborted else "complete")
    relation: Any = "retry" if aborted else "sibling"
    assert _lineage(talk, _echoed(history, echoes)) == (
        parent,
        Lineage(relation=relation, origin_id=first[0].completion_id),
    )


@settings(max_examples=15, deadline=None)
@given(num_turns=st.integers(20, 60), output=st.integers(0, 400), in_parallel=st.booleans())
def test_a_session_stores_only_what_each_call_adds(num_turns: int, output: int, in_parallel: bool) -> None:
    """Every call after the first costs the same bytes, however long its history is."""
    talk, history = Talk(), [SYSTEM, user("question")]
    tools = tuple(ToolDefinition(f"tool_{n}", "what it does " * 40, {"type": "object"}) for n in range(20))
    for number in range(num_turns):
        reply = said(f"Reply {number:03}.", ToolCall(f"call_{number:03}", "run", '{"command": "ls -la"}'))
        asked = [talk.ask(*history, tools=tools) for _ in range(2 if in_parallel else 1)]
        for one in asked:
            talk.answer(one, reply)
        history += [reply, result(f"call_{number:03}", "line of output\n" * output)]
    sizes = [len(encode_msgpack(completion)) for completion in talk.tree]
    assert max(sizes[2:]) <= min(sizes[2:]) + 8
    assert max(sizes[2:]) < 1_500 + 15 * output
    assert [talk.tree.tools(one) for one in talk.tree] == [tools] * len(sizes)
    assert list(talk.tree.messages(_last(talk))) == history[:-2]


def test_a_call_that_fails_upstream_leaves_nothing_behind() -> None:
    talk = Talk()
    talk.ask(SYSTEM, user("question"))
    assert len(talk.tree) == 0
    assert talk.turn((SYSTEM, user("question")), said("yes")).lineage == Lineage()


@few
@given(sample=completion_trees(), roles=st.sets(st.sampled_from(["main", "sub_agent", "side", "compaction"])))
def test_roles_choose_what_is_trained_on_and_nothing_else(sample: Sample, roles: set[Any]) -> None:
    told = assign_roles(sample.tree)
    assert list(told) == [one.completion_id for one in sample.tree]
    assert any(one.role == "main" for one in told.values()) == (len(sample.tree) > 0)
    every, some = (
        PrefixMergingBuilder(PrefixMergingConfig(roles=chosen)).build(sample.tree, session_id="s", task_id="t")
        for chosen in (None, tuple(sorted(roles)))
    )
    assert audit(some, sample.tree).violations == ()
    for whole, chosen in zip(every.traces, some.traces, strict=True):
        assert chosen.response_ids.tolist() == whole.response_ids.tolist()
        assert chosen.role == chosen.spans[0].role
        for span in chosen.spans:
            assert span.role == told[span.completion_id].role
            turn = slice(span.start, span.end)
            expected = whole.loss_mask[turn] if span.role in roles else whole.loss_mask[turn] * 0
            assert chosen.loss_mask[turn].tolist() == expected.tolist()
