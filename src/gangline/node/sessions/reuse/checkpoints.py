"""Checkpoints of sessions at their turns, bounded in bytes and in time.

One is made before each model call is sampled: the agent has done its work and waits, so that its files are those of the
turn. It is kept while the session lasts and for a while after it. When all together take too much of the disk, the
session that takes the most loses its oldest: an agent that writes much pushes nobody else's out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from gangline.domain.errors import GanglineError, NotFound, RuntimeFailed, RuntimeUnavailable
from gangline.domain.sandbox import Checkpoint, Sandbox

log = logging.getLogger("gangline.node")

_FILE_BYTES = 4096
"""What each file counts alongside its content: a disk has only so many, also of empty ones."""


class Checkpoints:
    """All of a node. `close` it at the end."""

    def __init__(
        self,
        release: Callable[[Checkpoint], Awaitable[None]] | None = None,
        *,
        max_bytes: int = 8 << 30,
        hold_s: float = 600.0,
        found: Iterable[Checkpoint] = (),
    ) -> None:
        """
        release: see `Runtime.release`; None: this node keeps no checkpoints.
        max_bytes: of all together on the disk.
        hold_s: how long they outlive their session.
        found: those that an earlier life of this node left.
        """
        self._release_one = release
        self._max_bytes = max_bytes
        self._hold_s = hold_s
        self._kept: defaultdict[str, list[Checkpoint]] = defaultdict(list)
        """Session -> its checkpoints, the oldest first."""
        self._bases: dict[str, int] = {}
        """Session -> bytes of the prepared files that its checkpoints are over."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        for checkpoint in sorted(found, key=lambda one: one.made_at):
            self._kept[checkpoint.name].append(checkpoint)

    @property
    def num_kept(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def num_bytes(self) -> int:
        """On the disk."""
        kept = sum(one.num_bytes for each in self._kept.values() for one in each)
        return kept + sum(num for session_id, num in self._bases.items() if self._kept.get(session_id))

    async def begin(self, session_id: str, handle: Sandbox) -> None:
        """Freeze the prepared files, so that later checkpoints have little to copy. Before the agent starts.

        Raises: RuntimeUnavailable where the runtime has no checkpoints; RuntimeFailed.
        """
        if self._release_one is None:
            raise RuntimeUnavailable("capture.checkpoints needs a node that keeps checkpoints; this one does not.")
        base = await handle.checkpoint(session_id)
        self._bases[session_id] = base.num_bytes
        await self._release(base)  # it stays as long as anything is over it

    async def take(self, session_id: str, handle: Sandbox) -> str | None:
        """The id of the checkpoint of this turn; None when it could not be made, which the session outlives."""
        try:
            made = await handle.checkpoint(session_id)
            self._kept[session_id].append(made)
            await self._make_room()
        except GanglineError as error:
            log.warning("checkpoint.failed session=%s message=%s", session_id, error)
            return None
        return made.checkpoint_id

    def find(self, session_id: str, checkpoint_id: str) -> Checkpoint:
        """Raises: NotFound when it was never made, or is removed."""
        for checkpoint in self._kept.get(session_id, ()):
            if checkpoint.checkpoint_id == checkpoint_id:
                return checkpoint
        raise NotFound(f"session {session_id} has no checkpoint {checkpoint_id} any more on this node.")

    def hold(self, session_id: str) -> None:
        """Keep a session's checkpoints, also after its end, until `ended` is called."""
        if (timer := self._timers.pop(session_id, None)) is not None:
            timer.cancel()

    def ended(self, session_id: str) -> None:
        """The session is over, or its hold is: its checkpoints go after the time that they are held for."""
        self.hold(session_id)
        if session_id in self._kept:
            loop = asyncio.get_running_loop()
            self._timers[session_id] = loop.call_later(self._hold_s, self._forget, session_id)
        else:
            self._bases.pop(session_id, None)

    def all_ended(self, but: Iterable[str]) -> None:
        """At the node's start: the sessions that it continues with are `but`."""
        for session_id in set(self._kept) - set(but):
            self.ended(session_id)

    async def close(self) -> None:
        """Their files go with the sandboxes of the node."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _release(self, checkpoint: Checkpoint) -> None:
        assert self._release_one is not None
        await self._release_one(checkpoint)

    def _forget(self, session_id: str) -> None:
        self._timers.pop(session_id, None)
        self._bases.pop(session_id, None)
        task = asyncio.create_task(self._released(self._kept.pop(session_id, [])))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _released(self, checkpoints: Iterable[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            with suppress(RuntimeFailed):  # the keeper is gone, and they with it
                await self._release(checkpoint)

    def _room(self, session_id: str) -> int:
        """That a session's checkpoints take."""
        kept = self._kept[session_id]
        return sum(one.num_bytes for one in kept) + _FILE_BYTES * _num_files(kept)

    async def _make_room(self) -> None:
        while self.num_bytes + _FILE_BYTES * sum(map(_num_files, self._kept.values())) > self._max_bytes:
            session_id = max((session_id for session_id, kept in self._kept.items() if kept), key=self._room)
            oldest = self._kept[session_id].pop(0)
            log.warning("checkpoint.removed session=%s bytes=%d", session_id, oldest.num_bytes)
            await self._release(oldest)


def _num_files(checkpoints: Iterable[Checkpoint]) -> int:
    return sum(checkpoint.num_files for checkpoint in checkpoints)
