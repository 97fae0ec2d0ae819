"""The handle of a sandbox, over what its runtime makes it of.

Laws
- Nothing is begun or ended beside anything else: a lock is held meanwhile.
- A kill ends every process and keeps what the sandbox has written; the next command begins its life again.
- What was stopped stays stopped. A stop that failed may be retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from gangline.domain.errors import RuntimeFailed, RuntimeFault
from gangline.domain.sandbox import Channel, Checkpoint, ExecRequest, ExecResult, OutputSink, Sandbox
from gangline.domain.task import LimitsSpec
from gangline.domain.usage import Usage
from gangline.sandbox.commands.execution import EndAll, Executions, Order
from gangline.sandbox.commands.foreman import Foreman
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.shared.accounts import Accounts, MemoryWatch, Traffic
from gangline.sandbox.shared.disk import DiskWatch
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.handle import SandboxFacts
from gangline.sandbox.shared.threads import run_to_end

__all__ = ["Entry", "Life", "SupervisedSandbox", "begun"]

_T = TypeVar("_T")


class Entry(NamedTuple):
    """A command's way into a sandbox that is alive."""

    foreman: Foreman
    order: Order
    end_all: EndAll


class Life(Protocol):
    """What a runtime makes one sandbox of: folders or a layer, which last, and processes, which come and go.

    The handle's lock is held over `start`, `entry` and `end`.
    """

    facts: SandboxFacts
    asked_limits: LimitsSpec
    moves_files_alive: bool
    """Whether files can be moved only while the sandbox is alive."""

    @property
    def is_alive(self) -> bool:
        """Whether commands can be started."""
        ...

    @property
    def layers(self) -> Layers | None:
        """None: checkpoints are not supported."""
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
        """Remove what lasts, and let go of its layers. Idempotent."""
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

    def group_folders(self) -> Sequence[Path]:
        """Folders of the control groups that its commands are in; none where it has none."""
        ...

    def traffic(self) -> Mapping[str, Traffic] | str:
        """Way (`proxy`, `list`) -> its bytes over all lives; or why nobody counts them."""
        ...

    def limits(self) -> dict[str, str]:
        """See `Sandbox.limits`."""
        ...


async def begun(life: Life, kind: Callable[[Life], SupervisedSandbox] | None = None) -> SupervisedSandbox:
    """A started sandbox; one that does not start leaves nothing. Raises: RuntimeFailed, RuntimeUnavailable."""
    handle = (kind or SupervisedSandbox)(life)
    try:
        await handle.begin()
    except BaseException:
        with suppress(RuntimeFault):  # what it left is the reaper's
            await asyncio.shield(handle.stop())
        raise
    return handle


class SupervisedSandbox(Sandbox):
    """See `Sandbox`."""

    def __init__(self, life: Life) -> None:
        super().__init__(**msgspec.structs.asdict(life.facts))
        self._life = life
        self._executions = Executions()
        self._accounts = Accounts()
        self._disk = DiskWatch(life.asked_limits, life.written, root=life.root)
        self._lock = asyncio.Lock()
        self._num_commands = 0
        """That run, or are being started."""
        self._moves: set[asyncio.Task[object]] = set()
        """Files on their way in or out."""
        self._stopped = False
        self._removed = False

    async def begin(self) -> None:
        await self._life.make()
        async with self._lock:
            await self._ensure_alive()
        self._disk.begin(self.kill)

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

    async def _entry(self, request: ExecRequest) -> Entry:
        """Count the command as running from here on. Raises: RuntimeFailed, InvalidRequest, RuntimeUnavailable."""
        async with self._lock:
            await self._ensure_alive()
            entry = self._life.entry(request)
            self._num_commands += 1
            return entry

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        entry = await self._entry(request)
        try:
            return await self._executions.run(
                entry.foreman,
                entry.order,
                end_all=entry.end_all,
                memory=self._memory(),
                stdin=request.stdin,
                timeout_s=request.timeout_s,
                on_output=on_output,
                max_output_bytes=request.max_output_bytes,
            )
        finally:
            self._num_commands -= 1

    async def open_channel(self, request: ExecRequest) -> Channel:
        entry = await self._entry(request)
        return await self._executions.open(
            entry.foreman,
            entry.order,
            end_all=entry.end_all,
            memory=self._memory(),
            max_output_bytes=request.max_output_bytes,
            on_ended=self._command_ended,
        )

    def _memory(self) -> MemoryWatch:
        return MemoryWatch(self._life.group_folders(), self._life.asked_limits.memory_bytes)

    def _command_ended(self) -> None:
        self._num_commands -= 1

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._moved(lambda files: files.write(path, data, mode))

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return await self._moved(lambda files: files.read(path, max_bytes))

    async def clear(self, path: str) -> None:
        await self._moved(lambda files: files.clear(path))

    async def _moved(self, work: Callable[[SharedFolders], _T]) -> _T:
        async with self._lock:
            self._check_not_stopped()
            if self._life.moves_files_alive:
                await self._ensure_alive()
            opened = self._life.files()

            def move() -> _T:
                with opened as files:
                    return work(files)

            moving = asyncio.create_task(run_to_end(move))
            self._moves.add(moving)
            moving.add_done_callback(self._moves.discard)
        return await moving

    async def checkpoint(self, name: str = "") -> Checkpoint:
        async with self._undisturbed() as layers:
            if self._num_commands == 0 and await run_to_end(layers.may_stack):
                await self._end()
                return await run_to_end(layers.stack, name)
            return await run_to_end(layers.copy, name)

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        async with self._undisturbed() as layers:
            await self._end()
            await run_to_end(layers.reset, checkpoint)

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncGenerator[Layers]:
        """No command starts and no file is moved meanwhile. Raises: RuntimeFailed, RuntimeUnavailable."""
        async with self._lock:
            self._check_not_stopped()
            if self._life.layers is None:
                raise self._without_checkpoints()
            if self._moves:
                await asyncio.wait(self._moves)
            yield self._life.layers

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeFailed(f"sandbox {self.runtime_id} was stopped.")

    async def kill(self, *, grace_s: float = 0.0) -> None:
        async with self._lock:
            if grace_s > 0:
                await self._executions.ask_to_end(grace_s)
            await self._end()

    async def _end(self, *, is_last: bool = False) -> None:
        """End all processes. The lock is held."""
        self._accounts.read(self._life.group_folders())
        self._life.doom()
        await self._executions.close()
        self._accounts.read(self._life.group_folders())  # once more, where the groups are still there
        await self._life.end(is_last=is_last)

    async def stop(self) -> None:
        await self._disk.close()
        async with self._lock:
            if self._removed:
                return
            self._stopped = True
            await self._end(is_last=True)
            if self._life.layers is not None and self._moves:
                await asyncio.wait(self._moves)
            await self._life.remove()
            self._removed = True

    async def usage(self) -> Usage:
        self._check_not_stopped()
        self._accounts.read(self._life.group_folders())
        return self._accounts.usage(self._disk.usage, self._executions.spent, self._life.traffic())

    def limits(self) -> dict[str, str]:
        return self._life.limits()
