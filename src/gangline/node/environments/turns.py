"""Which turn of the model made a call of an environment.

A harness gives a tool a name of its own (`mcp__game__step`, `game__step`), and calls it after the turn that asked for
it. So a call is of the latest turn, begun before, that has a call of the tool with the same arguments which no earlier
call took. Where none has, it is of the last turn that had ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.conversation import ToolCall
from gangline.domain.environment import EnvironmentCall

__all__ = ["with_turns"]


def with_turns(calls: Iterable[EnvironmentCall], completions: Sequence[Completion]) -> list[EnvironmentCall]:
    """The calls with their turns. completions: in commit order."""
    asked = [(completion, _asked(completion)) for completion in completions]
    found: list[EnvironmentCall] = []
    for call in calls:
        turn = _turn_of(call, asked)
        found.append(msgspec.structs.replace(call, completion_id=None if turn is None else turn.completion_id))
    return found


def _turn_of(
    call: EnvironmentCall, asked: Sequence[tuple[Completion, list[tuple[str, Mapping[str, Any]]]]]
) -> Completion | None:
    """Takes the tool call that it finds out of `asked`."""
    for completion, tool_calls in reversed(asked):
        if completion.started_at > call.began_at:
            continue
        for tool_call in tool_calls:
            name, arguments = tool_call
            if name.endswith(call.tool) and arguments == call.arguments:
                tool_calls.remove(tool_call)
                return completion
    ended = [completion for completion, _ in asked if completion.finished_at <= call.began_at]
    return max(ended, key=lambda completion: completion.finished_at, default=None)


def _asked(completion: Completion) -> list[tuple[str, Mapping[str, Any]]]:
    return [(part.name, _arguments(part.arguments)) for part in completion.response.parts if isinstance(part, ToolCall)]


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
