"""Checkpoints of sessions at their turns, limited in bytes and in time.

One is made before each model call is sampled: the agent has done its work and waits, so the files are those of the
turn. It is kept during the session and for a while after it. When all checkpoints take too much disk, the session that
takes the most loses its oldest one: an agent that writes a lot does not displace other sessions' checkpoints.
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
"""Bytes that each file counts in addition to its content: a disk has a limited number of files, even empty ones."""


class Checkpoints:
    """All checkpoints of a node. Call `close` at the end."""

    def __init__(
        self,
        release: Callable[[Checkpoint], Awaitable[None]] | None = None,
        *,
        max_bytes: int = 8 << 30,
        hold_s: float = 600.0,
        found: Iterable[Checkpoint] = (),
    ) -> None:
        """release: see `Runtime.release`; None: this node keeps no checkpoints.
        max_bytes: of all checkpoints on the disk.
        hold_s: how long they outlive their session.
        found: left from before a restart of the node.
        """
        self._release_one = release
        self._max_bytes = max_bytes
        self._hold_s = hold_s
        self._kept: defaultdict[str, list[Checkpoint]] = defaultdict(list)
        """Session -> its checkpoints, oldest first."""
        self._bases: dict[str, int] = {}
        """Session -> bytes of the prepared files that its checkpoints are based on."""
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

    async def begin(self, session_id: str, sandbox: Sandbox) -> None:
        """Freeze the prepared files, so that later checkpoints copy little. Call before the agent starts.

        Raises: RuntimeUnavailable when the runtime has no checkpoints; RuntimeFailed.
        """
        if self._release_one is None:
            raise RuntimeUnavailable("capture.checkpoints needs a node that keeps checkpoints; this one does not.")
        base = await sandbox.checkpoint(session_id)
        self._bases[session_id] = base.num_bytes
        await self._release(base)  # kept as long as a checkpoint is based on it

    async def take(self, session_id: str, sandbox: Sandbox) -> str | None:
        """Returns the id of this turn's checkpoint; None if it could not be made, after which the session continues."""
        try:
            made = await sandbox.checkpoint(session_id)
            self._kept[session_id].append(made)
            await self._make_room()
        except GanglineError as error:
            log.warning("checkpoint.failed session=%s message=%s", session_id, error)
            return None
        return made.checkpoint_id

    def find(self, session_id: str, checkpoint_id: str) -> Checkpoint:
        """Raises: NotFound when it was never made or was removed."""
        for checkpoint in self._kept.get(session_id, ()):
            if checkpoint.checkpoint_id == checkpoint_id:
                return checkpoint
        raise NotFound(f"session {session_id} has no checkpoint {checkpoint_id} any more on this node.")

    def hold(self, session_id: str) -> None:
        """Keep a session's checkpoints, even after its end, until `ended` is called."""
        if (timer := self._timers.pop(session_id, None)) is not None:
            timer.cancel()

    def ended(self, session_id: str) -> None:
        """Record that a session, or its hold, is over: its checkpoints are removed after `hold_s`."""
        self.hold(session_id)
        if session_id in self._kept:
            loop = asyncio.get_running_loop()
            self._timers[session_id] = loop.call_later(self._hold_s, self._forget, session_id)
        else:
            self._bases.pop(session_id, None)

    def all_ended(self, but: Iterable[str]) -> None:
        """Call at the node's start; `but` are the sessions that it continues."""
        for session_id in set(self._kept) - set(but):
            self.ended(session_id)

    async def close(self) -> None:
        """Cancel all timers and releases. The files are removed with the node's sandboxes."""
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
            with suppress(RuntimeFailed):  # the keeper is gone with its checkpoints
                await self._release(checkpoint)

    def _room(self, session_id: str) -> int:
        """Returns the bytes that a session's checkpoints take, with the allowance for each file."""
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
