"""The handle of a sandbox, over what its runtime makes it of.

Laws
- Nothing is begun or ended beside anything else: a lock is held meanwhile.
- A kill ends every process and keeps what the sandbox has written; the next command begins its life again.
- What was stopped stays stopped. A stop that failed may be retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from gangline.domain.contracts import ExecResult, OutputSink, Usage
from gangline.domain.errors import RuntimeFailed, RuntimeFault
from gangline.domain.task import LimitsSpec
from gangline.runtimes.commands.execution import Executions, Order
from gangline.runtimes.shared.disk import DiskWatch
from gangline.runtimes.shared.files import SharedFolders
from gangline.runtimes.shared.handle import ExecRequest, Handle, SandboxFacts
from gangline.runtimes.shared.threads import run_to_end

__all__ = ["Entry", "Life", "SandboxHandle", "begun"]

_T = TypeVar("_T")


class Entry(NamedTuple):
    """A command's way into a sandbox that is alive."""

    order: Order
    end_all: Callable[[], Awaitable[None]]
    """Kills every process of this very life, and waits for their end."""


class Life(Protocol):
    """What a runtime makes one sandbox of: folders or a layer, which last, and processes, which come and go.

    The handle's lock is held over `start`, `entry` and `end`.
    """

    facts: SandboxFacts
    label: str
    """Marks processes for the reaper."""
    asked_limits: LimitsSpec
    moves_files_alive: bool
    """Whether files can be moved only while the sandbox is alive."""

    @property
    def is_alive(self) -> bool:
        """Whether commands can be started."""
        ...

    async def make(self) -> None:
        """Make what lasts, once."""
        ...

    async def start(self) -> None:
        """Begin its processes, where `is_alive` is false; `end` follows where this fails. Raises: RuntimeFailed."""
        ...

    def entry(self, request: ExecRequest) -> Entry:
        """Raises: InvalidRequest, RuntimeUnavailable."""
        ...

    def doom(self) -> None:
        """Order the death of all processes. Returns at once."""
        ...

    async def end(self, *, is_last: bool) -> None:
        """Wait until no process is left. `is_last`: `remove` follows. Idempotent."""
        ...

    async def remove(self) -> None:
        """Remove what lasts. Idempotent."""
        ...

    def files(self) -> AbstractContextManager[SharedFolders]:
        """Access to the sandbox's files, held until the context ends."""
        ...

    def written(self) -> Sequence[Path]:
        """Host folders with what it has written; none where nobody can say."""
        ...

    def root(self) -> Path | None:
        """See `root_inside`."""
        ...

    def limits(self) -> dict[str, str]:
        """See `RuntimeHandle.limits`."""
        ...


async def begun(life: Life) -> SandboxHandle:
    """A started sandbox; one that does not start leaves nothing. Raises: RuntimeFailed, RuntimeUnavailable."""
    handle = SandboxHandle(life)
    try:
        await handle.begin()
    except BaseException:
        with suppress(RuntimeFault):  # what it left is the reaper's
            await asyncio.shield(handle.stop())
        raise
    return handle


class SandboxHandle(Handle):
    """See `RuntimeHandle`."""

    def __init__(self, life: Life) -> None:
        super().__init__(life.facts)
        self._life = life
        self._executions = Executions(life.label)
        self._disk = DiskWatch(life.asked_limits, life.written, self.kill, root=life.root)
        self._lock = asyncio.Lock()
        self._stopped = False
        self._removed = False

    async def begin(self) -> None:
        await self._life.make()
        async with self._lock:
            await self._ensure_alive()
        self._disk.begin()

    async def _ensure_alive(self) -> None:
        """The lock is held. Raises: RuntimeFailed."""
        self._check_not_stopped()
        if self._life.is_alive:
            return
        await self._end()
        try:
            await self._life.start()
        except BaseException:
            await asyncio.shield(self._end())
            raise

    async def execute(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        async with self._lock:
            await self._ensure_alive()
            entry = self._life.entry(request)
        return await self._executions.run(
            entry.order,
            end_all=entry.end_all,
            stdin=request.stdin,
            timeout_s=request.timeout_s,
            on_output=on_output,
            max_output_bytes=request.max_output_bytes,
        )

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._moved(lambda files: files.write(path, data, mode))

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return await self._moved(lambda files: files.read(path, max_bytes))

    async def clear(self, path: str) -> None:
        await self._moved(lambda files: files.clear(path))

    async def _moved(self, work: Callable[[SharedFolders], _T]) -> _T:
        if self._life.moves_files_alive:
            async with self._lock:
                await self._ensure_alive()
                opened = self._life.files()
        else:
            self._check_not_stopped()
            opened = self._life.files()

        def move() -> _T:
            with opened as files:
                return work(files)

        return await run_to_end(move)

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeFailed(f"sandbox {self.runtime_id} was stopped.")

    async def kill(self) -> None:
        async with self._lock:
            await self._end()

    async def _end(self, *, is_last: bool = False) -> None:
        """End all processes. The lock is held."""
        self._life.doom()
        await self._executions.close()
        await self._life.end(is_last=is_last)

    async def stop(self) -> None:
        await self._disk.close()
        async with self._lock:
            if self._removed:
                return
            self._stopped = True
            await self._end(is_last=True)
            await self._life.remove()
            self._removed = True

    async def usage(self) -> Usage:
        self._check_not_stopped()
        return self._disk.usage

    def limits(self) -> dict[str, str]:
        return self._life.limits()
