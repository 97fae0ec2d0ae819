"""A sandbox whose commands run under our supervisors; a runtime only has to create it.

Laws
- Only one life begins or ends at a time: a lock is held meanwhile.
- A kill ends every process and keeps the sandbox's files; the next command begins a new life.
- A stopped sandbox stays stopped. A failed stop may be retried.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple, Self, TypeVar

import msgspec

from gangline.domain.errors import RuntimeFailed, RuntimeFault
from gangline.domain.sandbox import Channel, Checkpoint, ExecRequest, ExecResult, OutputSink, RuntimeStart, Sandbox
from gangline.domain.usage import Usage
from gangline.sandbox.commands.execution import EndAll, Executions, Order
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.confinement.limits import (
    NOT_ENFORCED,
    NOT_SUPPORTED,
    enforcement,
    grader_enforcement,
    refuse_grader,
)
from gangline.sandbox.confinement.system_calls import enforced, filter_for
from gangline.sandbox.layers.stack import Layers
from gangline.sandbox.shared.accounts import Accounts, MemoryWatch, Traffic, memory_now
from gangline.sandbox.shared.disk import MEASURED, DiskWatch
from gangline.sandbox.shared.environment import argv_of
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.leftovers import Mark, remove_folder, write_mark
from gangline.sandbox.shared.threads import run_to_end
from gangline.sandbox.shared.users import HeldUser

_T = TypeVar("_T")


class _Entry(NamedTuple):
    """A command's entry into the sandbox's current life."""

    spawner: Spawner
    order: Order
    end_all: EndAll


class SupervisedSandbox(Sandbox):
    """A folder that lasts, and processes that come and go. Subclasses define how each is made.

    They implement `_begin`, `_order`, `_killer`, `_end` and `_files`, and may override `_make_folders`, `_remove` and
    the properties of the sandbox. `begun` starts it. The lock is held during `_begin`, `_order` and `_end`.

    Long because it holds a sandbox's commands, files, checkpoints and end under one lock.
    """

    moves_files_alive: ClassVar[bool] = False
    """Whether files can be moved only while the sandbox is alive."""
    layers: Layers | None = None
    """None: checkpoints are not supported."""

    def __init__(
        self,
        start: RuntimeStart,
        runtime: str,
        *,
        workdir: str,
        home: str,
        grader_home: str | None = None,
        user: HeldUser | None = None,
    ) -> None:
        """
        runtime: name of the plug-in.
        user: released when the sandbox is removed.
        """
        has_proxy = start.proxy_port is not None and start.spec.network != "none"
        super().__init__(
            runtime_id=start.runtime_id,
            workdir=workdir,
            home=home,
            grader_home=grader_home,
            proxy_url=f"http://127.0.0.1:{start.proxy_port}" if has_proxy else None,
        )
        self._start = start
        self._mark = Mark(owner=start.owner, runtime=runtime, runtime_id=start.runtime_id)
        self._user = user
        self._limits = enforcement(start.spec.limits, MEASURED, own_user=False)
        """May be changed by `_begin` for a life."""
        program = filter_for(start.spec.system_calls_allow)
        self._filters = () if program is None else (program,)
        self._spawner: Spawner | None = None
        """Set by `_begin` for this life, and ended by this class after `_end`."""
        self._executions = Executions()
        self._accounts = Accounts()
        self._disk = DiskWatch(start.spec.limits)
        self._lock = asyncio.Lock()
        self._num_commands = 0
        """Commands that run or are being started."""
        self._moves: set[asyncio.Task[object]] = set()
        """File transfers in progress."""
        self._stopped = False
        self._removed = False

    # -- what lasts ----------------------------------------------------------------------------------------------

    async def _make(self) -> None:
        """Make the parts that last, once."""
        await run_to_end(self._make_folder)

    def _make_folder(self) -> None:
        write_mark(self._start.folder, self._mark)
        self._make_folders()
        if self.layers is not None:
            self.layers.begin()

    def _make_folders(self) -> None:
        """Make the parts that last in the sandbox's folder, which already has its mark for the reaper. Blocking."""

    def _reset_others(self) -> None:
        """Remove files that the sandbox wrote outside checkpoints. None of its processes is alive. Blocking.

        Raises: OSError.
        """

    async def _remove(self) -> None:
        """Remove the parts that last. Idempotent."""
        await run_to_end(self._remove_folder)
        if self._user is not None:
            self._user.release()

    def _remove_folder(self) -> None:
        if self.layers is not None:
            self.layers.close()
        remove_folder(self._start.folder)

    @abstractmethod
    def _files(self) -> AbstractContextManager[SharedFolders]:
        """Access to the sandbox's files, held until the context ends."""

    # -- processes -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def _begin(self) -> None:
        """Start its processes and set `_spawner`; `_end` follows if this fails. Raises: RuntimeFailed."""

    def _is_up(self) -> bool:
        """Whether commands can be started, apart from the spawner's own state."""
        return True

    @abstractmethod
    def _order(self, request: ExecRequest) -> Order:
        """The order for a command: `_ordered`, with its environment and user."""

    def _ordered(
        self,
        request: ExecRequest,
        *,
        env: Mapping[str, str],
        uid: int | None = None,
        own_namespace: bool = False,
        filters: Sequence[bytes] | None = None,
        cgroup_procs: Sequence[str] = (),
    ) -> Order:
        """See `Order`; filters: None: the filters for the task's system calls. Raises: InvalidRequest."""
        return Order(
            argv=argv_of(request.command),
            cwd=str(PurePosixPath(self.workdir, request.cwd or "")),
            env=env,
            uid=uid,
            own_namespace=own_namespace,
            filters=self._filters if filters is None else filters,
            rlimits=self._limits.rlimits,
            cgroup_procs=cgroup_procs,
        )

    @abstractmethod
    def _killer(self) -> EndAll:
        """Returns a function that kills every process of this life and waits until they are dead."""

    def _kill_nowait(self) -> None:
        """Kill all processes. Returns at once."""

    @abstractmethod
    async def _end(self, *, is_last: bool) -> None:
        """Wait until all processes have ended. `is_last`: `_remove` follows. Idempotent."""

    # -- what is known of it -------------------------------------------------------------------------------------

    def _written(self) -> Sequence[Path]:
        """Host folders with the files it has written; empty if unknown."""
        return [self._start.folder]

    def _root(self) -> Path | None:
        """See `root_inside`."""
        return None

    def _group_folders(self) -> Sequence[Path]:
        """Folders of its commands' control groups, if any."""
        return ()

    def _traffic(self) -> Mapping[str, Traffic] | str:
        """Way (`proxy`, `list`) -> its bytes over all lives, or the reason why they are not measured."""
        return f"runtime `{self._mark.runtime}` is in the machine's own network: nobody counts"

    def _network(self) -> str:
        """How the network's policy is enforced."""
        return NOT_ENFORCED

    def _system_calls(self) -> str:
        """How system calls are filtered."""
        return enforced(self._start.spec.system_calls_allow) if self._filters else NOT_ENFORCED

    def limits(self) -> dict[str, str]:
        return {
            **self._limits.enforced,
            **grader_enforcement(self.grader_home),
            "network": self._network(),
            "system_calls": self._system_calls(),
            "checkpoints": NOT_SUPPORTED if self.layers is None else self.layers.method,
        }

    # -- the contract --------------------------------------------------------------------------------------------

    async def begun(self) -> Self:
        """Start it and return it. A failed start leaves nothing behind. Raises: RuntimeFailed, RuntimeUnavailable."""
        try:
            await self._make()
            async with self._lock:
                await self._ensure_alive()
            self._disk.begin(self.kill, self._written, self._root)
        except BaseException:
            with suppress(RuntimeFault):  # the reaper removes the rest
                await asyncio.shield(self.stop())
            raise
        return self

    async def _ensure_alive(self) -> None:
        """Call with the lock held. Raises: RuntimeFailed."""
        self._check_not_stopped()
        if self._spawner is not None and self._spawner.alive and self._is_up():
            return
        await self._end_life()
        try:
            await self._begin()
        except BaseException:
            await asyncio.shield(self._end_life())
            raise

    async def _entry(self, request: ExecRequest) -> _Entry:
        """Count the command as running from now on. Raises: RuntimeFailed, InvalidRequest, RuntimeUnavailable."""
        async with self._lock:
            await self._ensure_alive()
            assert self._spawner is not None
            if request.user == "grader" and self.grader_home is None:
                raise refuse_grader(self._mark.runtime)
            entry = _Entry(self._spawner, self._order(request), self._killer())
            self._num_commands += 1
            return entry

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        entry = await self._entry(request)
        try:
            return await self._executions.run(*entry, request, memory=self._memory(), on_output=on_output)
        finally:
            self._num_commands -= 1

    async def open_channel(self, request: ExecRequest) -> Channel:
        entry = await self._entry(request)
        return await self._executions.open(*entry, request, memory=self._memory(), on_ended=self._command_ended)

    def _memory(self) -> MemoryWatch:
        return MemoryWatch(self._group_folders(), self._start.spec.limits.memory_bytes)

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
            if self.moves_files_alive:
                await self._ensure_alive()
            opened = self._files()

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
                await self._end_life()
                return await run_to_end(layers.stack, name)
            return await run_to_end(layers.copy, name)

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        async with self._undisturbed() as layers:
            await self._end_life()
            await run_to_end(layers.reset, checkpoint, self._reset_others)

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncGenerator[Layers]:
        """No command starts and no file is moved within the context. Raises: RuntimeFailed, RuntimeUnavailable."""
        async with self._lock:
            self._check_not_stopped()
            if self.layers is None:
                raise self._without_checkpoints()
            if self._moves:
                await asyncio.wait(self._moves)
            yield self.layers

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeFailed(f"sandbox {self.runtime_id} was stopped.")

    async def kill(self, *, grace_s: float = 0.0) -> None:
        async with self._lock:
            if grace_s > 0:
                await self._executions.ask_to_end(grace_s)
            await self._end_life()

    async def _end_life(self, *, is_last: bool = False) -> None:
        """End all processes. Call with the lock held."""
        has_begun = self._spawner is not None
        if has_begun:
            self._accounts.read(self._group_folders())
        self._kill_nowait()
        await self._executions.close()
        if has_begun:
            self._accounts.read(self._group_folders())  # once more, while the groups exist
        await self._end(is_last=is_last)
        if self._spawner is not None:
            await self._spawner.end()
            if not self._spawner.alive:  # one on another machine may wait for the next command
                self._spawner = None

    async def stop(self) -> None:
        await self._disk.close()
        async with self._lock:
            if self._removed:
                return
            self._stopped = True
            await self._end_life(is_last=True)
            if self.layers is not None and self._moves:
                await asyncio.wait(self._moves)
            await self._remove()
            self._removed = True

    async def usage(self) -> Usage:
        self._check_not_stopped()
        folders, root = self._group_folders(), self._root()
        self._accounts.read(folders)
        memory_bytes = memory_now(folders, None if root is None else root / "proc")
        usage = self._accounts.usage(self._disk.usage, self._executions.spent, self._traffic())
        return msgspec.structs.replace(usage, memory_bytes=memory_bytes)
