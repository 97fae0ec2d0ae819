"""Parses server-sent events from an engine's bytes. Pure.

Source: WHATWG HTML, 9.2.6 "Interpreting an event stream". An event whose data is JSON's `null` counts as one without
data.
"""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvents:
    """Bytes in arbitrary pieces -> the data of the completed events, in order. Events without data are skipped."""

    def __init__(self) -> None:
        self._open = bytearray()
        """The current incomplete event."""
        self._ended_by_cr = False
        """Whether a following line feed belongs to the previous line end."""
        self._has_begun = False

    def feed(self, piece: bytes) -> list[bytes]:
        if self._ended_by_cr or b"\r" in piece:
            piece = self._with_line_feeds(piece)
        if self._open or piece[-2:] != b"\n\n":  # else it consists of whole events, the usual case
            start = max(len(self._open) - 1, 0)
            self._open += piece
            end = self._open.rfind(b"\n\n", start)
            if end < 0:
                return []
            piece = bytes(self._open[:end])
            del self._open[: end + 2]
        if not self._has_begun:
            self._has_begun = True
            piece = piece.removeprefix(_BYTE_ORDER_MARK)
        found = [_data(event) for event in piece.split(b"\n\n")]
        return [data for data in found if data and data != b"null"]

    def finish(self) -> list[bytes]:
        """Data of a last event without its blank line."""
        return self.feed(b"\n\n")

    def _with_line_feeds(self, piece: bytes) -> bytes:
        if self._ended_by_cr and piece:
            self._ended_by_cr = False
            piece = piece.removeprefix(b"\n")
        self._ended_by_cr = self._ended_by_cr or piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data(event: bytes) -> bytes:
    if event[:5] == b"data:" and b"\n" not in event:
        return event[5:].strip()
    return b"\n".join(line[5:] for line in event.split(b"\n") if line[:5] == b"data:").strip()
