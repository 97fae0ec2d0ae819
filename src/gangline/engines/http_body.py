"""Where the body of an HTTP/1.1 answer ends, and what of it has come: by its length, in chunks, or until the end. Pure.

Source: RFC 9112, sections 6 and 7.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["BodyReader", "body_reader_of"]

_MAX_LINE_BYTES = 16 << 10
_HEX = b"0123456789abcdefABCDEF"


class BodyReader(Protocol):
    is_whole: bool

    def feed(self, data: bytes) -> None:
        """Raises: ValueError for what cannot be a part of it."""
        ...

    def feed_end(self) -> None:
        """The connection was closed in good order."""
        ...

    def take(self) -> bytes:
        """What came since the last time."""
        ...


def body_reader_of(head: bytes) -> tuple[int, bool, BodyReader]:
    """(status, whether the connection may be used again, reader of the body) of a header, without its empty line.

    Raises: ValueError.
    """
    line, *lines = head.split(b"\r\n")
    version, _, rest = line.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
        raise ValueError(f"it began with {line[:80]!r}")
    status, is_kept = int(rest[:3]), version == b"HTTP/1.1"
    length: int | None = None
    is_chunked = False
    for field in lines:
        name, colon, value = field.partition(b":")
        if not colon:
            raise ValueError(f"a header field without a colon: {field[:80]!r}")
        match name.lower():
            case b"content-length":
                length = _length(value, length)
            case b"transfer-encoding":
                is_chunked = value.strip().lower() == b"chunked"
                if not is_chunked:
                    raise ValueError(f"Transfer-Encoding {value[:80]!r} is not known here")
            case b"connection":
                is_kept = b"close" not in value.lower() and (is_kept or b"keep-alive" in value.lower())
            case b"content-encoding" if value.strip().lower() != b"identity":
                raise ValueError(f"Content-Encoding {value[:80]!r} was not asked for")
            case _:
                pass
    if status in (204, 304):
        return status, is_kept, _Sized(0)
    if is_chunked:
        return status, is_kept, _Chunked()
    return (status, False, _UntilEnd()) if length is None else (status, is_kept, _Sized(length))


def _length(value: bytes, earlier: int | None) -> int:
    digits = value.strip()
    if not digits.isdigit() or (earlier is not None and earlier != int(digits)):
        raise ValueError(f"Content-Length {value[:80]!r}")
    return int(digits)


class _Pieces:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.is_whole = False

    def take(self) -> bytes:
        taken = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        return taken

    def feed_end(self) -> None:
        """Too early, unless it is whole."""


class _Sized(_Pieces):
    def __init__(self, length: int) -> None:
        super().__init__()
        self._num_left = length
        self.is_whole = length == 0

    def feed(self, data: bytes) -> None:
        self._num_left -= len(data)
        if self._num_left < 0:
            raise ValueError(f"its body has {-self._num_left} bytes more than it said")
        self._pieces.append(data)
        self.is_whole = self._num_left == 0


class _UntilEnd(_Pieces):
    def feed(self, data: bytes) -> None:
        self._pieces.append(data)

    def feed_end(self) -> None:
        self.is_whole = True


class _Chunked(_Pieces):
    """`SIZE[;extension] CRLF data CRLF`, again and again; after size 0 come lines (trailers) until an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self._open = b""
        """What came of a line that is not whole."""
        self._num_left = 0
        """Of the data of the chunk that is open."""
        self._is_last = False
        self._ends_chunk = False
        """The next line is the empty one behind a chunk's data."""

    def feed(self, data: bytes) -> None:
        if self._open:
            data, self._open = self._open + data, b""
        at = 0
        while at < len(data) and not self.is_whole:
            if self._num_left:
                piece = data[at : at + self._num_left]
                self._pieces.append(piece)
                at += len(piece)
                self._num_left -= len(piece)
                self._ends_chunk = self._num_left == 0
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._open = data[at:]
                if len(self._open) > _MAX_LINE_BYTES:
                    raise ValueError("a line of a chunked body has no end")
                return
            self._read_line(data[at:end].removesuffix(b"\r"))
            at = end + 1
        if at < len(data):
            raise ValueError("more came behind its last chunk")

    def _read_line(self, line: bytes) -> None:
        if self._ends_chunk:
            if line:
                raise ValueError(f"{line[:80]!r} behind a chunk")
            self._ends_chunk = False
        elif self._is_last:
            self.is_whole = not line
        else:
            size = line.partition(b";")[0].strip()
            if not size or size.strip(_HEX):
                raise ValueError(f"{line[:80]!r} is no size of a chunk")
            self._num_left = int(size, 16)
            self._is_last = self._num_left == 0
