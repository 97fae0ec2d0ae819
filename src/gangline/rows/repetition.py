"""Detects loops of an agent: the same actions with the same results over and over, in the conversation that it sends.

A round is one turn of the model and the answer to it. Its actions are the turn's tool calls, and its results are the
results of these calls. An agent that acts in text has turns without calls: then the text is the action and the next
message the result. Two rounds are the same if their tools, arguments (as JSON, ignoring spacing and key order) and
results are; results are compared exactly. Text and thinking next to tool calls do not count.

A cycle of up to `MAX_PERIOD` rounds may repeat as well (A B A B ...). Only the conversation's end is read, and each
call has all of it, so parallel agents in one session do not disturb each other, and a restarted node sees the same. An
agent that leaves earlier rounds out of its calls starts over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from gangline.domain.conversation import Message, Part, Text, Thinking, ToolCall, ToolResult

MAX_PERIOD = 4
"""Longest cycle that is detected, in rounds."""
_MAX_PARSED_CHARS = 1 << 16
"""Longer arguments are compared as text: parsing them would delay the node's other sessions."""


def is_loop(messages: Sequence[Message], num_times: int) -> bool:
    """Whether a conversation ends in the same cycle of rounds `num_times` in a row. `num_times`: at least 2."""
    rounds = list(islice(_rounds(messages), MAX_PERIOD * num_times))
    return any(_repeats(rounds, period, num_times) for period in range(1, MAX_PERIOD + 1))


class _Round(NamedTuple):
    calls: tuple[ToolCall, ...]
    text: str
    """The text of a turn without calls; empty otherwise."""
    results: tuple[object, ...]


def _repeats(rounds: Sequence[_Round], period: int, num_times: int) -> bool:
    num_rounds = period * num_times
    if len(rounds) < num_rounds:
        return False
    return all(_is_same(rounds[index], rounds[index + period]) for index in range(num_rounds - period))


def _rounds(messages: Sequence[Message]) -> Iterator[_Round]:
    """Yields rounds, the latest first. A turn without an answer is not a round."""
    replies: list[Message] = []
    heard: list[Message] = []
    for message in reversed(messages):
        if message.role == "assistant":
            replies.insert(0, message)
            continue
        if replies:
            if heard:
                yield _round(replies, heard)
            replies, heard = [], []
        heard.insert(0, message)
    if replies and heard:
        yield _round(replies, heard)


def _round(replies: Sequence[Message], heard: Sequence[Message]) -> _Round:
    parts = [part for message in replies for part in message.parts]
    answers = [part for message in heard for part in message.parts]
    calls = tuple(part for part in parts if isinstance(part, ToolCall))
    if calls:
        return _Round(calls, "", _results(calls, answers))
    text = "".join(part.text for part in parts if isinstance(part, Text))
    return _Round((), text, tuple(part for part in answers if not isinstance(part, Thinking)))


def _results(calls: Sequence[ToolCall], answers: Sequence[Part]) -> tuple[object, ...]:
    """Returns results in the order of the calls, without their ids, which are new each time."""
    number = {call.call_id: index for index, call in enumerate(calls)}
    found = [(number.get(part.call_id, -1), part) for part in answers if isinstance(part, ToolResult)]
    found.sort(key=lambda pair: pair[0])
    return tuple((index, part.is_error, part.content) for index, part in found)


def _is_same(one: _Round, other: _Round) -> bool:
    return (
        one.text == other.text
        and [call.name for call in one.calls] == [call.name for call in other.calls]
        and one.results == other.results
        and all(_says_same(a.arguments, b.arguments) for a, b in zip(one.calls, other.calls, strict=True))
    )


def _says_same(one: str, other: str) -> bool:
    if one == other or max(len(one), len(other)) > _MAX_PARSED_CHARS:
        return one == other
    return _canonical(one) == _canonical(other)


def _canonical(arguments: str) -> bytes:
    """Arguments that are not JSON are returned unchanged."""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="deterministic")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments.encode("utf-8", "surrogatepass")
