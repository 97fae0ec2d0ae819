"""Decompresses request bodies, by their Content-Encoding.

gzip and deflate are always supported; br and zstd if their packages are installed (extra `codings`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from gangline.domain.errors import InvalidRequest, LimitExceeded, UnsupportedMediaType

BODY_UNREADABLE = "request_body_encoding_invalid"
"""Error code of a body that cannot be decompressed."""

_OF_EXTRA = ("br", "zstd")
_ZSTD_WINDOW_LOG = 23
"""8 MiB, the largest window that RFC 9659 lets a zstd sender require of a receiver."""

_PIECE_BYTES = 256 << 10
"""Bytes of plain text to decompress at once: larger pieces would hold the interpreter for long."""

Pieces = Sequence[bytes | bytearray]
Decoder = Callable[[Pieces], Iterator[bytes]]
"""Decodes a body piece by piece. Raises EOFError if it ends too early or has data after its end."""


def checked_coding(content_encoding: str) -> str:
    """Name of the coding; `identity` if there is none. Raises: UnsupportedMediaType if it is unknown, or there are
    several.
    """
    coding = content_encoding.strip().lower() or "identity"
    if coding != "identity" and coding not in _DECODERS:
        hint = " (the machine that serves this lacks Gangline's extra `codings`)" if coding in _OF_EXTRA else ""
        raise UnsupportedMediaType(
            f"Content-Encoding {content_encoding[:100]!r} is not read here{hint}. "
            f"Send one of {', '.join(_DECODERS)}, or no encoding."
        )
    return coding


def decompressed(body: Pieces, coding: str, max_bytes: int) -> list[bytes]:
    """The plain body. Raises: LimitExceeded before holding much more than `max_bytes`; InvalidRequest."""
    decode, broken = _DECODERS[coding]
    plain, num_bytes = list[bytes](), 0
    try:
        for piece in decode(body):
            plain.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                plain.clear()  # the error keeps this frame alive
                raise LimitExceeded(f"the body has more than {max_bytes} bytes.", max_bytes=max_bytes)
    except EOFError:
        raise _unreadable(coding, "it ends too early, or has more after its end") from None
    except broken as error:
        raise _unreadable(coding, str(error)) from error
    return plain


def _unreadable(coding: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not {coding}, as its Content-Encoding says: {why}.", error_code=BODY_UNREADABLE)


def _gunzipped(body: Pieces) -> Iterator[bytes]:
    return _inflated(body, 16 + zlib.MAX_WBITS)


def _undeflated(body: Pieces) -> Iterator[bytes]:
    """In zlib's format, or without its header as some clients send it."""
    head = b"".join(body[:2])[:2]
    has_head = len(head) > 1 and head[0] & 0xF == 8 and int.from_bytes(head) % 31 == 0
    return _inflated(body, zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)


def _inflated(body: Pieces, window_bits: int) -> Iterator[bytes]:
    decoder = zlib.decompressobj(window_bits)
    for piece in body:
        left: bytes | bytearray = piece
        while left:
            yield decoder.decompress(left, _PIECE_BYTES)
            left = decoder.unconsumed_tail
    while rest := decoder.decompress(b"", _PIECE_BYTES):
        yield rest
    if not decoder.eof or decoder.unused_data:
        raise EOFError


def _decoders() -> dict[str, tuple[Decoder, type[Exception]]]:
    """Available decoders, with the error that each raises for an invalid body."""
    found: dict[str, tuple[Decoder, type[Exception]]] = {
        "gzip": (_gunzipped, zlib.error),
        "x-gzip": (_gunzipped, zlib.error),
        "deflate": (_undeflated, zlib.error),
    }
    brotli = _first_of("brotli")
    if brotli is not None and hasattr(brotli.Decompressor, "can_accept_more_data"):  # older versions have no bound

        def unbrotlied(body: Pieces) -> Iterator[bytes]:
            decoder = brotli.Decompressor()
            for piece in body:
                yield decoder.process(piece, output_buffer_limit=_PIECE_BYTES)
                while not decoder.can_accept_more_data():
                    yield decoder.process(b"", output_buffer_limit=_PIECE_BYTES)
            while not decoder.is_finished():
                if not (rest := decoder.process(b"", output_buffer_limit=_PIECE_BYTES)):
                    raise EOFError
                yield rest

        found["br"] = unbrotlied, brotli.error
    zstd = _first_of("compression.zstd", "backports.zstd")
    if zstd is not None:
        options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}

        def unzstandard(body: Pieces) -> Iterator[bytes]:
            decoder = zstd.ZstdDecompressor(options=options)
            for piece in body:
                yield decoder.decompress(piece, _PIECE_BYTES)
                while not decoder.needs_input and not decoder.eof:
                    yield decoder.decompress(b"", _PIECE_BYTES)
            if not decoder.eof or decoder.unused_data:
                raise EOFError

        found["zstd"] = unzstandard, zstd.ZstdError
    return found


def _first_of(*modules: str) -> Any:
    for module in modules:
        with suppress(ImportError):
            return import_module(module)
    return None


_DECODERS = _decoders()
