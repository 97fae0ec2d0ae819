"""Anthropic Messages: the event grammar of a streamed reply.

    message_start, (content_block_start, content_block_delta*, content_block_stop)*, message_delta, message_stop

Laws
- Blocks are numbered from 0 and never overlap: a block of another kind closes the open one. Text after the first tool
  call is held back until the calls have been sent; so are interleaved calls.
- A tool call's block starts with its first piece; its input is sent in one delta, once complete. The provider does the
  same unless asked for eager streaming. It allows sending valid JSON even if the model's was not.
- Thinking gets its signature before its block stops. An empty reply is one empty text block.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gangline.domain.conversation import ModelCall, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply, ReplyDelta, ToolCallDelta
from gangline.wire.dialects.anthropic.errors import messages_error
from gangline.wire.dialects.anthropic.reply import (
    CONSTANT_FIELDS,
    input_json,
    is_whole_object,
    message_fields,
    signature_of,
    stop_fields,
    usage_fields,
)

Said = Literal["thinking", "text"]

_PIECES_PER_PING = 64
"""While a call's input is held back, a ping is sent for every so many pieces of it."""


class _HeldCall(msgspec.Struct):
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class AnthropicEventWriter:
    """Writes one stream. Call `start`, deltas, then `finish` or `error`, once."""

    media_type = "text/event-stream"

    def __init__(self, call: ModelCall, *, reply_id: str, model: str) -> None:
        self._call = call
        self._reply_id = reply_id
        self._model = model
        self._num_blocks = 0
        self._open: Said | Literal["tool_use"] | None = None
        self._calls: dict[int, _HeldCall] = {}
        self._num_calls_out = 0
        """Calls `[0, this)` have been sent completely; the block of the next one may be open."""
        self._num_pieces = 0
        self._late: list[tuple[Said, str]] = []

    def start(self, num_prompt_tokens: int) -> bytes:
        usage = usage_fields(Usage(num_prompt_tokens=num_prompt_tokens, num_sampled_tokens=0))
        message = message_fields(self._reply_id, self._model) | {"usage": usage}
        return _event("message_start", {"message": message})

    def keep_alive(self) -> bytes:
        return _event("ping", {})

    def delta(self, delta: ReplyDelta) -> bytes:
        events = self._say("thinking", delta.thinking) + self._say("text", delta.text)
        return events + b"".join(self._tool_piece(piece) for piece in delta.tool_calls)

    def finish(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        events = b"" if self._num_blocks or self._calls else self._whole(reply)
        for index in sorted(self._calls)[self._num_calls_out :]:
            events += self._end_call(self._calls[index])
        late, self._late = self._late, []
        self._calls = {}
        events += b"".join(self._say(kind, text) for kind, text in late)
        if not self._num_blocks:
            events += self._begin("text", _empty("text"))
        events += self._close()
        events += _event(
            "message_delta", {"delta": stop_fields(self._call, choice), "usage": usage_fields(reply.usage)}
        )
        return events + _event("message_stop", {})

    @property
    def error_stands_alone(self) -> bool:
        return False

    def error(self, error: GanglineError) -> bytes:
        return b"event: error\ndata: " + messages_error(error).body + b"\n\n"

    def _whole(self, reply: Reply) -> bytes:
        """A reply of which no delta was sent."""
        events, num_calls = b"", 0
        for part in reply.choices[0].message.parts:
            match part:
                case Thinking():
                    events += self._say("thinking", part.text)
                case Text():
                    events += self._say("text", part.text)
                case ToolCall():
                    events += self._tool_piece(ToolCallDelta(num_calls, part.arguments, part.call_id, part.name))
                    num_calls += 1
                case _:
                    raise AssertionError(f"a model does not reply with {type(part).__name__}")
        return events

    # -- text and thinking ---------------------------------------------------------------------------------------

    def _say(self, kind: Said, text: str) -> bytes:
        if not text:
            return b""
        if self._calls:
            self._late.append((kind, text))
            return b""
        events = b"" if self._open == kind else self._close() + self._begin(kind, _empty(kind))
        return events + self._block_delta({"type": f"{kind}_delta", kind: text})

    # -- tool calls ----------------------------------------------------------------------------------------------

    def _tool_piece(self, piece: ToolCallDelta) -> bytes:
        held = self._calls.setdefault(piece.index, _HeldCall())
        held.call_id, held.name = piece.call_id or held.call_id, piece.name or held.name
        held.arguments += piece.arguments
        self._num_pieces += 1
        ping = self.keep_alive() if self._num_pieces % _PIECES_PER_PING == 0 else b""
        return self._advance(piece.index) + ping

    def _advance(self, index: int) -> bytes:
        """Begin the next call, after ending the current one if it is complete and another one has begun."""
        events = b""
        while (held := self._calls.get(self._num_calls_out)) is not None and held.name:
            if self._open != "tool_use":
                events += self._begin_call(held)
            if index <= self._num_calls_out or not is_whole_object(held.arguments):
                break
            events += self._end_call(held)
        return events

    def _begin_call(self, held: _HeldCall) -> bytes:
        fields = {"id": held.call_id, "name": held.name, "input": {}, "caller": {"type": "direct"}}
        return self._close() + self._begin("tool_use", fields)

    def _end_call(self, held: _HeldCall) -> bytes:
        events = b"" if self._open == "tool_use" else self._begin_call(held)
        events += self._block_delta({"type": "input_json_delta", "partial_json": input_json(held.arguments)})
        self._num_calls_out += 1
        return events + self._close()

    # -- blocks --------------------------------------------------------------------------------------------------

    def _begin(self, kind: Said | Literal["tool_use"], fields: dict[str, Any]) -> bytes:
        self._open = kind
        self._num_blocks += 1
        block = {"type": kind} | fields | CONSTANT_FIELDS[kind]
        return _event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = {"type": "signature_delta", "signature": signature_of(self._reply_id)}
        events = self._block_delta(signature) if self._open == "thinking" else b""
        self._open = None
        return events + _event("content_block_stop", {"index": self._num_blocks - 1})


def _empty(kind: Said) -> dict[str, Any]:
    return {"text": "", "citations": None} if kind == "text" else {"thinking": "", "signature": ""}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    """A named event: clients skip events without a name."""
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind} | fields) + b"\n\n"
