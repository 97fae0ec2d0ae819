"""The engines of a node, remembered over its restarts: the operator's additions and removals while it ran.

The changes belong to the engines that the node was started with. Started with others, it begins with those.
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
    """Those that the node was started with."""
    members: tuple[BackendSpec, ...]
    """Those that it had in the end."""


class MemberFile:
    """The file `path`; it holds names of secrets, never secrets."""

    def __init__(self, path: Path, named: Sequence[BackendSpec]) -> None:
        self._path = path
        self._named = tuple(named)

    def changed(self) -> list[BackendSpec] | None:
        """The engines that an earlier life of the node had in the end; None where nobody changed those named now.

        Blocking. A file that cannot be read is logged and means None.
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
        """Whole or not at all. A disk that is full is logged: the change holds for this life of the node."""
        data = msgspec.json.encode(_Kept(self._named, tuple(members)))
        try:
            await asyncio.to_thread(write_whole, self._path, data)
        except OSError as error:
            log.error("backends.not_kept file=%s message=%s", self._path, error)
