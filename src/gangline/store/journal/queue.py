"""Entries on their way to the disk, in a fair order: no session's large entry holds up the small ones of others.

Laws
- The entries of one attempt are written in the order in which they were put, a large one once it is encoded.
- A batch, which shares one sync, takes at most one large piece of each attempt, and attempts take turns. So a small
  entry waits for a batch of bounded size, however large the entries of other attempts are.
- A large entry is encoded by a thread of its own, into memory that is resident before, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from gangline.domain.tokens import encode_msgpack
from gangline.machine.prefault import LARGE_BYTES, make_resident
from gangline.store.journal.entries import AttemptKey, Entry, Piece, key_of, num_text_chars

__all__ = ["PIECE_BYTES", "CommitQueue", "Unit", "Waiting"]

PIECE_BYTES = 256 << 10
"""Longest payload that is written in one piece: half a millisecond of a usual disk."""

_BATCH_BYTES = 2 << 20
"""Size at which a batch takes in no further attempt."""


class Unit(NamedTuple):
    """The payload of one frame: a whole entry, or a piece of one."""

    waiting: Waiting
    payload: bytes
    is_last: bool
    """Whether its entry is durable with it."""


class Waiting:
    """An entry that is not durable yet."""

    def __init__(self, entry: Entry, payload: bytes) -> None:
        self.entry = entry
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.payload = payload
        self._num_cut = 0
        """Pieces cut off so far."""

    def cut(self) -> Unit:
        """The next piece of the entry, or the whole of a small one."""
        if len(self.payload) <= PIECE_BYTES:
            return Unit(self, self.payload, is_last=True)
        start = self._num_cut * PIECE_BYTES
        end = start + PIECE_BYTES
        piece = Piece(*key_of(self.entry), self._num_cut, end >= len(self.payload), self.payload[start:end])
        self._num_cut += 1
        return Unit(self, encode_msgpack(piece), piece.is_last)


class CommitQueue:
    """Used on one event loop. To be closed."""

    def __init__(self) -> None:
        self._by_attempt: dict[AttemptKey, deque[Waiting]] = {}
        """In the order of their turns."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal.encode")
        self._coming: set[asyncio.Future[bytes]] = set()
        """Large entries that are being encoded."""

    async def put(self, entry: Entry) -> Waiting:
        """A caller that is cancelled meanwhile has put nothing."""
        num_chars = num_text_chars(entry)
        payload = encode_msgpack(entry) if num_chars < LARGE_BYTES else await self._encoded_apart(entry, num_chars)
        waiting = Waiting(entry, payload)
        self._by_attempt.setdefault(key_of(entry), deque()).append(waiting)
        return waiting

    async def _encoded_apart(self, entry: Entry, num_chars: int) -> bytes:
        def encoded() -> bytes:
            make_resident(2 * num_chars)  # the encoder asks for more than it needs
            return encode_msgpack(entry)

        coming = asyncio.get_running_loop().run_in_executor(self._thread, encoded)
        self._coming.add(coming)
        try:
            return await coming
        finally:
            self._coming.discard(coming)

    async def close(self) -> None:
        """Return when all that is being encoded is put."""
        if self._coming:
            await asyncio.wait(self._coming)
        self._thread.shutdown()

    def take(self) -> list[Unit]:
        """The next batch; empty when nothing waits."""
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
                self._by_attempt[key] = entries  # behind all others
        return batch

    def drop_rest(self, batch: list[Unit]) -> None:
        """Forget the pieces that would follow those of a batch that was not written."""
        for unit in batch:
            if not unit.is_last:
                key = key_of(unit.waiting.entry)
                self._by_attempt[key].popleft()
                if not self._by_attempt[key]:
                    del self._by_attempt[key]
