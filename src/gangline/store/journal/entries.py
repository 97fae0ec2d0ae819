"""The entries of the journal: an attempt began, a call was answered, the attempt's result is stored elsewhere.

An entry that is too large for one frame is kept as `Piece` entries, one behind the other.

The format of the journal's files: a row of frames, each either complete or absent.

frame = marker [8 bytes] | length u32 | number u32 | era u32 | crc32 u32 | payload [length bytes], little-endian. The
CRC covers all else, so that no run of zeros (usual at the end of a file after a power failure) passes for a frame.

The marker is random and the same for all files of one writer. After damage it shows where the next frame may begin, and
it cannot be forged by choosing payloads.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, cast

import msgspec
import numpy as np

from gangline.domain.completion import Completion
from gangline.domain.conversation import Document, Image, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.decodable import warm_decoder
from gangline.domain.tokens import decode_msgpack, token_ids
from gangline.machine.durable import sync
from gangline.machine.private import open_private

MARKER_BYTES = 8
_HEAD = struct.Struct("<8sIIII")
_CRC_COVERS = struct.Struct("<8sIII")
FRAME_HEAD_BYTES = _HEAD.size


class AttemptKey(NamedTuple):
    """One attempt at a session."""

    session_id: str
    attempt: int


class AttemptOpened(msgspec.Struct, frozen=True, tag="opened"):
    """A session's attempt began on this node."""

    session_id: str
    attempt: int
    task_id: str
    fence: int
    held_out: bool = False


class Appended(msgspec.Struct, frozen=True, tag="completions"):
    """The choices of one call. The shared part of their prompts is stored with the first."""

    session_id: str
    attempt: int
    completions: tuple[Completion, ...]
    one_prompt: bool = False
    """Whether the others share the first one's `prompt_suffix_ids`, `new_messages` and `tools`, which are omitted
    here.
    """

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Self:
        """Raises: ValueError if they are not from the same attempt."""
        first, *others = completions
        if others and any(key_of(other) != key_of(first) for other in others):
            raise ValueError("completions of several attempts cannot be appended together")
        one_prompt = bool(others) and all(_same_prompt(first, other) for other in others)
        if one_prompt:
            nothing = {"prompt_suffix_ids": token_ids(), "new_messages": (), "tools": ()}
            others = [msgspec.structs.replace(other, **nothing) for other in others]
        return cls(*key_of(first), (first, *others), one_prompt)

    def whole(self) -> tuple[Completion, ...]:
        if not self.one_prompt:
            return self.completions
        first, *others = self.completions
        prompt = {name: getattr(first, name) for name in ("prompt_suffix_ids", "new_messages", "tools")}
        return (first, *(msgspec.structs.replace(other, **prompt) for other in others))


class _AppendedHead(msgspec.Struct, frozen=True, tag="completions"):
    """The fields of `Appended` needed for the index; the rest is skipped without decoding."""

    session_id: str
    attempt: int


class AttemptClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The attempt's result is stored elsewhere, so its entries can be deleted."""

    session_id: str
    attempt: int


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """A part of an entry's MessagePack. The entry exists once its last piece does."""

    session_id: str
    attempt: int
    index: int
    """0 begins an entry; an unfinished entry before it is discarded."""
    is_last: bool
    data: bytes


class _PieceHead(msgspec.Struct, frozen=True, tag="piece"):
    """The fields of `Piece` needed for the index."""

    session_id: str
    attempt: int


Entry = AttemptOpened | Appended | AttemptClosed
EntryHead = AttemptOpened | _AppendedHead | AttemptClosed | _PieceHead
_Stored = Entry | Piece
warm_decoder(Entry, EntryHead, _Stored)


def key_of(record: Entry | EntryHead | Completion) -> AttemptKey:
    return AttemptKey(record.session_id, record.attempt)


def num_text_chars(entry: Entry) -> int:
    """Characters of the texts and media in an entry's new messages, bytes of evidence: its bulk, if large."""
    if not isinstance(entry, Appended):
        return 0
    num_chars = 0
    for completion in entry.completions:
        num_chars += completion.num_evidence_bytes
        for message in completion.new_messages:
            for part in message.parts:
                num_chars += len(part.text) if type(part) is Text else _num_chars(part)
    return num_chars


def _num_chars(part: Part) -> int:
    match part:
        case Text() | Thinking():
            return len(part.text)
        case Image() | Document():
            return len(part.url)
        case ToolCall():
            return len(part.arguments)
        case ToolResult():
            return sum(map(_num_chars, part.content))


def _same_prompt(a: Completion, b: Completion) -> bool:
    return (
        (a.prompt_shared, a.new_messages, a.tools) == (b.prompt_shared, b.new_messages, b.tools)
        and a.prompt_suffix_ids.dtype == b.prompt_suffix_ids.dtype
        and np.array_equal(a.prompt_suffix_ids, b.prompt_suffix_ids)
    )


def decode_entries(payloads: Iterable[bytes]) -> Iterator[Entry]:
    """The complete entries of one attempt's payloads, in order. Raises: msgspec.MsgspecError."""
    gathered: list[bytes] = []
    for payload in payloads:
        stored = decode_msgpack(payload, cast("type[Any]", _Stored))
        if not isinstance(stored, Piece):
            yield stored
            continue
        if stored.index == 0:
            gathered.clear()
        gathered.append(stored.data)
        if stored.is_last:
            yield decode_msgpack(b"".join(gathered), cast("type[Any]", Entry))


def decode_head(payload: bytes) -> EntryHead:
    """The fields needed for the index, without the completions. Raises: msgspec.MsgspecError."""
    return decode_msgpack(payload, cast("type[Any]", EntryHead))


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
    # Not read before it is known to be there: a damaged length may say gigabytes.
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
