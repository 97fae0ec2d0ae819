"""Bounds of one model call, and of the bodies that one session has in flight.

A call beyond a bound is refused in the provider's own shape, with the limit and the option that raises it.
"""

from __future__ import annotations

from typing import Self

import msgspec

from gangline.domain.conversation import Document, ModelCall, ToolResult
from gangline.domain.errors import LimitExceeded, TooMany
from gangline.domain.ids import RECORD_KEY
from gangline.settings.node import CallLimits

__all__ = ["BytesInFlight", "TakenBytes", "check_body", "check_call", "too_many_bytes"]

OPTION = "--call-limits"
_CONVERSATION = ("messages", "input", "contents")
"""Fields of a body that hold its messages, in any dialect."""
_TEXT = (*_CONVERSATION, "system", "instructions", "systemInstruction", "system_instruction")
_MAX_URL_ESCAPES = 10_000
_MAX_KEYS = 2_048
"""Each takes a fraction of a microsecond, whenever the document's text is looked at."""
_SHORTEN = "shorten or compact the conversation"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


class BytesInFlight:
    """The bodies of one session whose calls have not ended."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def body(self) -> TakenBytes:
        return TakenBytes(self)


class TakenBytes:
    """Memory of one body; what is taken inside a `with` block of it is given back at the end of the block."""

    def __init__(self, held: BytesInFlight) -> None:
        self._held = held
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._held.num_bytes -= self.num_bytes

    def add(self, num_bytes: int) -> None:
        """Raises: TooMany."""
        if self._held.num_bytes + num_bytes > self._held.max_bytes:
            raise TooMany(
                f"the calls that this session has in flight would hold more than {self._held.max_bytes} bytes. Wait "
                f"for some to end, or raise max_in_flight_bytes in the node's {OPTION}.",
                max_in_flight_bytes=self._held.max_bytes,
            )
        self._held.num_bytes += num_bytes
        self.num_bytes += num_bytes


def check_body(body: bytes, limits: CallLimits) -> None:
    """Refuse by its outline a body that would take long to parse. Bodies that are no JSON object pass: the dialect
    refuses them in its own words.

    Raises: LimitExceeded.
    """
    try:
        fields = _fields.decode(body)
        for name in _CONVERSATION:
            if name in fields and (num := _num_items(fields[name])) > limits.max_messages:
                raise _beyond(limits.max_messages, "max_messages", f"{num} {name}", _SHORTEN)
        if "tools" in fields and (num := _num_items(fields["tools"])) > limits.max_tools:
            raise _beyond(limits.max_tools, "max_tools", f"{num} tools", "offer fewer")
    except (msgspec.MsgspecError, RecursionError):
        return
    most = limits.max_definition_bytes
    for name, value in fields.items():
        if name not in _TEXT and (size := len(memoryview(value))) > most:
            raise _beyond(most, "max_definition_bytes", f"{size} bytes of {name}", "shorten it")


def check_call(call: ModelCall, limits: CallLimits) -> None:
    """Raises: LimitExceeded."""
    num_messages, num_tools = len(call.messages), len(call.tools)
    num_keys = sum(len(RECORD_KEY.findall(text)) for text in call.undeclared.values())
    if num_keys > _MAX_KEYS:
        raise LimitExceeded(
            f"the request has {num_keys} runs of 16 hexadecimal digits in fields that are not known here. Each could "
            f"name an earlier reply, and {_MAX_KEYS} is the most: leave those fields out."
        )
    num_parts = sum(
        len(part.content) + 1 if isinstance(part, ToolResult) else 1 for one in call.messages for part in one.parts
    )
    for part in (part for one in call.messages for part in one.parts if isinstance(part, Document)):
        if (num_escapes := part.url.count("%")) > _MAX_URL_ESCAPES:
            raise LimitExceeded(
                f"the request has a document whose URL has {num_escapes} percent escapes, and {_MAX_URL_ESCAPES} is "
                "the most: send its data in base64."
            )
    if num_messages > limits.max_messages:
        raise _beyond(limits.max_messages, "max_messages", f"{num_messages} messages", _SHORTEN)
    if num_tools > limits.max_tools:
        raise _beyond(limits.max_tools, "max_tools", f"{num_tools} tools", "offer fewer")
    if num_parts > limits.max_parts:
        raise _beyond(limits.max_parts, "max_parts", f"{num_parts} content parts", _SHORTEN)


def too_many_bytes(limits: CallLimits) -> LimitExceeded:
    return LimitExceeded(
        f"the body has more than {limits.max_body_bytes} bytes: shorten or compact the conversation, or raise "
        f"max_body_bytes in the node's {OPTION}.",
        max_body_bytes=limits.max_body_bytes,
    )


def _num_items(value: msgspec.Raw) -> int:
    return len(_items.decode(value)) if bytes(memoryview(value)[:1]) == b"[" else 0


def _beyond(limit: int, name: str, has: str, way_out: str) -> LimitExceeded:
    return LimitExceeded(
        f"the request has {has}, and {limit} is the most: {way_out}, or raise {name} in the node's {OPTION}.",
        **{name: limit},
    )
