"""Keeps a reserve on the disk of a node's data folder, which journals, results and often the server's database share.

Laws
- Below the reserve no session is leased; those that are here go on.
- Below half of it the agent whose sandbox takes the most is ended, one after another until there is room again. It is
  that agent's failure, as is going beyond its own limit, and never that of sessions that take little.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from gangline.domain.contracts import Usage
from gangline.domain.errors import RuntimeFailed
from gangline.store.journal import AttemptKey

__all__ = ["DEFAULT_RESERVE_BYTES", "LITTLE_BYTES", "MAX_SHARE", "DiskGuard", "DiskState"]

log = logging.getLogger("gangline.node")

DEFAULT_RESERVE_BYTES = 2 << 30
MAX_SHARE = 0.05
"""Of a small disk, at most so much is reserved."""
_LOOK_EVERY_S = 1.0
LITTLE_BYTES = 64 << 20
"""A sandbox that takes less is not why a disk is full."""


class DiskState(msgspec.Struct, frozen=True, kw_only=True):
    """For people."""

    free_bytes: int
    reserve_bytes: int
    is_low: bool
    """Whether no session is leased."""


class Evictable(Protocol):
    """What the guard asks of an attempt."""

    key: AttemptKey

    async def usage(self) -> Usage: ...

    def exceeds(self, usage: Usage) -> str | None:
        """Why its own limit ends it, if it does."""
        ...

    async def evict(self, why: str) -> bool:
        """Whether it was running, and is ended now."""
        ...


class DiskGuard:
    """`watch` until cancelled."""

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int | None = None,
        *,
        free_bytes: Callable[[Path], tuple[int, int]] | None = None,
    ) -> None:
        """
        reserve_bytes: None is `DEFAULT_RESERVE_BYTES`, less on a small disk; 0 is none.
        free_bytes: what ordinary programs may still write there, and the disk's size; None asks the kernel.
        """
        self._folder = folder
        self._ask = free_bytes or _asked
        free, size = self._ask(folder)
        default = min(DEFAULT_RESERVE_BYTES, int(size * MAX_SHARE))
        self._reserve_bytes = default if reserve_bytes is None else reserve_bytes
        self._free_bytes = free
        self.is_low = free < self._reserve_bytes
        self.on_change: Callable[[], None] = lambda: None
        """Called when sessions may be leased again, and when they may not any more."""

    def state(self) -> DiskState:
        return DiskState(free_bytes=self._free_bytes, reserve_bytes=self._reserve_bytes, is_low=self.is_low)

    async def watch(self, attempts: Callable[[], Iterable[Evictable]]) -> None:
        while True:
            await self.look(list(attempts()))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self, attempts: Iterable[Evictable]) -> None:
        """Once: end whom its own limit ends, and the largest where the disk is nearly full."""
        try:
            free, _size = await asyncio.to_thread(self._ask, self._folder)
        except OSError as error:
            log.warning("disk.not_measured message=%s", error)
        else:
            self._note(free)
        sizes: list[tuple[int, Evictable]] = []
        for attempt in attempts:
            try:
                usage = await attempt.usage()
            except RuntimeFailed:  # gone meanwhile
                continue
            if (why := attempt.exceeds(usage)) is not None:
                await attempt.evict(why)
            sizes.append((usage.disk_bytes or 0, attempt))
        if self._free_bytes < self._reserve_bytes / 2:
            await self._end_largest(sizes)

    async def _end_largest(self, sizes: list[tuple[int, Evictable]]) -> None:
        for size, attempt in sorted(sizes, key=lambda pair: pair[0], reverse=True):
            if size < LITTLE_BYTES:
                return
            why = f"the node's disk had {self._free_bytes} bytes left, and this agent's files took the most ({size})"
            if await attempt.evict(why):
                log.error("disk.ended session=%s attempt=%d used=%d free=%d", *attempt.key, size, self._free_bytes)
                return

    def _note(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes
        was_low, self.is_low = self.is_low, free_bytes < self._reserve_bytes
        if self.is_low == was_low:
            return
        if self.is_low:
            log.error("disk.low free=%d reserve=%d", free_bytes, self._reserve_bytes)
        else:
            log.info("disk.enough free=%d reserve=%d", free_bytes, self._reserve_bytes)
        self.on_change()


def _asked(folder: Path) -> tuple[int, int]:
    """Of the disk where the folder is, or will be. Blocking."""
    told = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    return told.f_bavail * told.f_frsize, told.f_blocks * told.f_frsize
