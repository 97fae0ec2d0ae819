"""Turns of a trajectory for graders: the model's message and the results of its tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gangline.domain.conversation import Message, Text, ToolCall, ToolResult
from gangline.domain.trajectory import Trace, Trajectory

ERROR_BEGINNINGS = ("Error", "error:", "Traceback (most recent call last)")
"""Beginnings of tool results that are errors, for dialects that do not mark errors (OpenAI's, Google's)."""


class Turn(NamedTuple):
    """One turn of a trace."""

    completion_id: str
    message: Message
    results: tuple[ToolResult, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.message.parts if isinstance(part, Text))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.message.parts if isinstance(part, ToolCall)]


def turns_of(trace: Trace) -> list[Turn] | None:
    """The turns of a trace in order. None if a client wrote messages in the model's name, so messages cannot be matched
    to turns.
    """
    messages = trace.response_messages
    begins = [at for at, message in enumerate(messages) if message.role == "assistant"]
    if len(begins) != len(trace.spans):
        return None
    ends = [*begins[1:], len(messages)]
    return [
        Turn(span.completion_id, messages[begin], tuple(tool_results(messages[begin + 1 : end])))
        for span, begin, end in zip(trace.spans, begins, ends, strict=True)
    ]


def tool_results(messages: Sequence[Message]) -> Iterator[ToolResult]:
    return (part for message in messages for part in message.parts if isinstance(part, ToolResult))


def is_error(result: ToolResult, beginnings: Sequence[str]) -> bool:
    """Whether the client marked a tool's result as an error, or it begins like one."""
    text = "".join(piece.text for piece in result.content if isinstance(piece, Text))
    return result.is_error or text.lstrip().startswith(tuple(beginnings))


def num_turns(trajectory: Trajectory) -> int:
    return len({span.completion_id for trace in trajectory.traces for span in trace.spans})


def num_sampled_tokens(trajectory: Trajectory) -> int:
    lengths = {span.completion_id: span.end - span.start for trace in trajectory.traces for span in trace.spans}
    return sum(lengths.values())
