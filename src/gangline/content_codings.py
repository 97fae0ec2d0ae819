"""Decompression of request bodies, by their Content-Encoding.

gzip and deflate are always read; br and zstd where a package reads them (`pip install 'gangline[codings]'`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from gangline.domain.errors import InvalidRequest, LimitExceeded, UnsupportedMediaType

__all__ = ["BODY_UNREADABLE", "checked_coding", "decompressed"]

BODY_UNREADABLE = "request_body_encoding_invalid"
"""Error code of a body that cannot be decompressed."""

_OF_EXTRA = ("br", "zstd")
_ZSTD_WINDOW_LOG = 23
"""8 MiB, the most that RFC 9659 lets a sender of zstd ask of a receiver's memory."""

Body = bytes | bytearray
Decoder = Callable[[Body, int], tuple[bytes, bool]]
"""Decode a body, and stop soon after so many bytes. Returns them, and whether the body ended where its data did."""


def checked_coding(content_encoding: str) -> str:
    """The name of the coding, `identity` for none. Raises: UnsupportedMediaType for an unknown one, or several."""
    coding = content_encoding.strip().lower() or "identity"
    if coding != "identity" and coding not in _DECODERS:
        hint = " (`pip install 'gangline[codings]'` on the machine that serves this)" if coding in _OF_EXTRA else ""
        raise UnsupportedMediaType(
            f"Content-Encoding {content_encoding[:100]!r} is not read here{hint}. "
            f"Send one of {', '.join(_DECODERS)}, or no encoding."
        )
    return coding


def decompressed(body: Body, coding: str, max_bytes: int) -> bytes:
    """The plain body. Raises: LimitExceeded, before much more than `max_bytes` are held; InvalidRequest."""
    decode, broken = _DECODERS[coding]
    try:
        plain, is_whole = decode(body, max_bytes + 1)
    except broken as error:
        raise _unreadable(coding, str(error)) from error
    if len(plain) > max_bytes:
        raise LimitExceeded(f"the body has more than {max_bytes} bytes.", max_bytes=max_bytes)
    if not is_whole:
        raise _unreadable(coding, "it ends too early, or has more after its end")
    return plain


def _unreadable(coding: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not {coding}, as its Content-Encoding says: {why}.", error_code=BODY_UNREADABLE)


def _gunzipped(body: Body, stop_at: int) -> tuple[bytes, bool]:
    return _inflated(body, stop_at, 16 + zlib.MAX_WBITS)


def _undeflated(body: Body, stop_at: int) -> tuple[bytes, bool]:
    """In zlib's format, or without its head as some clients send it."""
    has_head = len(body) > 1 and body[0] & 0xF == 8 and int.from_bytes(body[:2]) % 31 == 0
    return _inflated(body, stop_at, zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)


def _inflated(body: Body, stop_at: int, window_bits: int) -> tuple[bytes, bool]:
    decoder = zlib.decompressobj(window_bits)
    return decoder.decompress(body, stop_at), decoder.eof and not decoder.unused_data


def _decoders() -> dict[str, tuple[Decoder, type[Exception]]]:
    """Decoders of this machine, with the error that each raises for a body that is none of its."""
    found: dict[str, tuple[Decoder, type[Exception]]] = {
        "gzip": (_gunzipped, zlib.error),
        "x-gzip": (_gunzipped, zlib.error),
        "deflate": (_undeflated, zlib.error),
    }
    brotli = _first_of("brotli")
    if brotli is not None and hasattr(brotli.Decompressor, "can_accept_more_data"):  # older ones know no bound

        def unbrotlied(body: Body, stop_at: int) -> tuple[bytes, bool]:
            decoder = brotli.Decompressor()
            return decoder.process(body, output_buffer_limit=stop_at), decoder.is_finished()

        found["br"] = unbrotlied, brotli.error
    zstd = _first_of("compression.zstd", "backports.zstd")
    if zstd is not None:
        options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}

        def unzstandard(body: Body, stop_at: int) -> tuple[bytes, bool]:
            decoder = zstd.ZstdDecompressor(options=options)
            return decoder.decompress(body, stop_at), decoder.eof and not decoder.unused_data

        found["zstd"] = unzstandard, zstd.ZstdError
    return found


def _first_of(*modules: str) -> Any:
    for module in modules:
        with suppress(ImportError):
            return import_module(module)
    return None


_DECODERS = _decoders()
