"""Which turn made a call of an environment."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gangline.domain.conversation import Message, ToolCall
from gangline.domain.environment import EnvironmentCall
from gangline.node.environments.session_environments import with_turns
from support.store.completions import completion


def turn(number: int, *calls: tuple[str, Any]) -> Any:
    parts = tuple(
        ToolCall(call_id=f"{number}.{at}", name=name, arguments=given if isinstance(given, str) else json.dumps(given))
        for at, (name, given) in enumerate(calls)
    )
    started = float(number)
    said = Message(role="assistant", parts=parts)
    return msgspec.structs.replace(
        completion(number), completion_id=f"c{number}", response=said, started_at=started, finished_at=started + 0.5
    )


def call(at: float, **arguments: Any) -> EnvironmentCall:
    return EnvironmentCall(
        environment="game",
        tool="step",
        arguments=arguments,
        text="",
        is_error=False,
        reward=1.0,
        done=False,
        began_at=at,
        duration_s=0.1,
    )


def turns(calls: list[EnvironmentCall], completions: list[Any]) -> list[str | None]:
    return [found.completion_id for found in with_turns(calls, completions)]


def test_a_call_is_of_the_turn_that_asked_for_it_by_any_name() -> None:
    asked = [turn(1, ("mcp__game__step", {"a": 1})), turn(2, ("game_step", '{"a" : 2}'))]
    assert turns([call(1.6, a=1), call(2.6, a=2)], asked) == ["c1", "c2"]


def test_parallel_calls_of_one_turn_and_equal_ones_of_two_are_told_apart() -> None:
    asked = [turn(1, ("step", {"a": 1}), ("step", {"a": 1})), turn(2, ("step", {"a": 1}))]
    assert turns([call(1.6, a=1), call(1.7, a=1), call(2.6, a=1)], asked) == ["c1", "c1", "c2"]


def test_a_turn_that_still_streams_can_have_made_a_call_and_a_later_one_cannot() -> None:
    asked = [turn(1, ("step", {"a": 1})), turn(2, ("step", {"a": 1}))]
    assert turns([call(1.2, a=1)], asked) == ["c1"]


def test_a_call_that_no_turn_asked_for_so_is_of_the_last_one_that_had_ended() -> None:
    asked = [turn(1, ("shell", {"command": "play"})), turn(2, ("step", "no JSON"))]
    assert turns([call(0.5, a=9), call(1.8, a=9), call(2.8, a=9)], asked) == [None, "c1", "c2"]
