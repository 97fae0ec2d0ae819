"""Token ids out of JSON and into it, without a Python object for each: a prompt of 20,000 is most of an answer, and of
the next request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple, Self

import msgspec
import numpy as np
import orjson
import simdjson
from numpy.typing import NDArray

from gangline.domain.errors import EngineMalformed
from gangline.domain.tokens import TokenIds, token_ids

__all__ = ["CUT_OUT", "LARGEST_ID", "NO_IDS", "SentIds", "TokenId", "cut_out_ids", "ids_from_json", "plain_ids"]

_NULL = b"null"
NO_IDS = msgspec.Raw(_NULL)
"""The value of an id field that the engine leaves out."""

CUT_OUT = b"0"
"""The placeholder for the list that `cut_out_ids` took."""

LARGEST_ID = np.iinfo(np.int32).max
TokenId = Annotated[int, msgspec.Meta(ge=0, le=int(LARGEST_ID))]
"""An id in an engine's answer. An answer with any other number is refused: it cannot be trained on."""

_PIECE_BYTES = 32 << 10
"""Text parsed at once, so that the parser's memory stays in the caches. It holds the interpreter, and other threads
wait for it."""


class SentIds(NamedTuple):
    """Exact ids of a request, [T], and their JSON. An engine that repeats them writes the same text: comparing it
    certifies each of them, for a twentieth of what parsing it costs."""

    ids: TokenIds
    text: bytes

    @classmethod
    def of(cls, ids: TokenIds) -> Self:
        return cls(ids, orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY))


def cut_out_ids(body: bytes, field: str) -> tuple[bytes, memoryview | bytes]:
    """A JSON document with `CUT_OUT` for the one list of ids called `field`, and the list: a decoder that has to skip
    the list takes longer than a search. The body as it is, and nothing, where there is no such list, or not just one.

    A list of another object may have been the one: its place in the decoded document says so. Inside of a string the
    name cannot be taken for a field: there its quotes are escaped.
    """
    name = b'"%b":' % field.encode()
    at = body.find(name)
    start = at + len(name)
    if body[start : start + 1] == b" ":
        start += 1
    end = body.find(b"]", start) + 1
    if at < 0 or not end or body[start : start + 1] != b"[" or body.find(name, end) >= 0:
        return body, b""
    view = memoryview(body)
    return b"".join((view[:start], CUT_OUT, view[end:])), view[start:end]


def ids_from_json(raw: msgspec.Raw, sent: SentIds | None = None) -> TokenIds | None:
    """A JSON list of ids -> [T]; None for null. Raises: EngineMalformed for anything else.

    sent: the ids of the request, which the list may repeat.
    """
    text = bytes(raw)
    if text == _NULL:
        return None
    if sent is not None and text == sent.text:
        return sent.ids
    ids = plain_ids(text)
    if ids is not None:
        return ids
    try:
        return token_ids(msgspec.json.decode(text, type=list[TokenId]))
    except (msgspec.MsgspecError, OverflowError) as error:
        start = text[:80].decode("utf-8", "replace")
        raise EngineMalformed(f"the engine's answer has no token ids: {error}; got {start!r}") from error


def plain_ids(text: bytes) -> TokenIds | None:
    """A JSON list of ids -> [T], without a Python object for each; None for anything else."""
    if text[:1] != b"[" or text[-1:] != b"]" or text.find(b"[", 1) >= 0:  # the parser would flatten lists of lists
        return None
    try:
        pieces = [_integers(piece) for piece in _pieces(text)]
    except (ValueError, TypeError, RuntimeError):  # the last for integers beyond 64 bits
        return None
    if len(pieces) > 1 and not all(map(len, pieces)):  # the whole list ends with a comma
        return None
    ids = np.concatenate(pieces)
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_ID):
        return None
    return ids.astype(np.int32)


def _integers(text: bytes) -> NDArray[np.int64]:
    """The numbers of a JSON list. Raises: ValueError, TypeError, RuntimeError."""
    found = simdjson.Parser().parse(text)
    if not isinstance(found, simdjson.Array):
        raise TypeError
    return np.frombuffer(found.as_buffer(of_type="i"), dtype=np.int64)


def _pieces(text: bytes) -> Iterator[bytes]:
    """The list as shorter ones, cut at commas."""
    start = 1
    while len(text) - start > _PIECE_BYTES and (end := text.find(b",", start + _PIECE_BYTES)) >= 0:
        yield b"[%b]" % text[start:end]
        start = end + 1
    yield text if start == 1 else b"[" + text[start:]
