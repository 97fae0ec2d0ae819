"""Receive messages with descriptors. Importing `socket` would load ten times as much."""

from __future__ import annotations

import _socket
import sys

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_FDS = 16
_FD_BYTES = 4


def received(connection: _socket.socket) -> tuple[bytes, list[int]]:
    """The next message and its descriptors; both empty at the end."""
    room = _socket.CMSG_SPACE(_MAX_FDS * _FD_BYTES)
    try:
        message, ancillary, _flags, _address = connection.recvmsg(_MAX_MESSAGE_BYTES, room, _socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # closed with unread bytes
        return b"", []
    data = b"".join(piece for _level, _kind, piece in ancillary)
    pieces = (data[at : at + _FD_BYTES] for at in range(0, len(data), _FD_BYTES))
    return message, [int.from_bytes(piece, sys.byteorder) for piece in pieces]
