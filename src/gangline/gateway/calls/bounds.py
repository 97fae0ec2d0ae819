"""Bounds of one model call, and of the bodies that one session has in flight.

A call beyond a bound is refused in the provider's own shape, with the limit and the option that raises it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

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


class BytesInFlight:
    """The bodies of one session whose calls have not ended."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def body(self) -> Generator[TakenBytes]:
        """One body: memory taken inside the block is given back at its end."""
        taken = TakenBytes(self)
        try:
            yield taken
        finally:
            self.num_bytes -= taken.num_bytes


class TakenBytes:
    def __init__(self, held: BytesInFlight) -> None:
        self._held = held
        self.num_bytes = 0

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
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in _CONVERSATION:
            num = _num_items(fields.get(name))
            _check(num, limits.max_messages, "max_messages", f"{num} {name}", _SHORTEN)
        num = _num_items(fields.get("tools"))
        _check(num, limits.max_tools, "max_tools", f"{num} tools", "offer fewer")
    except (msgspec.MsgspecError, RecursionError):
        return
    for name, value in fields.items():
        if name not in _TEXT:
            size = len(memoryview(value))
            _check(size, limits.max_definition_bytes, "max_definition_bytes", f"{size} bytes of {name}", "shorten it")


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
    _check(num_messages, limits.max_messages, "max_messages", f"{num_messages} messages", _SHORTEN)
    _check(num_tools, limits.max_tools, "max_tools", f"{num_tools} tools", "offer fewer")
    _check(num_parts, limits.max_parts, "max_parts", f"{num_parts} content parts", _SHORTEN)


def too_many_bytes(limits: CallLimits) -> LimitExceeded:
    return LimitExceeded(
        f"the body has more than {limits.max_body_bytes} bytes: shorten or compact the conversation, or raise "
        f"max_body_bytes in the node's {OPTION}.",
        max_body_bytes=limits.max_body_bytes,
    )


def _num_items(value: msgspec.Raw | None) -> int:
    if value is None or bytes(memoryview(value)[:1]) != b"[":
        return 0
    return len(msgspec.json.decode(value, type=list[msgspec.Raw]))


def _check(value: int, limit: int, name: str, has: str, way_out: str) -> None:
    if value > limit:
        raise LimitExceeded(
            f"the request has {has}, and {limit} is the most: {way_out}, or raise {name} in the node's {OPTION}.",
            **{name: limit},
        )
