"""Keeps the head and tail of a program's output in bounded memory."""

from __future__ import annotations

from binascii import b2a_base64

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    from typing import Any


class Output:
    """Keeps the first and last half of `max_bytes`, and counts the bytes between."""

    def __init__(self, max_bytes: int) -> None:
        self._max_head = max_bytes - max_bytes // 2
        self._max_tail = max_bytes // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.num_omitted = 0

    def add(self, piece: bytes) -> None:
        room = self._max_head - len(self.head)
        self.head += piece[:room]
        self.tail += piece[room:]
        surplus = len(self.tail) - self._max_tail
        if surplus > 0:
            del self.tail[:surplus]
            self.num_omitted += surplus

    def as_dict(self) -> dict[str, Any]:
        return {"head": base64(self.head), "tail": base64(self.tail), "omitted_bytes": self.num_omitted}


def base64(data: bytes | bytearray) -> str:
    return b2a_base64(data, newline=False).decode()
