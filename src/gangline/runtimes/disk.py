"""How much of the disk a sandbox takes, measured again and again, and its end when that is more than it may.

A measure counts blocks as `du` does, hard links once, nothing of other file systems. Between two of them at most
`_PAUSE_S` pass, or ten times as long as one takes. Until the next one a sandbox may take more than its limit: so none
of its files may outgrow it either (see `limits`), and a node keeps a reserve.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gangline.domain.contracts import Usage
from gangline.domain.errors import GanglineError

__all__ = ["MEASURED", "DiskWatch"]

log = logging.getLogger("gangline.runtimes")

MEASURED = "measured every few seconds"
_PAUSE_S = 2.0
_AS_ROOT = ("unshare", "--user", "--map-root-user", "--")
"""An ordinary user's agent may close its folders to that user too, but not to root of a user namespace."""


async def _measured(folders: Sequence[Path]) -> int | None:
    """What these host folders take; None where it cannot be measured. What vanishes meanwhile is not counted."""
    if not folders:
        return None
    prefix = () if os.geteuid() == 0 else _AS_ROOT
    for command in dict.fromkeys((prefix, ())):
        with suppress(OSError):
            process = await asyncio.create_subprocess_exec(
                *(*command, "du", "--summarize", "--total", "--one-file-system", "--block-size=1", "--", *folders),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            )
            try:
                printed, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if lines := printed.splitlines():
                return int(lines[-1].split()[0])
    return None


class DiskWatch:
    """`begin` when there is something to measure, `close` before the sandbox is stopped; then it measures no more."""

    def __init__(
        self, limit_bytes: int | None, folders: Callable[[], Sequence[Path]], end: Callable[[], Awaitable[None]]
    ) -> None:
        """
        limit_bytes: None only measures.
        folders: host folders with what the sandbox has written.
        end: ends all its processes.
        """
        self._limit_bytes = limit_bytes
        self._allowed_bytes = limit_bytes
        self._folders = folders
        self._end = end
        self._usage = Usage(disk_bytes=None)
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._is_closed = False

    @property
    def usage(self) -> Usage:
        """As it was last measured."""
        return self._usage

    def begin(self) -> None:
        """Idempotent."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._watch(), name="disk")

    async def close(self) -> None:
        """An end that has begun is waited for. Idempotent."""
        self._is_closed = True
        if self._task is None:
            return
        if not self._is_ending:
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _PAUSE_S
        while not self._is_closed:
            await asyncio.sleep(pause_s)
            begun_at = loop.time()
            used = await _measured(self._folders())
            pause_s = max(_PAUSE_S, 10 * (loop.time() - begun_at))
            self._usage = Usage(disk_bytes=used, exceeded=self._usage.exceeded)
            if used is not None and self._limit_bytes is not None and used > (self._allowed_bytes or 0):
                # What is there already must not end a grader, which comes after the agent.
                self._allowed_bytes = used + self._limit_bytes
                self._usage = Usage(disk_bytes=used, exceeded="disk_bytes")
                await self._ended()

    async def _ended(self) -> None:
        self._is_ending = True
        try:
            await self._end()
        except GanglineError as error:  # an engine that does not answer; it is asked again when more was written
            log.error("disk.not_ended message=%s", error)
        finally:
            self._is_ending = False
