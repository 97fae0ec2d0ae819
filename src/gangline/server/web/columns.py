"""Named columns of numbers as one body: a browser creates typed arrays from it without parsing numbers.

    bytes 0-3    `GLC1`
    bytes 4-7    length of the header, uint32
    ...          header, JSON: [[name, type, offset, length], ...]
    ...          the columns, each at a multiple of 8

Everything is little-endian. Offsets are from the beginning of the body, lengths count elements. Types are i1, u1, i4
and f4.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

COLUMNS = "application/vnd.gangline.columns"
"""Media type."""

_MAGIC = b"GLC1"
_TYPES = {"i1": "<i1", "u1": "<u1", "i4": "<i4", "f4": "<f4"}

Column = NDArray[Any]
"""[T] int8, uint8, int32 or float32."""


def encode_columns(columns: dict[str, Column]) -> bytes:
    """Raises: KeyError for an array of another type."""
    arrays = {name: np.ascontiguousarray(column).astype(_TYPES[_kind(column)], copy=False)
              for name, column in columns.items()}  # fmt: skip
    header = _header(arrays, 0)
    # Offsets have a variable number of digits, so the header's length depends on them: repeat until it is stable.
    while (longer := _header(arrays, _padded(8 + len(header)))) != header:
        header = longer
    pieces = [_MAGIC, len(header).to_bytes(4, "little"), header]
    at = 8 + len(header)
    for array in arrays.values():
        pieces += [b"\0" * (_padded(at) - at), array.tobytes()]
        at = _padded(at) + array.nbytes
    return b"".join(pieces)


def decode_columns(body: bytes) -> dict[str, Column]:
    """Read-only views of the body. Raises: ValueError."""
    if body[:4] != _MAGIC:
        raise ValueError("no columns")
    length = int.from_bytes(body[4:8], "little")
    header = msgspec.json.decode(body[8 : 8 + length], type=list[tuple[str, str, int, int]])
    return {
        name: np.frombuffer(body, dtype=_TYPES[kind], count=count, offset=offset)
        for name, kind, offset, count in header
    }


def _header(arrays: dict[str, Column], start: int) -> bytes:
    entries: list[tuple[str, str, int, int]] = []
    for name, array in arrays.items():
        entries.append((name, _kind(array), start, len(array)))
        start = _padded(start + array.nbytes)
    return msgspec.json.encode(entries)


def _kind(array: Column) -> str:
    return f"{array.dtype.kind}{array.dtype.itemsize}"


def _padded(offset: int) -> int:
    return -(-offset // 8) * 8
