"""A model call's body made a canonical call, with all that costs time in proportion to the body. Pure, so that a
process of its own can do it for large bodies (see `readers`): the event loop of a node serves every session.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.dialects.contract import Dialect, RawRequest
from gangline.domain.conversation import ModelCall
from gangline.domain.errors import LimitExceeded
from gangline.gateway.call_limits import CallLimits, check_body, check_call
from gangline.gateway.placing import Digests, meaning_of, unknown
from gangline.gateway.retries import CallMark, mark_of
from gangline.gateway.volatile import VolatileText

__all__ = ["CallRead", "is_large", "read_ahead", "read_here"]

_LARGE_BYTES = 96 << 10
_LARGE_COUNTS = ((b",", 1000), (b"\\u", 2000), (b":", 3000), (b"-", 3000), (b"[", 3000), (b"%", 3000))
"""What objects, escapes, times, dates, nested lists and data URLs of text are made of. Bodies within these bounds take
a few milliseconds at most, from their parsing to their record."""

_MAX_VOLATILE_PIECES = 4096


class CallRead(msgspec.Struct, frozen=True):
    call: ModelCall
    mark: CallMark
    digests: tuple[bytes, ...] = ()
    """Of the meaning of each message; empty where they are computed when the call is placed."""

    @property
    def known(self) -> Digests:
        """The digests by their very message."""
        if not self.digests:
            return unknown
        # With the message, so that no other one gets its identity meanwhile.
        pairs = {id(pair[0]): pair for pair in zip(self.call.messages, self.digests, strict=True)}
        return lambda message: pairs[id(message)][1] if id(message) in pairs else None


def is_large(body: bytes | bytearray) -> bool:
    """Whether other sessions would notice that this body is read on the event loop."""
    return len(body) > _LARGE_BYTES or any(body.count(mark) > most for mark, most in _LARGE_COUNTS)


def read_here(
    dialect: Dialect, request: RawRequest, kind: Literal["call", "count"], path: str, limits: CallLimits
) -> CallRead:
    """Raises: LimitExceeded, InvalidRequest."""
    check_body(request.body, limits)
    call = dialect.parse_count(request) if kind == "count" else dialect.parse_call(request)
    check_call(call, limits)
    return CallRead(call, mark_of(dialect.name, path, request))


def read_ahead(
    dialect: Dialect,
    request: RawRequest,
    kind: Literal["call", "count"],
    path: str,
    limits: CallLimits,
    volatile: VolatileText,
) -> CallRead:
    """The same, with the digests of its messages. Raises: LimitExceeded, InvalidRequest."""
    read = read_here(dialect, request, kind, path, limits)
    for message in read.call.messages:
        if volatile.has_more_than(_MAX_VOLATILE_PIECES, message):
            raise LimitExceeded(
                f"a system message has more than {_MAX_VOLATILE_PIECES} pieces that volatile_system_text matches: "
                "shorten it, or set other rules in the task's capture."
            )
    return msgspec.structs.replace(read, digests=tuple(meaning_of(volatile, one) for one in read.call.messages))
