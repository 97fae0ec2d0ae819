"""Parses a model call's body into a canonical call, including all work proportional to the body's size. It is pure, so
that a separate process can do it for large bodies (see `pool`): the node's event loop serves every session.

Also the limits of one call, and of the bodies that one session has in flight. A call beyond a limit is refused in the
provider's own shape, with the limit and the option that raises it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Literal, Self

import msgspec
import numpy as np

from gangline.domain.conversation import Document, ModelCall, ToolResult
from gangline.domain.errors import InvalidRequest, LimitExceeded, TooMany
from gangline.domain.ids import RECORD_KEY, ROLE_PATTERN
from gangline.node.calls.retries import AGENT_ROLE, CallMark, mark_of
from gangline.node.capture.meaning import VolatileText
from gangline.node.capture.placing import Digests, meaning_of, unknown
from gangline.settings.node import CallLimits
from gangline.wire.dialects.contract import Dialect, RawRequest

_LARGE_BYTES = 128 << 10
_LARGE_COUNTS = {"{": 800, ",": 8000, ":": 4000, "-": 6000, "[": 3000, "%": 3000}
_LARGE_NUM_ESCAPES = 2000
"""Marks of objects, lists, times, dates, data URLs of text and `\\u` escapes. Bodies within these limits take at most a
few milliseconds from parsing to record. Most conversations are within them: for these a separate process would cost
more than it saves."""
_MARKS = [(ord(mark), most) for mark, most in _LARGE_COUNTS.items()]
_FEWEST = min(_LARGE_COUNTS.values())

_MAX_VOLATILE_PIECES = 4096

REFUSED_EVERY_S = 1.0

_ROLE = re.compile(ROLE_PATTERN)

OPTION = "--call-limits"
_CONVERSATION = ("messages", "input", "contents")
"""Fields of a body that contain its messages, in any dialect."""
_TEXT = (*_CONVERSATION, "system", "instructions", "systemInstruction", "system_instruction")
_MAX_URL_ESCAPES = 10_000
_MAX_KEYS = 2_048
"""Each costs a fraction of a microsecond whenever the document's text is scanned."""
_SHORTEN = "shorten or compact the conversation"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


class BytesInFlight:
    """The bodies of one session's unfinished calls, and its pace: after a request beyond a limit the next ones are
    taken one a second, until one comes later than that. Reading a refused one costs other sessions time, and no
    engine's work slows its sender down."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._next_at_s = 0.0

    async def its_turn(self) -> None:
        """Wait until the next request's body may be read."""
        at_s = self._next_at_s
        if (wait_s := at_s - time.monotonic()) > 0:
            self._next_at_s = at_s + REFUSED_EVERY_S
            await asyncio.sleep(wait_s)

    def was_refused(self) -> None:
        self._next_at_s = max(self._next_at_s, time.monotonic() + REFUSED_EVERY_S)

    def body(self) -> TakenBytes:
        return TakenBytes(self)


class TakenBytes:
    """Memory of one body. Its `async with` block begins when the body may be read, and releases it at the end."""

    def __init__(self, held: BytesInFlight) -> None:
        self._held = held
        self.num_bytes = 0

    async def __aenter__(self) -> Self:
        await self._held.its_turn()
        return self

    async def __aexit__(self, _kind: object, error: object, _traceback: object) -> None:
        self._held.num_bytes -= self.num_bytes
        if isinstance(error, LimitExceeded):
            self._held.was_refused()

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
    """Refuse a body that would take long to parse, by its outline. Bodies other than a JSON object pass: the dialect
    refuses them with its own message.

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
        len(part.content) + 1 if isinstance(part, ToolResult) else 1
        for message in call.messages
        for part in message.parts
    )
    for part in (part for message in call.messages for part in message.parts if isinstance(part, Document)):
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


class CallRead(msgspec.Struct, frozen=True):
    call: ModelCall
    mark: CallMark
    digests: tuple[bytes, ...] = ()
    """Digest of each message's meaning; empty: computed when the call is placed."""

    @property
    def known(self) -> Digests:
        """The digests, looked up by the identity of the message."""
        if not self.digests:
            return unknown
        # Keeps the message alive, so that no other object gets its id.
        pairs = {id(pair[0]): pair for pair in zip(self.call.messages, self.digests, strict=True)}
        return lambda message: pairs[id(message)][1] if id(message) in pairs else None


def is_large(pieces: Sequence[bytes | bytearray]) -> bool:
    """Whether reading this body on the event loop would delay other sessions."""
    num_bytes = sum(map(len, pieces))
    if num_bytes > _LARGE_BYTES:
        return True
    if num_bytes <= _FEWEST:  # most short conversations
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
    """Parse and check a call in this process. Raises: LimitExceeded, InvalidRequest."""
    check_body(request.body, limits)
    call = dialect.parse_count(request) if kind == "count" else dialect.parse_call(request)
    check_call(call, limits)
    role = role_in(request) or _label(call.agent_role)
    if role != call.agent_role:
        call = msgspec.structs.replace(call, agent_role=role)
    return CallRead(call, mark_of(dialect.name, path, request))


def role_in(request: RawRequest) -> str | None:
    """Returns the role that the client names in a header. Raises: InvalidRequest."""
    role = request.headers.get(AGENT_ROLE)
    if role is not None and not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"the header {AGENT_ROLE} is {role[:100]!r}: a role is 1 to 64 letters, digits, `.`, `_` or `-`, and "
            "begins with a letter or digit."
        )
    return role


def _label(role: str | None) -> str | None:
    """Returns the role in a body's metadata if it is a valid name. Metadata belong to the client, so another value is
    just its label."""
    return role if role is not None and _ROLE.fullmatch(role) else None


def read_ahead(
    dialect: Dialect,
    request: RawRequest,
    kind: Literal["call", "count"],
    path: str,
    limits: CallLimits,
    volatile: VolatileText,
) -> CallRead:
    """Like `read_here`, with digests of the messages. Raises: LimitExceeded, InvalidRequest."""
    read = read_here(dialect, request, kind, path, limits)
    for message in read.call.messages:
        if volatile.has_more_than(_MAX_VOLATILE_PIECES, message):
            raise LimitExceeded(
                f"a system message has more than {_MAX_VOLATILE_PIECES} pieces that volatile_system_text matches: "
                "shorten it, or set other rules in the task's capture."
            )
    return msgspec.structs.replace(read, digests=tuple(meaning_of(volatile, one) for one in read.call.messages))
