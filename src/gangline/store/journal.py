"""The node's journal: an append-only log of the model calls of all its sessions.

Invariants
- `append` returns only when the entry is on the disk (`fdatasync`), so a completed call survives `kill -9` and power
  loss.
- Appends of concurrent sessions share one sync (group commit): a thread of its own writes whatever waits, then answers.
- An entry is a frame `length u32 | crc32 u32 | MessagePack`. A torn tail is cut when the journal is opened; a damaged
  frame in an older segment ends the reading of that segment and is logged, never guessed at.
- Memory holds an index (24 bytes or so for an entry), not the entries. Reading is lazy.
- A segment whose sessions are all closed is deleted, but never the one being written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.errors import DiskFull, StoreError
from gangline.domain.tokens import decode_msgpack, encode_msgpack

__all__ = ["Appended", "AttemptClosed", "AttemptKey", "AttemptOpened", "Journal"]

log = logging.getLogger("gangline.journal")

_FRAME = struct.Struct("<II")
_MAX_FRAME_BYTES = 1 << 30


class AttemptKey(NamedTuple):
    """One attempt at one session."""

    session_id: str
    attempt: int


class AttemptOpened(msgspec.Struct, frozen=True, tag="opened"):
    """A session's attempt began on this node."""

    session_id: str
    attempt: int
    task_id: str
    fence: int


class Appended(msgspec.Struct, frozen=True, tag="completions"):
    """The choices of one call: one entry, so that a crash keeps all of them or none."""

    session_id: str
    attempt: int
    completions: tuple[Completion, ...]


class AttemptClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The attempt's result is safe elsewhere: its entries may go."""

    session_id: str
    attempt: int


_Entry = AttemptOpened | Appended | AttemptClosed


class _Place(NamedTuple):
    segment: int
    offset: int
    length: int


def _key(entry: _Entry | Completion) -> AttemptKey:
    return AttemptKey(entry.session_id, entry.attempt)


def _decode(payload: bytes) -> _Entry:
    return decode_msgpack(payload, cast("type[Any]", _Entry))


class Journal:
    """Raises StoreError (DiskFull when there is no space) from every method that writes."""

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._places: defaultdict[AttemptKey, list[_Place]] = defaultdict(list)
        self._open: dict[AttemptKey, AttemptOpened] = {}
        self._live: Counter[int] = Counter()
        """segment -> entries that belong to attempts not closed"""
        self._waiting: list[tuple[_Entry, bytes, asyncio.Future[None]]] = []
        self._writing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._segment = 0
        self._size = 0
        self._file = -1

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = 64 << 20) -> Self:
        """Open or create; cuts a torn tail. Blocking: call it before the event loop is busy."""
        folder.mkdir(parents=True, exist_ok=True)
        journal = cls(folder, segment_bytes=segment_bytes)
        segments = sorted(int(path.stem) for path in folder.glob("*.log"))
        for number in segments:
            journal._load(number, last=number == segments[-1])
        journal._start_segment(segments[-1] if segments else 1)
        journal._drop_dead_segments()
        return journal

    # -- writing -------------------------------------------------------------------------------------------------

    async def open_attempt(self, opened: AttemptOpened) -> None:
        await self._write(opened)

    async def append(self, completion: Completion) -> None:
        """Durable on return."""
        await self.append_all([completion])

    async def append_all(self, completions: Sequence[Completion]) -> None:
        """Completions of one attempt, at least one. On return all are durable; over a crash or an error, all or none."""
        first = completions[0]
        if any(_key(other) != _key(first) for other in completions):
            raise ValueError("completions of several attempts cannot be appended together")
        await self._write(Appended(first.session_id, first.attempt, tuple(completions)))

    async def close_attempt(self, key: AttemptKey) -> None:
        await self._write(AttemptClosed(*key))

    async def _write(self, entry: _Entry) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((entry, encode_msgpack(entry), done))
        if not self._writing:
            self._writing = True
            loop.create_task(self._flush(), name="journal.flush")  # noqa: RUF006 - `_writing` and the futures own it
        # A cancelled caller must not cancel the write of the others; its own entry is then simply durable as well.
        await asyncio.shield(done)

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                places = await loop.run_in_executor(self._thread, self._write_frames, [data for _, data, _ in batch])
            except (OSError, RuntimeError) as error:
                self._fail(batch, error)
                continue
            for (entry, _, done), place in zip(batch, places, strict=True):
                self._index(entry, place)
                if not done.done():
                    done.set_result(None)
        self._writing = False

    @staticmethod
    def _fail(batch: list[tuple[_Entry, bytes, asyncio.Future[None]]], error: Exception) -> None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        for _, _, done in batch:
            if not done.done():
                done.set_exception(
                    DiskFull("the disk of the journal is full: free some space; calls are refused until then")
                    if full
                    else StoreError(f"the journal cannot be written: {error}")
                )

    def _write_frames(self, payloads: list[bytes]) -> list[_Place]:
        """On the journal's thread. All or nothing: what a failed write left is cut off again."""
        if self._size >= self._segment_bytes:
            os.close(self._file)
            self._start_segment(self._segment + 1)
        start, places, frames = self._size, list[_Place](), list[bytes]()
        for payload in payloads:
            places.append(_Place(self._segment, self._size + _FRAME.size, len(payload)))
            frames += (_FRAME.pack(len(payload), zlib.crc32(payload)), payload)
            self._size += _FRAME.size + len(payload)
        try:
            self._write_all(b"".join(frames))
            os.fdatasync(self._file)
        except OSError:
            self._size = start
            os.ftruncate(self._file, start)
            raise
        return places

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    # -- reading -------------------------------------------------------------------------------------------------

    def unclosed(self) -> list[AttemptOpened]:
        """Attempts that began here and whose result is not safe elsewhere yet."""
        return list(self._open.values())

    async def read(self, key: AttemptKey) -> list[Completion]:
        """The completions of one attempt, in commit order."""
        places = list(self._places.get(key, ()))
        return await asyncio.to_thread(lambda: list(self._read_completions(places)))

    def _read_completions(self, places: list[_Place]) -> Iterator[Completion]:
        for place in places:
            with self._path(place.segment).open("rb") as file:
                file.seek(place.offset)
                entry = _decode(file.read(place.length))
            if isinstance(entry, Appended):
                yield from entry.completions

    # -- index ---------------------------------------------------------------------------------------------------

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.log"

    def _start_segment(self, number: int) -> None:
        self._segment = number
        self._live.setdefault(number, 0)
        self._file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)  # the new file's name must survive too
        os.close(folder)

    def _load(self, number: int, *, last: bool) -> None:
        data = self._path(number).read_bytes()
        offset = 0
        self._live.setdefault(number, 0)
        while (frame_end := self._check_frame(data, offset)) is not None:
            payload = data[offset + _FRAME.size : frame_end]
            self._index(_decode(payload), _Place(number, offset + _FRAME.size, len(payload)))
            offset = frame_end
        if offset == len(data):
            return
        if last:
            log.warning("journal.tail_cut segment=%d bytes=%d", number, len(data) - offset)
            os.truncate(self._path(number), offset)
        else:
            log.error("journal.damaged segment=%d offset=%d bytes_unread=%d", number, offset, len(data) - offset)

    @staticmethod
    def _check_frame(data: bytes, offset: int) -> int | None:
        """End of the frame at `offset`, or None when it is torn or damaged."""
        if offset + _FRAME.size > len(data):
            return None
        length, crc = _FRAME.unpack_from(data, offset)
        end = offset + _FRAME.size + length
        if length > _MAX_FRAME_BYTES or end > len(data) or zlib.crc32(data[offset + _FRAME.size : end]) != crc:
            return None
        return end

    def _index(self, entry: _Entry, place: _Place) -> None:
        key = _key(entry)
        if isinstance(entry, AttemptClosed):
            self._open.pop(key, None)
            for old in self._places.pop(key, ()):
                self._live[old.segment] -= 1
            self._drop_dead_segments()
            return
        if isinstance(entry, AttemptOpened):
            self._open[key] = entry
        self._places[key].append(place)
        self._live[place.segment] += 1

    def _drop_dead_segments(self) -> None:
        """Oldest first, so that an attempt's closing never goes before its opening."""
        for segment in sorted(self._live):
            if self._live[segment] > 0 or segment >= self._segment:
                return
            self._path(segment).unlink(missing_ok=True)
            del self._live[segment]

    async def close(self) -> None:
        """Waits for what is being written. Idempotent."""
        while self._writing:
            await asyncio.sleep(0)
            await asyncio.to_thread(lambda: None)
        self._thread.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
