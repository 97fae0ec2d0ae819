"""A sampled reply for a harness, whole or as a stream of deltas, independent of any provider's format.

It contains token ids only for a client that asks for them: they are captured before. A stream is `ReplyDelta`s, then
the whole `Reply`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gangline.domain.completion import ParseStatus
from gangline.domain.conversation import Message, Text, Thinking, ToolCall, Usage


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token as a client that asked for log-probs sees it."""

    token: str
    logprob: float
    utf8: tuple[int, ...] | None = None
    """Its bytes, if the engine reports them."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens at this position."""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call. Only the first piece has `call_id` and `name`."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


class ReplyDelta(msgspec.Struct, frozen=True, kw_only=True):
    choice_index: int = 0
    thinking: str = ""
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probs of this delta's tokens; empty unless the client asked for them."""

    @property
    def shows_nothing(self) -> bool:
        return not (self.thinking or self.text or self.tool_calls or self.logprobs)


class ReplyChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    finish_reason: str
    stop_reason: str | None = None
    """Stop string or stop id that ended the reply, if the engine reports one."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """None unless the client asked for them."""
    sampled_ids: Sequence[int] | None = None
    """None unless the client asked for them."""
    parse: ParseStatus = "ok"
    """Whether all tool calls in the sampled text could be parsed; the others are part of the message's text."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    reply_id: str
    model: str
    """As the client named it."""
    created_at: int
    """Unix time, UTC, whole seconds."""
    choices: tuple[ReplyChoice, ...]
    usage: Usage
    prompt_ids: Sequence[int] | None = None
    """None unless the client asked for them."""


def whole_delta(index: int, message: Message, logprobs: tuple[TokenLogprob, ...]) -> ReplyDelta:
    """Returns the single delta for a reply that came in one piece."""
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    return ReplyDelta(
        choice_index=index,
        thinking="".join(part.text for part in message.parts if isinstance(part, Thinking)),
        text="".join(part.text for part in message.parts if isinstance(part, Text)),
        tool_calls=tuple(ToolCallDelta(i, part.arguments, part.call_id, part.name) for i, part in enumerate(calls)),
        logprobs=logprobs,
    )
