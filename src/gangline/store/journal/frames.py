"""A file of frames: the format of a journal's segment. Each frame is either complete or absent.

frame = marker [8 bytes] | length u32 | number u32 | era u32 | crc32 u32 | payload [length bytes], little-endian. The
CRC covers everything else, so that a run of zeros (usual at the end of a file after a power failure) is not a valid
frame.

The marker is random and the same for all files of one writer. After damage it shows where the next frame may begin.
Payloads cannot forge it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gangline.machine.durable import sync
from gangline.machine.private import open_private

MARKER_BYTES = 8
_HEAD = struct.Struct("<8sIIII")
_CRC_COVERS = struct.Struct("<8sIII")
FRAME_HEAD_BYTES = _HEAD.size


class Unframed(NamedTuple):
    """The content of a frame."""

    number: int
    era: int
    payload: bytes


class Frame(NamedTuple):
    offset: int
    """Offset of its beginning in the file, in bytes."""
    number: int
    era: int
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + FRAME_HEAD_BYTES + len(self.payload)


def frame_head(marker: bytes, unframed: Unframed) -> bytes:
    return _HEAD.pack(marker, len(unframed.payload), unframed.number, unframed.era, _crc(marker, unframed))


def _crc(marker: bytes, unframed: Unframed) -> int:
    covered = _CRC_COVERS.pack(marker, len(unframed.payload), unframed.number, unframed.era)
    return zlib.crc32(unframed.payload, zlib.crc32(covered))


def read_frame(file: BinaryIO, offset: int, end: int, marker: bytes | None) -> Frame | None:
    """The frame that begins at `offset`; None if it is torn or damaged, or would extend past `end`.

    marker: None accepts any.
    """
    file.seek(offset)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    found, length, number, era, crc = _HEAD.unpack(head)
    # Check before reading that the payload fits: a damaged length may be gigabytes.
    if (marker is not None and found != marker) or offset + _HEAD.size + length > end:
        return None
    payload = file.read(length)
    if len(payload) != length or _crc(found, Unframed(number, era, payload)) != crc:
        return None
    return Frame(offset, number, era, payload)


def read_frames(file: BinaryIO, end: int, marker: bytes) -> Iterator[Frame]:
    """All intact frames, in order, skipping damage between them."""
    offset: int | None = 0
    while offset is not None:
        while (frame := read_frame(file, offset, end, marker)) is not None:
            yield frame
            offset = frame.end
        offset = _next_marker(file, offset + 1, end, marker)


def _next_marker(file: BinaryIO, start: int, end: int, marker: bytes) -> int | None:
    if start >= end:
        return None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        found = whole.find(marker, start, end)
    return None if found < 0 else found


def cut_off(path: Path, end: int) -> Path:
    """Shorten the file to `end` bytes; the rest is durable in the returned file. Raises: OSError."""
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
    """The end of one file. All methods raise OSError, after which the file is unchanged.

    Blocking; must be used by one thread at a time.
    """

    def __init__(self, path: Path, marker: bytes) -> None:
        """Continues at the end of the file. Creates a missing file durably."""
        self._marker = marker
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.size = os.fstat(self._file).st_size
            sync(path.parent)
        except OSError:
            os.close(self._file)
            raise
        self._is_torn = False
        """Whether a failed write left bytes after `size`."""

    def append(self, frames: list[Unframed]) -> list[int]:
        """Append all frames or none, durable on return. Returns their offsets."""
        if self._is_torn:
            self._cut()
        offsets, pieces, end = list[int](), list[bytes](), self.size
        for frame in frames:
            offsets.append(end)
            pieces += (frame_head(self._marker, frame), frame.payload)
            end += _HEAD.size + len(frame.payload)
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
