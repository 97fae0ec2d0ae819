"""Token ids out of JSON, without a Python object for each: a 20k-token prompt is most of an engine's answer."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import msgspec
import numpy as np

from gangline.domain.errors import EngineMalformed
from gangline.domain.tokens import TokenIds, token_ids

__all__ = ["CUT_OUT", "NO_IDS", "TokenId", "cut_out_ids", "ids_from_json", "plain_ids"]

_NULL = b"null"
NO_IDS = msgspec.Raw(_NULL)
"""The value of an id field that the engine leaves out."""

CUT_OUT = b"0"
"""The placeholder for the list that `cut_out_ids` took."""

_LARGEST = np.iinfo(np.int32).max
TokenId = Annotated[int, msgspec.Meta(ge=0, le=int(_LARGEST))]
"""An id in an engine's answer. An answer with any other number is refused: it cannot be trained on."""

_LONG_BYTES = 32 << 10
"""From here on the parser of many numbers at once is the faster one."""

_U = np.uint64
_COMMA, _OPENING = b",["
_DIGITS = (
    # Digits' low halves, then what joins neighbours: one digit, two, four.
    (_U(0x0F0F0F0F0F0F0F0F), _U(10 << 8 | 1), _U(8)),
    (_U(0x00FF00FF00FF00FF), _U(100 << 16 | 1), _U(16)),
    (_U(0x0000FFFF0000FFFF), _U(10_000 << 32 | 1), _U(32)),
)


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


def ids_from_json(raw: msgspec.Raw) -> TokenIds | None:
    """A JSON list of ids -> [T]; None for null. Raises: EngineMalformed for anything else."""
    text = memoryview(raw)
    if len(text) == len(_NULL) and bytes(text) == _NULL:
        return None
    # Two fast ways for plain lists of numbers; whatever is none goes the strict way.
    if len(text) > 2 and text[0] == _OPENING:
        ids = plain_ids(bytes(text)) if len(text) >= _LONG_BYTES else None
        if ids is None:
            ids = _few_ids(bytes(text[1:-1]))
        if ids is not None:
            return ids
    try:
        return token_ids(msgspec.json.decode(text, type=list[TokenId]))
    except (msgspec.MsgspecError, OverflowError) as error:
        start = bytes(text[:80]).decode("utf-8", "replace")
        raise EngineMalformed(f"the engine answered what are no token ids: {error}; got {start!r}") from error


def plain_ids(text: bytes) -> TokenIds | None:
    """A long JSON list of ids of at most eight digits -> [T], without a Python object for each; None for anything
    else."""
    text = text.replace(b", ", b",")
    if len(text) < 3 or text[:1] != b"[" or text[-1:] != b"]":
        return None
    return _many_ids(memoryview(text)[1:-1])


def _few_ids(text: bytes) -> TokenIds | None:
    with suppress(ValueError):
        ids = np.fromstring(text.decode(), dtype=np.int64, sep=",")
        if len(ids) == text.count(b",") + 1 and ids.min() >= 0 and ids.max() <= _LARGEST:
            return ids.astype(np.int32)
    return None


def _many_ids(text: memoryview) -> TokenIds | None:
    """Numbers of at most eight digits with a comma between; None for anything else.

    Eight bytes from each number's first digit on are one unsigned integer, shifted so that the digits end it; then all
    numbers join their digits at once, in three steps.
    """
    num_padding = 16 - len(text) % 8  # a comma ends the last number, and eight bytes from its start are there
    padded = b"".join((text, b"," * num_padding))
    letters, words = np.frombuffer(padded, dtype=np.uint8), np.frombuffer(padded, dtype="<u8")
    commas = np.flatnonzero(letters == _COMMA)
    ends = commas[: len(commas) - num_padding + 1]
    lengths = ends.copy()
    lengths[1:] -= ends[:-1] + 1
    num_digits = np.count_nonzero(letters - ord("0") < 10)
    if lengths.min() < 1 or lengths.max() > 8 or num_digits + len(commas) != len(letters):
        return None
    starts = ends - lengths
    num_skipped = (starts & 7) << 3
    starts >>= 3
    numbers = words.take(starts) >> num_skipped.view(_U)
    starts += 1
    numbers |= words.take(starts) << (64 - num_skipped).view(_U)  # NumPy shifts 64 bits out to zero
    numbers <<= ((8 - lengths) << 3).view(_U)
    for halves, join, joined_bits in _DIGITS:
        numbers &= halves
        numbers *= join
        numbers >>= joined_bits
    return numbers.astype(np.int32)
