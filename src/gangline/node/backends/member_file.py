"""Persists a node's engines over restarts: the operator's additions and removals while it ran.

The changes apply to the engines that the node was started with. A node that is started with other engines ignores them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gangline.machine.durable import write_whole
from gangline.node.backends.engine import BackendSpec

log = logging.getLogger("gangline.backends")


class _Kept(msgspec.Struct, frozen=True):
    named: tuple[BackendSpec, ...]
    """Engines that the node was started with."""
    members: tuple[BackendSpec, ...]
    """Engines that it had last."""


class MemberFile:
    """The file `path`. Contains names of secrets, never secrets."""

    def __init__(self, path: Path, named: Sequence[BackendSpec]) -> None:
        self._path = path
        self._named = tuple(named)

    def changed(self) -> list[BackendSpec] | None:
        """Returns the engines that the node had last, or None if they were not changed or it is now started with
        others.

        Blocking. A file that cannot be read is logged and counts as None.
        """
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.error("backends.unreadable file=%s message=%s", self._path, error)
            return None
        return list(kept.members) if kept.named == self._named else None

    async def keep(self, members: Sequence[BackendSpec]) -> None:
        """Write atomically. A failed write, such as on a full disk, is logged: the change then lasts until the node
        ends."""
        data = msgspec.json.encode(_Kept(self._named, tuple(members)))
        try:
            await asyncio.to_thread(write_whole, self._path, data)
        except OSError as error:
            log.error("backends.not_kept file=%s message=%s", self._path, error)
