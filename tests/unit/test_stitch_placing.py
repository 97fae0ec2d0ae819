"""Where a call belongs: which echoes are the turn that was sampled, and which are not."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.tokens import logprobs, token_ids
from gangline.node.capture.placing import PlaceIndex

USER = Message("user", (Text("hello"),))
MORE = Message("user", (Text("more"),))


def _assistant(*parts: Part) -> Message:
    return Message("assistant", parts)


def _call(*messages: Message, **fields: Any) -> ModelCall:
    return ModelCall(**({"dialect": "openai_chat", "model": "m", "messages": messages} | fields))


class _Index(PlaceIndex):
    """With its own tree, as a ledger has."""

    def __init__(self, **options: Any) -> None:
        self.tree = CompletionTree()
        super().__init__(self.tree, **options)


def _answered(index: _Index, call: ModelCall, response: Message, completion_id: str) -> Completion:
    place = index.place(call)
    completion = Completion(
        completion_id=completion_id,
        session_id="s",
        attempt=1,
        status="complete",
        parent_id=place.parent_id,
        branch_key=place.branch_key,
        dialect="openai_chat",
        model="m",
        prompt_shared=0,
        prompt_suffix_ids=token_ids(),
        sampled_ids=token_ids([1]),
        logprobs=logprobs([-1.0]),
        messages_shared=place.num_shared,
        new_messages=place.new_messages,
        response=response,
        certificate=Certificate(prompt_source="engine", context="first", logprobs="raw", finish_reason="stop"),
        started_at=0.0,
        finished_at=0.0,
    )
    index.tree.add(completion)
    index.add(completion, place.digest)
    return completion


RESPONSE = _assistant(Thinking("hm"), Text("Let me see.\n"), ToolCall("call_k", "run", '{"command": "ls",  "n": 1.0}'))


@pytest.mark.parametrize(
    "echo",
    [
        RESPONSE,
        _assistant(Text("Let me see."), ToolCall("call_k", "run", '{"n":1,"command":"ls"}')),
        _assistant(Thinking("other"), Text("Let  me\nsee."), ToolCall("renamed", "run", '{"command":"ls","n":1}')),
        _assistant(ToolCall("call_k", "run", '{"command":"ls","n":1}')),
        _assistant(Text("Let me "), Text("see."), ToolCall("call_k", "run", '{"command": "\\u006cs", "n": 1}')),
    ],
)
def test_an_echo_of_the_same_meaning_is_the_sampled_turn(echo: Message) -> None:
    index = _Index()
    _answered(index, _call(USER), RESPONSE, "c1")
    place = index.place(_call(USER, echo, MORE))
    assert (place.parent_id, place.num_shared, place.new_messages) == ("c1", 2, (MORE,))


@pytest.mark.parametrize(
    "echo",
    [
        _assistant(Text("Let me look."), ToolCall("call_k", "run", '{"command":"ls","n":1}')),
        _assistant(Text("Let me see."), ToolCall("call_k", "run", '{"command":"rm","n":1}')),
        _assistant(Text("Let me see."), ToolCall("call_k", "walk", '{"command":"ls","n":1}')),
        _assistant(Text("Let me see.")),
        _assistant(ToolCall("unknown", "run", '{"command":"ls","n":1}')),
    ],
)
def test_an_edited_turn_was_never_sampled(echo: Message) -> None:
    index = _Index()
    _answered(index, _call(USER), RESPONSE, "c1")
    assert index.place(_call(USER, echo, MORE)).parent_id is None


@pytest.mark.parametrize("sampled", ['{"command": "ls', '{"command": }', "ls", '["ls"]', '"ls"', "null"])
def test_arguments_that_were_no_object_may_come_back_as_an_empty_one(sampled: str) -> None:
    index = _Index()
    calls = (ToolCall("call_a", "run", '{"command": "ls"}'), ToolCall("call_b", "run", sampled))
    _answered(index, _call(USER), _assistant(Thinking("hm"), Text("Look."), *calls), "c1")
    for text in ((Text("Look."),), ()):
        assert (
            index.place(_call(USER, _assistant(*text, *_emptied(*calls[1:], first=calls[0])), MORE)).parent_id == "c1"
        )
    for edited in (
        _assistant(Text("Look!"), *_emptied(*calls[1:], first=calls[0])),
        _assistant(Text("Look."), *_emptied(*calls)),
        _assistant(Text("Look."), *_emptied(*calls[1:])),
        _assistant(Text("Look."), calls[0], ToolCall("of nobody", "run", "{}")),
        _assistant(Text("Look."), calls[0], ToolCall("call_b", "walk", "{}")),
    ):
        assert index.place(_call(USER, edited, MORE)).parent_id is None


def _emptied(*calls: ToolCall, first: ToolCall | None = None) -> tuple[ToolCall, ...]:
    return (*([first] if first else []), *(ToolCall(call.call_id, call.name, "{}") for call in calls))


@pytest.mark.parametrize(("num_chars", "parent_id"), [(10_000, "c1"), (100_000, None)])
def test_a_very_long_turn_is_known_by_its_whole_meaning_only(num_chars: int, parent_id: str | None) -> None:
    call = ToolCall("call_k", "run", msgspec.json.encode({"command": "x" * num_chars}).decode())
    index = _Index()
    _answered(index, _call(USER), _assistant(Text("Look."), call), "c1")
    assert index.place(_call(USER, _assistant(Text("Look."), call), MORE)).parent_id == "c1"
    assert index.place(_call(USER, _assistant(call), MORE)).parent_id == parent_id


def test_an_edited_history_before_the_turn_is_another_branch() -> None:
    index = _Index()
    _answered(index, _call(USER), RESPONSE, "c1")
    assert index.place(_call(Message("user", (Text("hallo"),)), RESPONSE, MORE)).parent_id is None


@pytest.mark.parametrize(
    "fields", [{"tools": (ToolDefinition("f"),)}, {"model": "n"}, {"template_kwargs": {"enable_thinking": False}}]
)
def test_tools_model_and_template_arguments_are_part_of_the_branch(fields: dict[str, Any]) -> None:
    index = _Index()
    _answered(index, _call(USER), RESPONSE, "c1")
    assert index.place(_call(USER, RESPONSE, MORE, **fields)).parent_id is None


def test_the_deepest_match_wins_and_an_edit_after_it_is_new() -> None:
    index = _Index()
    result = Message("tool", (ToolResult("call_k", (Text("out"),)),))
    _answered(index, _call(USER), RESPONSE, "c1")
    _answered(index, _call(USER, RESPONSE, result), _assistant(Text("ok")), "c2")
    ok = _assistant(Text("ok"))
    assert index.place(_call(USER, RESPONSE, result, ok, MORE)).parent_id == "c2"
    shortened = Message("tool", (ToolResult("call_k", (Text("..."),)),))
    place = index.place(_call(USER, RESPONSE, shortened, ok, MORE))
    assert (place.parent_id, place.new_messages) == ("c1", (shortened, ok, MORE))


def test_between_equal_histories_the_record_key_decides_also_further_up() -> None:
    index = _Index()
    other = _assistant(*RESPONSE.parts[:2], ToolCall("call_j", "run", '{"command": "ls", "n": 1}'))
    result = Message("tool", (ToolResult("x", (Text("out"),)),))
    ok = _assistant(Text("ok"))
    for response, first, second in ((RESPONSE, "c1", "c2"), (other, "c3", "c4")):
        _answered(index, _call(USER), response, first)
        _answered(index, _call(USER, response, result), ok, second)
    assert index.place(_call(USER, RESPONSE, result)).parent_id == "c1"
    assert index.place(_call(USER, other, result)).parent_id == "c3"
    assert index.place(_call(USER, RESPONSE, result, ok, MORE)).parent_id == "c2"
    assert index.place(_call(USER, other, result, ok, MORE)).parent_id == "c4"


def test_between_equal_histories_without_keys_the_exact_echo_wins_then_the_latest() -> None:
    index = _Index()
    for number, thought in enumerate(("a", "b", "c"), start=1):
        _answered(index, _call(USER), _assistant(Thinking(thought), Text("ok")), f"c{number}")
    assert index.place(_call(USER, _assistant(Thinking("b"), Text("ok")), MORE)).parent_id == "c2"
    assert index.place(_call(USER, _assistant(Text("ok")), MORE)).parent_id == "c3"


def _long_session(num_turns: int) -> tuple[_Index, list[Completion], ModelCall]:
    index, completions = _Index(), list[Completion]()
    messages: tuple[Message, ...] = (USER,)
    for turn in range(num_turns):
        response = _assistant(Text(f"turn {turn} " * 40), ToolCall(f"call_{turn}", "run", '{"command": "ls -la"}'))
        completions.append(_answered(index, _call(*messages), response, f"c{turn}"))
        messages += (response, Message("tool", (ToolResult(f"call_{turn}", (Text("line of output\n" * 60),)),)))
    return index, completions, _call(*messages)


def test_a_restored_index_places_as_the_one_that_was_lost() -> None:
    index, completions, call = _long_session(12)
    tree = CompletionTree(completions)
    restored = PlaceIndex(tree)
    for completion in completions:
        restored.restore(completion)
    assert restored.place(call) == index.place(call)
    assert restored.place(call).parent_id == "c11"


async def test_a_long_history_is_placed_in_turns_as_at_once() -> None:
    index, _, call = _long_session(300)
    at_once = index.place(call)
    again, _, _ = _long_session(300)
    known: list[Message] = []

    def remember(message: Message) -> None:
        known.append(message)

    assert await again.place_in_turns(_call(*call.messages, MORE), remember) == index.place(_call(*call.messages, MORE))
    assert (at_once.parent_id, len(call.messages)) == ("c299", 601)
    assert MORE in known


def test_a_signature_with_our_record_key_tells_equal_turns_apart() -> None:
    index = _Index()
    same = _assistant(Thinking("hm"), Text("yes"))
    for completion_id, reply_id in (("c1", "aa11"), ("c2", "bb22")):
        call = _call(USER)
        place = index.place(call)
        completion = _answered(index, call, same, completion_id)
        index.add(msgspec.structs.replace(completion, metadata={"reply_id": reply_id}), place.digest)
    for encode in (lambda key: base64.b64encode(key.encode()).decode(), str):
        signed = _assistant(Thinking("hm", encode("gangline:aa11")), Text("yes"))
        assert index.place(_call(USER, signed, MORE)).parent_id == "c1"
    assert index.place(_call(USER, same, MORE)).parent_id == "c2"
    foreign = _assistant(Thinking("hm", "EqQBCkYIBxgCIkD/+w=="), Text("yes"))
    assert index.place(_call(USER, foreign, MORE)).parent_id == "c2"


def test_conversations_that_take_turns_are_placed_as_if_each_were_alone() -> None:
    together, alone = _Index(), [_Index() for _ in range(5)]
    histories: list[tuple[Message, ...]] = [(Message("user", (Text(f"task {number}"),)),) for number in range(5)]
    for turn in range(6):
        for number, history in enumerate(histories):
            # An edited history in between: what was digested before must not be taken for it.
            edited = (Message("user", (Text(f"task {number}!"),)), *history[1:])
            assert together.place(_call(*edited)).parent_id is None
            place, reference = together.place(_call(*history)), alone[number].place(_call(*history))
            assert place == reference
            response = _assistant(Text(f"answer {turn} of {number}"))
            for index in (together, alone[number]):
                _answered(index, _call(*history), response, f"c{number}-{turn}")
            histories[number] = (*history, response, Message("user", (Text(f"and {turn}?"),)))
    assert together.place(_call(*histories[3])).parent_id == "c3-5"
