"""A file of frames: what a journal's segment is made of. Each frame is there whole, or it is not there.

frame = length u32 | number u32 | crc32 u32 | payload [length bytes], little-endian. The CRC covers length, number and
payload, so that no run of zeros (what a power failure leaves at the end of a file) passes for a frame.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gangline.private import open_private

__all__ = ["FRAME_HEAD_BYTES", "Frame", "FrameWriter", "cut_off", "frame_head", "read_frame", "read_frames"]

_HEAD = struct.Struct("<III")
_CRC_COVERS = struct.Struct("<II")
FRAME_HEAD_BYTES = _HEAD.size


class Frame(NamedTuple):
    offset: int
    """Where it begins in its file, bytes."""
    number: int
    payload: bytes


def frame_head(number: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), number, _crc(number, payload))


def _crc(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_CRC_COVERS.pack(len(payload), number)))


def read_frame(file: BinaryIO, offset: int, end: int) -> Frame | None:
    """The frame that begins at `offset`; None when it is torn or damaged, or would not end by `end`."""
    file.seek(offset)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, number, crc = _HEAD.unpack(head)
    if (
        offset + _HEAD.size + length > end
    ):  # not read before it is known to be there: a damaged length may say gigabytes
        return None
    payload = file.read(length)
    return Frame(offset, number, payload) if len(payload) == length and _crc(number, payload) == crc else None


def read_frames(file: BinaryIO, end: int) -> Iterator[Frame]:
    """From the beginning of the file, up to the first frame that is not whole."""
    offset = 0
    while (frame := read_frame(file, offset, end)) is not None:
        yield frame
        offset += _HEAD.size + len(frame.payload)


def cut_off(path: Path, end: int) -> Path:
    """Shorten the file to `end` bytes; what stood behind is durable in the file that is returned. Raises: OSError."""
    aside = path.with_name(f"{path.stem}-{end}.damaged")
    with path.open("r+b") as file, open(aside, "wb", opener=open_private) as kept:
        file.seek(end)
        shutil.copyfileobj(file, kept)
        kept.flush()
        os.fsync(kept.fileno())
        file.truncate(end)
        os.fsync(file.fileno())
    return aside


class FrameWriter:
    """The end of one file. All methods raise OSError, after which the file holds what it held before.

    Blocking; to be used by one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Goes on at the end of the file; makes it if missing, its name durable."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.size = os.fstat(self._file).st_size
            _sync_folder(path.parent)
        except OSError:
            os.close(self._file)
            raise
        self._is_torn = False
        """Whether a failed write has left bytes behind `size`."""

    def append(self, frames: list[tuple[int, bytes]]) -> list[int]:
        """All or none, durable on return: (number, payload) of each -> their offsets."""
        if self._is_torn:
            self._cut()
        offsets, pieces, end = list[int](), list[bytes](), self.size
        for number, payload in frames:
            offsets.append(end)
            pieces += (frame_head(number, payload), payload)
            end += _HEAD.size + len(payload)
        self._is_torn = True
        try:
            _write_all(self._file, b"".join(pieces))
            os.fdatasync(self._file)
        except OSError:
            self._cut()
            raise
        self._is_torn = False
        self.size = end
        return offsets

    def _cut(self) -> None:
        os.ftruncate(self._file, self.size)
        self._is_torn = False

    def close(self) -> None:
        os.close(self._file)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
