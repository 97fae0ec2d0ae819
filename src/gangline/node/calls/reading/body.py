"""A model call's body made a canonical call, with all that costs time in proportion to the body. Pure, so that a
process of its own can do it for large bodies (see `pool`): the event loop of a node serves every session.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import InvalidRequest, LimitExceeded
from gangline.domain.ids import ROLE_PATTERN
from gangline.node.calls.bounds import check_body, check_call
from gangline.node.calls.retries import AGENT_ROLE, CallMark, mark_of
from gangline.node.capture.placing import Digests, meaning_of, unknown
from gangline.node.capture.volatile import VolatileText
from gangline.settings.node import CallLimits
from gangline.wire.dialects.contract import Dialect, RawRequest

__all__ = ["CallRead", "is_large", "read_ahead", "read_here", "role_in"]

_LARGE_BYTES = 128 << 10
_LARGE_COUNTS = {"{": 800, ",": 8000, ":": 4000, "-": 6000, "[": 3000, "%": 3000}
_LARGE_NUM_ESCAPES = 2000
"""What objects, lists, times, dates, data URLs of text and `\\u` escapes are made of. Bodies within these bounds take a
few milliseconds at most, from their parsing to their record. Most conversations are within them, for a
process of its own costs more than it saves there."""
_MARKS = [(ord(mark), most) for mark, most in _LARGE_COUNTS.items()]
_FEWEST = min(_LARGE_COUNTS.values())

_MAX_VOLATILE_PIECES = 4096

_ROLE = re.compile(ROLE_PATTERN)


class CallRead(msgspec.Struct, frozen=True):
    call: ModelCall
    mark: CallMark
    digests: tuple[bytes, ...] = ()
    """Digests of the meaning of each message; empty where they are computed when the call is placed."""

    @property
    def known(self) -> Digests:
        """The digests by their very message."""
        if not self.digests:
            return unknown
        # With the message, so that no other one gets its identity meanwhile.
        pairs = {id(pair[0]): pair for pair in zip(self.call.messages, self.digests, strict=True)}
        return lambda message: pairs[id(message)][1] if id(message) in pairs else None


def is_large(pieces: Sequence[bytes | bytearray]) -> bool:
    """Whether other sessions would notice that the body of these pieces is read on the event loop."""
    num_bytes = sum(map(len, pieces))
    if num_bytes > _LARGE_BYTES:
        return True
    if num_bytes <= _FEWEST:  # most bodies of short conversations
        return False
    body = b"".join(pieces)
    data = np.frombuffer(body, np.uint8)  # several times as fast as `bytes.count`
    for mark, most in _MARKS:
        if num_bytes > most and int(np.count_nonzero(data == mark)) > most:
            return True
    if num_bytes <= 2 * _LARGE_NUM_ESCAPES:
        return False
    num_backslashes = int(np.count_nonzero(data == ord("\\")))
    return num_backslashes > _LARGE_NUM_ESCAPES and body.count(b"\\u") > _LARGE_NUM_ESCAPES


def read_here(
    dialect: Dialect, request: RawRequest, kind: Literal["call", "count"], path: str, limits: CallLimits
) -> CallRead:
    """Raises: LimitExceeded, InvalidRequest."""
    check_body(request.body, limits)
    call = dialect.parse_count(request) if kind == "count" else dialect.parse_call(request)
    check_call(call, limits)
    role = role_in(request) or _label(call.agent_role)
    if role != call.agent_role:
        call = msgspec.structs.replace(call, agent_role=role)
    return CallRead(call, mark_of(dialect.name, path, request))


def role_in(request: RawRequest) -> str | None:
    """The role that the client names in a header. Raises: InvalidRequest."""
    role = request.headers.get(AGENT_ROLE)
    if role is not None and not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"the header {AGENT_ROLE} is {role[:100]!r}: a role is 1 to 64 letters, digits, `.`, `_` or `-`, and "
            "begins with a letter or digit."
        )
    return role


def _label(role: str | None) -> str | None:
    """A role in a body's metadata, which are the client's own: one that is no name is another label of theirs."""
    return role if role is not None and _ROLE.fullmatch(role) else None


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
