"""Loops of an agent, found at the end of any conversation: never in one that continues, always in one that repeats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.conversation import Message, Text, Thinking, ToolCall, ToolResult
from gangline.rows.repetition import MAX_PERIOD, is_loop
from support.engines.conversations import result, said, system, user

few = settings(max_examples=150, deadline=None)
_json = st.dictionaries(st.text(max_size=4), st.integers(-5, 5) | st.text(max_size=4) | st.booleans(), max_size=3)
Round = tuple[str, dict[str, Any], str]
"""Tool, arguments, result."""
_rounds = st.tuples(st.sampled_from(["run", "look"]), _json, st.sampled_from(["ok", "error", ""]))


def _call_id(number: int) -> str:
    return f"call_{number}"


def conversation(rounds: list[Round], *, noise: bool = False) -> list[Message]:
    """Ids are new in each round. `noise`: text, thinking and the arguments' spelling differ in each."""
    messages = [system("You are an agent."), user("Do it.")]
    for number, (tool, arguments, output) in enumerate(rounds):
        keys = list(arguments)[:: -1 if noise and number % 2 else 1]
        text = json.dumps({key: arguments[key] for key in keys}, indent=number if noise else None)
        beside = (f"Try {number}", f"Thought {number}") if noise else ("", "")
        messages += [
            said(beside[0], ToolCall(_call_id(number), tool, text), thinking=beside[1]),
            result(_call_id(number), output),
        ]
    return messages


def _tail_repeats(rounds: list[Any], num_times: int) -> bool:
    """The same, said in the plainest way."""
    return any(
        len(rounds) >= period * num_times and rounds[-period * num_times :] == rounds[-period:] * num_times
        for period in range(1, MAX_PERIOD + 1)
    )


@few
@given(st.lists(_rounds, max_size=12), st.integers(2, 4), st.booleans())
def test_it_agrees_with_a_comparison_of_whole_rounds(rounds: list[Round], num_times: int, noise: bool) -> None:
    keys = [(tool, json.dumps(arguments, sort_keys=True), output) for tool, arguments, output in rounds]
    assert is_loop(conversation(rounds, noise=noise), num_times) == _tail_repeats(keys, num_times)


@few
@given(
    st.lists(_rounds, max_size=4),
    st.lists(_rounds, min_size=1, max_size=MAX_PERIOD),
    st.integers(2, 5),
    st.booleans(),
)
def test_any_short_cycle_is_found_whatever_came_before_it(
    before: list[Round], cycle: list[Round], num_times: int, noise: bool
) -> None:
    assert is_loop(conversation(before + cycle * num_times, noise=noise), num_times)


@few
@given(st.lists(_rounds, min_size=2, max_size=4), st.integers(2, 4))
def test_one_other_result_at_the_end_breaks_it(before: list[Round], num_times: int) -> None:
    same = [before[0]] * num_times
    assert is_loop(conversation(same), num_times)
    assert not is_loop(conversation([*same, ("run", {}, "something new")]), num_times)


def test_a_cycle_longer_than_the_longest_is_none() -> None:
    cycle: list[Round] = [("run", {"n": n}, "ok") for n in range(MAX_PERIOD + 1)]
    assert not is_loop(conversation(cycle * 5), 2)


def test_a_call_that_nobody_has_answered_is_no_round() -> None:
    messages = conversation([("run", {}, "ok")] * 2)
    assert is_loop(messages, 2)
    assert not is_loop([*messages[:-1]], 2)
    assert is_loop([*messages, said("And I think")], 2), "the beginning of a reply, given by the client"


def test_parallel_calls_are_one_round_whose_results_come_in_any_order() -> None:
    def turn(number: int, *, swapped: bool) -> list[Message]:
        ids = [f"{number}a", f"{number}b"]
        results = [result(ids[0], "1"), result(ids[1], "2")]
        calls = [ToolCall(one, "run", f'{{"n": "{one[1]}"}}') for one in ids]
        return [said("", *calls), *(results[::-1] if swapped else results)]

    assert is_loop([user("go"), *turn(1, swapped=False), *turn(2, swapped=True)], 2)
    crossed = [
        said("", ToolCall("x", "run", '{"n": "a"}'), ToolCall("y", "run", '{"n": "b"}')),
        result("x", "2"),
        result("y", "1"),
    ]
    assert not is_loop([user("go"), *turn(1, swapped=False), *crossed], 2)


def test_an_agent_that_acts_in_text_is_seen_by_its_text_and_the_next_message() -> None:
    shown = [said("ls", thinking="one"), user("a.txt"), said("ls", thinking="two"), user("a.txt")]
    assert is_loop([user("go"), *shown], 2)
    assert not is_loop([user("go"), *shown[:-1], user("b.txt")], 2)


def test_a_users_words_beside_results_do_not_count() -> None:
    rounds = conversation([("run", {}, "ok")] * 3)
    reminded = [piece for i, one in enumerate(rounds) for piece in ((one, user(f"{i}")) if i % 2 else (one,))]
    assert is_loop(reminded, 3)


@pytest.mark.parametrize("arguments", ["not json", "[" * 100_000, "\ud800", '{"n": 1e999}', ""])
def test_arguments_that_are_no_json_are_compared_as_text(arguments: str) -> None:
    def turn(text: str) -> list[Message]:
        return [said("", ToolCall("x", "run", text)), result("x", "ok")]

    assert is_loop([*turn(arguments), *turn(arguments)], 2)
    assert not is_loop([*turn(arguments), *turn(arguments + " !")], 2)


def test_numbers_of_another_kind_and_errors_are_not_the_same() -> None:
    def turn(text: str, *, is_error: bool = False) -> list[Message]:
        answer = ToolResult("x", (Text("ok"),), is_error=is_error)
        return [Message("assistant", (Thinking("Hm."), ToolCall("x", "run", text))), Message("tool", (answer,))]

    assert not is_loop([*turn('{"n": 1}'), *turn('{"n": true}')], 2)
    assert not is_loop([*turn('{"n": 1}'), *turn('{"n": 1}', is_error=True)], 2)
