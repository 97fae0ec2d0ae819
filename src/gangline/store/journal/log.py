"""The node's journal: an append-only log of the model calls of all its sessions.

Invariants
- `append_all` returns only once the entry is on disk (`fdatasync`), so a completed call survives `kill -9` and power
  loss. All choices of one call are one entry: either all or none are stored.
- Appends of concurrent sessions share one sync (group commit): a separate thread writes a batch of waiting entries,
  then answers. A large entry is written in pieces, a batch each, so that the small ones of others go between.
- Entries are MessagePack in frames with checksums (see `entries`), numbered within their attempt. Unreadable data is
  logged and never guessed: of each attempt there is an intact beginning, without holes. Damage costs the entries it hit
  and the later ones of their attempts; the unreadable end of a segment is set aside.
- Each opening of an attempt begins an era, and entries of two eras are never joined, even where an opening was lost.
- Memory holds an index (about 150 bytes an entry), not the entries, which are read on demand.
- A segment whose sessions are all closed is deleted, but never the one being written.
- Only one process at a time can open a journal.

Entries are written in a fair order: a large entry of one session does not delay small entries of others.

Laws
- The entries of one attempt are written in the order in which they were put; a large entry once it is encoded.
- A batch, which shares one sync, contains at most one large piece per attempt, and attempts take turns. So a small
  entry waits for a batch of bounded size, however large the entries of other attempts are.
- A large entry is encoded by a separate thread into memory that was made resident before, so the event loop is not
  blocked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.errors import DiskFull, OtherVersion, StoreError
from gangline.domain.tokens import encode_msgpack
from gangline.machine.durable import acquire, is_disk_full
from gangline.machine.prefault import LARGE_BYTES, make_resident
from gangline.machine.private import make_private_folder
from gangline.store.journal.entries import (
    FRAME_HEAD_BYTES,
    Appended,
    AttemptClosed,
    AttemptKey,
    AttemptOpened,
    Entry,
    EntryHead,
    Frame,
    FrameWriter,
    Piece,
    Unframed,
    cut_off,
    decode_entries,
    decode_head,
    key_of,
    num_text_chars,
    read_frame,
    read_frames,
)
from gangline.store.journal.marker import journal_marker

__all__ = ["Appended", "AttemptClosed", "AttemptKey", "AttemptOpened", "Journal"]

log = logging.getLogger("gangline.journal")

PIECE_BYTES = 256 << 10
"""Longest payload written in one piece: half a millisecond on a typical disk."""

_BATCH_BYTES = 2 << 20
"""Size at which a batch accepts no further attempt."""


class Unit(NamedTuple):
    """The payload of one frame: a whole entry or a piece of one."""

    waiting: Waiting
    payload: bytes
    is_last: bool
    """Whether its entry is complete with this unit."""


class Waiting:
    """An entry that is not yet durable."""

    def __init__(self, entry: Entry, payload: bytes) -> None:
        self.entry = entry
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.payload = payload
        self._num_cut = 0
        """Pieces cut off so far."""

    def cut(self) -> Unit:
        """The next piece of the entry, or all of a small one."""
        if len(self.payload) <= PIECE_BYTES:
            return Unit(self, self.payload, is_last=True)
        start = self._num_cut * PIECE_BYTES
        end = start + PIECE_BYTES
        piece = Piece(*key_of(self.entry), self._num_cut, end >= len(self.payload), self.payload[start:end])
        self._num_cut += 1
        return Unit(self, encode_msgpack(piece), piece.is_last)


class CommitQueue:
    """Used on one event loop. Must be closed."""

    def __init__(self) -> None:
        self._by_attempt: dict[AttemptKey, deque[Waiting]] = {}
        """In the order of their turns."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal.encode")
        self._coming: set[asyncio.Future[bytes]] = set()
        """Large entries being encoded."""

    async def put(self, entry: Entry) -> Waiting:
        """A caller cancelled during the call has put nothing."""
        num_chars = num_text_chars(entry)
        payload = encode_msgpack(entry) if num_chars < LARGE_BYTES else await self._encoded_apart(entry, num_chars)
        waiting = Waiting(entry, payload)
        self._by_attempt.setdefault(key_of(entry), deque()).append(waiting)
        return waiting

    async def _encoded_apart(self, entry: Entry, num_chars: int) -> bytes:
        def encoded() -> bytes:
            make_resident(2 * num_chars)  # the encoder uses more than it needs
            return encode_msgpack(entry)

        coming = asyncio.get_running_loop().run_in_executor(self._thread, encoded)
        self._coming.add(coming)
        try:
            return await coming
        finally:
            self._coming.discard(coming)

    async def close(self) -> None:
        """Return once all entries being encoded are put."""
        if self._coming:
            await asyncio.wait(self._coming)
        self._thread.shutdown()

    def take(self) -> list[Unit]:
        """The next batch; empty if nothing waits."""
        batch, num_bytes = list[Unit](), 0
        for key in list(self._by_attempt):
            if num_bytes >= _BATCH_BYTES:
                break
            entries, room = self._by_attempt.pop(key), PIECE_BYTES
            while entries and room > 0:
                unit = entries[0].cut()
                batch.append(unit)
                room -= len(unit.payload)
                if unit.is_last:
                    entries.popleft()
            num_bytes += PIECE_BYTES - room
            if entries:
                self._by_attempt[key] = entries  # at the end of the queue
        return batch

    def drop_rest(self, batch: list[Unit]) -> None:
        """Drop the remaining pieces of entries in a batch that was not written."""
        for unit in batch:
            if not unit.is_last:
                key = key_of(unit.waiting.entry)
                self._by_attempt[key].popleft()
                if not self._by_attempt[key]:
                    del self._by_attempt[key]


class _Place(NamedTuple):
    segment: int
    offset: int
    length: int
    """Length of the payload in bytes."""
    era: int


class Journal:
    """Raises StoreError (DiskFull if there is no space) from every method that writes."""

    def __init__(self, folder: Path, lock: int, marker: bytes, *, segment_bytes: int) -> None:
        """`lock`: the open lock file. `marker`: the marker of its frames. Use `Journal.open`."""
        self._folder = folder
        self._marker = marker
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._places: defaultdict[AttemptKey, list[_Place]] = defaultdict(list)
        self._open: dict[AttemptKey, AttemptOpened] = {}
        self._live: Counter[int] = Counter()
        """segment -> entries that belong to attempts not closed"""
        self._queue = CommitQueue()
        self._flushing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self.on_kept: list[Callable[[Sequence[Completion], bytes], None]] = []
        """Called with the completions of each call and their entry as MessagePack, once they are durable."""
        self._segment = 1
        self._writer: FrameWriter | None = None
        """None only before the journal is opened and after it is closed."""

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = 64 << 20) -> Self:
        """Open or create the journal, cutting off a frame that a crash left incomplete. Blocking: call it before the
        event loop is busy.

        Raises: StoreError if another process has it open, or if entries have a newer format.
        """
        lock = _locked(folder)
        try:
            journal = cls(folder, lock, journal_marker(folder), segment_bytes=segment_bytes)
            journal._load_all()
        except OSError as error:
            os.close(lock)
            raise _explained(error) from error
        except BaseException:
            os.close(lock)
            raise
        return journal

    # -- writing -------------------------------------------------------------------------------------------------

    async def open_attempt(self, opened: AttemptOpened) -> None:
        """Starts over if the attempt is already open: it was returned and is leased again."""
        await self._write(opened)

    async def append(self, completion: Completion) -> None:
        """Durable on return."""
        await self.append_all([completion])

    async def append_all(self, completions: Sequence[Completion]) -> None:
        """Completions of one attempt, at least one. All are durable on return; after a crash or an error, either all or
        none.
        """
        payload = await self._write(Appended.of(completions))
        for hear in self.on_kept:
            hear(completions, payload)

    async def close_attempt(self, key: AttemptKey) -> None:
        await self._write(AttemptClosed(*key))

    async def _write(self, entry: Entry) -> bytes:
        """Durable on return. Returns the entry as MessagePack."""
        waiting = await self._queue.put(entry)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush(), name="journal.flush")
        await waiting.done  # only this entry's: it is written even if the caller is cancelled
        return waiting.payload

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._queue.take():
            try:
                places = await loop.run_in_executor(self._thread, self._write_frames, self._numbered(batch))
            except Exception as error:  # any error: no caller may wait forever
                self._queue.drop_rest(batch)
                _fail(batch, error)
                continue
            for (waiting, _, is_last), place in zip(batch, places, strict=True):
                self._index(waiting.entry, place)
                if is_last and not waiting.done.done():
                    waiting.done.set_result(None)
        self._flushing = None

    def _numbered(self, batch: list[Unit]) -> list[Unframed]:
        """Payloads with their number and era within their attempt. These are assigned on writing, so a failed write
        uses up none.
        """
        last: dict[AttemptKey, tuple[int, int]] = {}
        frames: list[Unframed] = []
        for waiting, payload, _ in batch:
            key = key_of(waiting.entry)
            number, era = last.get(key) or self._next_number(key)
            if number == 0 or isinstance(waiting.entry, AttemptOpened):
                number, era = 0, secrets.randbits(32)
            frames.append(Unframed(number, era, payload))
            last[key] = (0 if isinstance(waiting.entry, AttemptClosed) else number + 1, era)
        return frames

    def _next_number(self, key: AttemptKey) -> tuple[int, int]:
        """The next number and the era."""
        places = self._places.get(key)
        return (len(places), places[-1].era) if places else (0, 0)

    def _write_frames(self, frames: list[Unframed]) -> list[_Place]:
        """Runs on the journal's thread. All or none."""
        assert self._writer is not None
        if self._writer.size >= self._segment_bytes:
            full, self._writer = self._writer, FrameWriter(self._path(self._segment + 1), self._marker)
            self._segment += 1
            full.close()
        offsets = self._writer.append(frames)
        return [
            _Place(self._segment, offset, len(frame.payload), frame.era)
            for offset, frame in zip(offsets, frames, strict=True)
        ]

    # -- reading -------------------------------------------------------------------------------------------------

    def unclosed(self) -> list[AttemptOpened]:
        """Attempts that began here and whose result is not yet stored elsewhere."""
        return list(self._open.values())

    async def read(self, key: AttemptKey) -> list[Completion]:
        """The completions of one attempt, in commit order. Raises: StoreError if the disk cannot return them."""
        places = list(self._places.get(key, ()))
        try:
            return await asyncio.to_thread(self._read_completions, places)
        except OSError as error:
            raise StoreError(f"the journal cannot be read: {error}") from error

    def _read_completions(self, places: list[_Place]) -> list[Completion]:
        completions: list[Completion] = []
        for entry in decode_entries(self._payloads(places)):
            completions += entry.whole() if isinstance(entry, Appended) else ()
        return completions

    def _payloads(self, places: list[_Place]) -> Iterator[bytes]:
        """Raises: StoreError."""
        for segment, found in groupby(places, lambda place: place.segment):
            with self._path(segment).open("rb") as file:
                for place in found:
                    yield self._payload(file, place)

    def _payload(self, file: BinaryIO, place: _Place) -> bytes:
        """Raises: StoreError."""
        frame = read_frame(file, place.offset, place.offset + FRAME_HEAD_BYTES + place.length, self._marker)
        if frame is None:
            raise StoreError(f"the journal is damaged: {self._path(place.segment)}, at byte {place.offset}.")
        return frame.payload

    # -- index ---------------------------------------------------------------------------------------------------

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.log"

    def _load_all(self) -> None:
        segments = sorted(int(path.stem) for path in self._folder.glob("*.log"))
        for number in segments:
            self._load(number)
        self._segment = segments[-1] if segments else 1
        self._live.setdefault(self._segment, 0)
        self._writer = FrameWriter(self._path(self._segment), self._marker)
        self._drop_dead_segments()

    def _load(self, segment: int) -> None:
        self._live.setdefault(segment, 0)
        path, end = self._path(segment), 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for frame in read_frames(file, size, self._marker):
                if frame.offset > end:
                    log.error(
                        "journal.damaged segment=%d offset=%d bytes=%d: passed over", segment, end, frame.offset - end
                    )
                self._restore(segment, frame)
                end = frame.end
        if end < size:
            aside = cut_off(path, end)
            log.error(
                "journal.cut segment=%d offset=%d bytes=%d aside=%s: torn by a crash, or damaged",
                *(segment, end, size - end, aside),
            )

    def _restore(self, segment: int, frame: Frame) -> None:
        """Raises: StoreError if the entry has a newer format."""
        try:
            entry = decode_head(frame.payload)
        except msgspec.MsgspecError as error:
            raise OtherVersion(
                f"{self._path(segment)} was written by another version of Gangline, at byte {frame.offset}: {error}. "
                "Finish its sessions with that version, or use another data folder."
            ) from error
        key = key_of(entry)
        number, era = self._next_number(key)
        goes_on = frame.number == number and (number == 0 or frame.era == era)
        if not isinstance(entry, AttemptOpened | AttemptClosed) and not goes_on:
            log.error(
                "journal.hole session=%s attempt=%d has=%d found=%d: not used, for what came before it is lost",
                *(*key, number, frame.number),
            )
            return
        self._index(entry, _Place(segment, frame.offset, len(frame.payload), frame.era))

    def _index(self, entry: Entry | EntryHead, place: _Place) -> None:
        key = key_of(entry)
        self._live.setdefault(place.segment, 0)
        if isinstance(entry, AttemptClosed):
            self._forget(key)
            self._drop_dead_segments()
            return
        if isinstance(entry, AttemptOpened):
            self._forget(key)  # left by an earlier lease, or its closing was lost with damage
            self._open[key] = entry
        self._places[key].append(place)
        self._live[place.segment] += 1

    def _forget(self, key: AttemptKey) -> None:
        self._open.pop(key, None)
        for place in self._places.pop(key, ()):
            self._live[place.segment] -= 1

    def _drop_dead_segments(self) -> None:
        """Oldest first, so that an attempt's closing is never deleted before its opening."""
        for segment in sorted(self._live):
            if self._live[segment] > 0 or segment >= self._segment:
                return
            try:
                self._path(segment).unlink(missing_ok=True)
            except OSError as error:  # retried at the next closing
                log.error("journal.not_deleted file=%s message=%s", self._path(segment), error)
                return
            del self._live[segment]

    async def close(self) -> None:
        """Waits for pending writes. Idempotent."""
        await self._queue.close()
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        self._thread.shutdown()
        if self._writer is not None:
            self._writer.close()
            os.close(self._lock)
            self._writer = None


def _locked(folder: Path) -> int:
    """The journal's lock file, open and locked. Raises: StoreError."""
    try:
        make_private_folder(folder)
        return acquire(folder / "lock")
    except BlockingIOError as error:
        raise StoreError(f"another process has the journal {folder} open: is this node running already?") from error
    except OSError as error:
        raise _explained(error) from error


def _fail(batch: list[Unit], error: Exception) -> None:
    for unit in batch:
        if not unit.waiting.done.done():
            explained = _explained(error)
            explained.__cause__ = error
            unit.waiting.done.set_exception(explained)


def _explained(error: Exception) -> StoreError:
    if is_disk_full(error):
        return DiskFull("the disk of the journal is full: free some space; calls are refused until then")
    return StoreError(f"the journal cannot be written: {error}")
