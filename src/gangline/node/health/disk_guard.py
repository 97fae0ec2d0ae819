"""Keeps a reserve on the disk of a node's data folder, which journals, results and often the server's database share.

There is a reserve of space and one of files: a file system without free inodes accepts no file, however empty it is.

Laws
- Below a reserve no session is leased; running ones continue.
- Below half of a reserve the agent whose sandbox uses the most is ended, one after another until there is room again.
  Like exceeding its own limit, that counts as the agent's failure; sessions that use little are never ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from gangline.domain.errors import RuntimeFailed
from gangline.domain.node_views import DiskState
from gangline.domain.usage import Usage
from gangline.node.health.sandbox_use import SandboxUse
from gangline.store.journal.log import AttemptKey

log = logging.getLogger("gangline.node")

DEFAULT_RESERVE_BYTES = 2 << 30
MAX_SHARE = 0.05
"""Largest share of a small disk that is reserved."""
RESERVE_FILES = 100_000
_LOOK_EVERY_S = 1.0
LITTLE_BYTES = 64 << 20
"""A sandbox that uses less is not to blame for a full disk."""
LITTLE_FILES = 10_000


class Room(NamedTuple):
    """The space on a disk that ordinary programs may still use, and its size."""

    free_bytes: int
    size_bytes: int
    free_files: int = 1
    max_files: int = 0
    """0 if the file system has no fixed number."""


class Evictable(Protocol):
    """The operations of an attempt that the guard needs."""

    key: AttemptKey

    async def usage(self) -> Usage: ...

    def exceeds(self, usage: Usage) -> str | None:
        """Returns why its own limit ends it; None: it does not."""
        ...

    async def evict(self, why: str) -> bool:
        """End the attempt. Returns whether it was running."""
        ...


class DiskGuard:
    """Run `watch` until cancelled."""

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int | None = None,
        *,
        room: Callable[[Path], Room] | None = None,
    ) -> None:
        """reserve_bytes: None: `DEFAULT_RESERVE_BYTES`, less on a small disk; 0: no reserve of space or files.
        room: None asks the kernel.
        """
        self._folder = folder
        self._ask = room or _asked
        self._room = self._ask(folder)
        default = min(DEFAULT_RESERVE_BYTES, int(self._room.size_bytes * MAX_SHARE))
        self._reserve_bytes = default if reserve_bytes is None else reserve_bytes
        self._reserve_files = min(RESERVE_FILES, int(self._room.max_files * MAX_SHARE)) if self._reserve_bytes else 0
        self.is_low = self._is_below(1.0)
        self.sandboxes = SandboxUse()
        """Fed by `look`."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when sessions may be leased again, and when they no longer may."""

    def state(self) -> DiskState:
        return DiskState(
            free_bytes=self._room.free_bytes,
            reserve_bytes=self._reserve_bytes,
            free_files=self._room.free_files,
            reserve_files=self._reserve_files,
            is_low=self.is_low,
        )

    def _is_below(self, share: float) -> bool:
        """Whether less than this share of a reserve is left."""
        return self._lacks_bytes(share) or self._lacks_files(share)

    def _lacks_bytes(self, share: float) -> bool:
        return self._room.free_bytes < self._reserve_bytes * share

    def _lacks_files(self, share: float) -> bool:
        return self._room.free_files < self._reserve_files * share

    async def watch(self, attempts: Callable[[], Iterable[Evictable]]) -> None:
        if self.is_low:
            self._report()
        while True:
            await self.look(list(attempts()))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self, attempts: Iterable[Evictable]) -> None:
        """Run one round: end attempts beyond their own limit, and the largest one if the disk is nearly full."""
        try:
            room = await asyncio.to_thread(self._ask, self._folder)
        except OSError as error:
            log.warning("disk.not_measured message=%s", error)
        else:
            self._note(room)
        taken: list[tuple[Usage, Evictable]] = []
        for attempt in attempts:
            try:
                usage = await attempt.usage()
            except RuntimeFailed:  # gone meanwhile
                continue
            if (why := attempt.exceeds(usage)) is not None:
                await attempt.evict(why)
            taken.append((usage, attempt))
        self.sandboxes.look((attempt.key, usage) for usage, attempt in taken)
        if self._lacks_bytes(0.5):
            sizes = [(usage.disk_bytes or 0, attempt) for usage, attempt in taken]
            await self._end_largest(sizes, LITTLE_BYTES, self._room.free_bytes, "bytes")
        elif self._lacks_files(0.5):
            sizes = [(usage.files or 0, attempt) for usage, attempt in taken]
            await self._end_largest(sizes, LITTLE_FILES, self._room.free_files, "files")

    async def _end_largest(self, sizes: list[tuple[int, Evictable]], little: int, free: int, unit: str) -> None:
        for size, attempt in sorted(sizes, key=lambda pair: pair[0], reverse=True):
            if size < little:
                return
            why = f"the node's disk had {free} {unit} left, and this agent took the most ({size})"
            if await attempt.evict(why):
                log.error("disk.ended session=%s attempt=%d used=%d free=%d unit=%s", *attempt.key, size, free, unit)
                return

    def _note(self, room: Room) -> None:
        self._room = room
        was_low, self.is_low = self.is_low, self._is_below(1.0)
        if self.is_low != was_low:
            self._report()
            self.on_change()

    def _report(self) -> None:
        figures = (self._room.free_bytes, self._reserve_bytes, self._room.free_files, self._reserve_files)
        if self.is_low:
            log.error("disk.low free=%d reserve=%d free_files=%d reserve_files=%d", *figures)
        else:
            log.info("disk.enough free=%d reserve=%d free_files=%d reserve_files=%d", *figures)


def _asked(folder: Path) -> Room:
    """Returns the room on the disk that contains, or will contain, the folder. Blocking."""
    disk = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    return Room(disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize, disk.f_favail, disk.f_files)
