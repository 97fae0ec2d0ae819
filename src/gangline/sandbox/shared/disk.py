"""Measures a sandbox's disk use periodically, and ends the sandbox when it exceeds its limit.

A measurement counts blocks and files as `du` does: hard links once, and no other file systems. Empty files have no
blocks, but each takes an inode of the file system, which can run out like space. Removed files count while a process
holds them open or mapped, in a sandbox with its own /proc; on a node that is not root, only files that the node's user
can see there. A measurement starts programs that walk through all files. So it runs only when the file systems have
grown, which is checked every `_PAUSE_S`, or ten times as long as the last measurement took. It runs at least at every
`_LOOKS`-th check, since other programs may have removed as much meanwhile. Between measurements a sandbox may exceed
its limit: so no single file may outgrow it either (see `confinement.limits`), and a node keeps a reserve.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gangline.domain.errors import GanglineError
from gangline.domain.task import LimitsSpec
from gangline.domain.usage import Usage
from gangline.machine.programs import program

log = logging.getLogger("gangline.runtimes")

MEASURED: dict[str, str] = dict.fromkeys(("disk_bytes", "max_files"), "measured every few seconds")
"""Name of each limit that a watch enforces -> how."""
_PAUSE_S = 2.0
_LOOKS = 8
"""Checks of the file systems until a measurement without growth."""
_LEAST_GROWTH = {"disk_bytes": 16 * 2**20, "max_files": 1000}
"""Growth of all file systems together that triggers a measurement; a small limit needs a sixteenth of it."""
_AS_ROOT = ("unshare", "--user", "--map-root-user")
"""An ordinary user's agent may close its folders to that user too, but not to root of a user namespace."""
_AS_ANY_ROOT = (*_AS_ROOT, "--map-auto")
"""A rootless container's root is one of the user's subordinate ids, and so is the owner of its layer."""


_REMOVED = r"""find -L "$@" -maxdepth 1 -type f -links 0 -printf '%D %i %b\n' | sort -u |
awk -v memory="$MEMORY" 'index(memory, " " $1 " ") == 0 { num_blocks += $3; num_files += 1 }
END { printf "%.0f %d\n", num_blocks * 512, num_files }'"""
"""Bytes and number of the files in the folders `$@` of /proc that no longer have a name."""


async def counted(folders: Sequence[Path], unit: str) -> int | None:
    """Bytes or files of these host folders; None if they cannot be counted. Files that vanish meanwhile are left out.

    unit: the matching option of `du`.
    """
    if not folders:
        return None
    for command in ((),) if os.geteuid() == 0 else ((*_AS_ANY_ROOT, "--"), (*_AS_ROOT, "--"), ()):
        argv = [*command, "du", "--summarize", "--total", "--one-file-system", unit, "--", *map(str, folders)]
        if lines := (await _printed(argv)).splitlines():
            return int(lines[-1].split()[0])
    return None


async def _removed(proc: Path, memory: Sequence[Path]) -> tuple[int, int]:
    """Bytes and number of files without a name that the processes of a /proc hold open or mapped.

    memory: in-memory folders, whose files are not counted.
    """
    try:
        pids = [name for name in await asyncio.to_thread(os.listdir, proc) if name.isdigit()]
    except OSError:  # the sandbox has ended, and they with it
        return 0, 0
    folders = [str(proc / pid / kind) for pid in pids for kind in ("fd", "map_files")]
    devices = [_memory_device(), *(os.stat(folder).st_dev for folder in memory if folder.exists())]
    numbers_of_devices = " ".join(["", *map(str, devices), ""])
    numbers = (await _printed(["sh", "-c", _REMOVED, "sh", *folders], MEMORY=numbers_of_devices)).split()
    return (int(numbers[0]), int(numbers[1])) if numbers else (0, 0)


@functools.cache
def _memory_device() -> int:
    """Device number of in-memory files that never had a name."""
    fd = os.memfd_create("device")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


async def _printed(argv: Sequence[str], **env: str) -> bytes:
    """Output of a program; empty if it cannot be started."""
    with suppress(OSError):
        async with program(*argv, env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **env}) as process:
            return (await process.communicate())[0]
    return b""


def _memory(root: Path | None) -> list[Path]:
    """In-memory folders that a sandbox may write to: an empty file there takes kernel memory."""
    return [] if root is None else [root / "dev/shm"]


def _taken(folders: Sequence[Path]) -> dict[str, int] | None:
    """Bytes and files in use on the file systems of these folders; None if one does not report them."""
    taken, seen = dict.fromkeys(MEASURED, 0), set[int]()
    try:
        for folder in folders:
            device, found = os.stat(folder).st_dev, os.statvfs(folder)
            if found.f_files == 0:  # btrfs, for example, has no fixed number of inodes
                return None
            if device not in seen:
                seen.add(device)
                taken["disk_bytes"] += (found.f_blocks - found.f_bfree) * found.f_frsize
                taken["max_files"] += found.f_files - found.f_ffree
    except OSError:
        return None
    return taken


async def _used(folders: Sequence[Path], root: Path | None) -> dict[str, int | None]:
    memory = _memory(root)
    sizes = [await counted(folders, "--block-size=1"), await counted([*folders, *memory], "--inodes")]
    removed = (0, 0) if root is None else await _removed(root / "proc", memory)
    totals = [None if size is None else size + more for size, more in zip(sizes, removed, strict=True)]
    return dict(zip(MEASURED, totals, strict=True))


def root_inside(proc_fd: int) -> Path | None:
    """The root of a sandbox, seen from the host.

    proc_fd: an open `/proc/<pid>` folder of its first process, or -1.
    """
    return None if proc_fd < 0 else Path(f"/proc/{os.getpid()}/fd/{proc_fd}/root")


class DiskWatch:
    """Call `begin` when there are files to measure, and `close` before the sandbox is stopped; measurements then
    stop."""

    def __init__(self, limits: LimitsSpec) -> None:
        """limits: without `disk_bytes` and `max_files` it only measures."""
        self._limits = {name: value for name in MEASURED if (value := getattr(limits, name)) is not None}
        self._allowed = dict(self._limits)
        self._usage = Usage(disk_bytes=None)
        self._least: dict[str, int] | None = None
        """Smallest use of the file systems since the last measurement; None: measure at the next check."""
        self._num_looks = 0
        """Since the last measurement."""
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._is_closed = False

    @property
    def usage(self) -> Usage:
        """The last measurement."""
        return self._usage

    def begin(
        self,
        end: Callable[[], Awaitable[None]],
        folders: Callable[[], Sequence[Path]],
        root: Callable[[], Path | None] = lambda: None,
    ) -> None:
        """Idempotent.

        end: ends all processes of the sandbox.
        folders: host folders with the files that the sandbox has written.
        root: see `root_inside`; None: no separate root, or none at the moment.
        """
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._watch(end, folders, root), name="disk")

    async def close(self) -> None:
        """Waits for a kill in progress. Idempotent."""
        self._is_closed = True
        task = self._task
        if task is None:
            return
        if not self._is_ending:
            task.cancel()
        await asyncio.wait({task})
        self._task = None  # it holds this watch and the sandbox: a cycle that would keep both in memory

    async def _watch(
        self,
        end: Callable[[], Awaitable[None]],
        folders: Callable[[], Sequence[Path]],
        root: Callable[[], Path | None],
    ) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _PAUSE_S
        while not self._is_closed:
            await asyncio.sleep(pause_s)
            if not self._may_have_grown([*folders(), *_memory(root())]):
                continue
            begun_at = loop.time()
            used = await _used(folders(), root())
            pause_s = max(_PAUSE_S, 10 * (loop.time() - begun_at))
            exceeded = next((name for name, most in self._allowed.items() if (used[name] or 0) > most), None)
            self._usage = Usage(
                disk_bytes=used["disk_bytes"], files=used["max_files"], exceeded=exceeded or self._usage.exceeded
            )
            if exceeded is not None:
                # Existing files must not end a grader, which runs after the agent.
                self._allowed = {name: (used[name] or 0) + most for name, most in self._limits.items()}
                await self._ended(end)

    def _may_have_grown(self, folders: Sequence[Path]) -> bool:
        """Whether to measure now; if so, the current use becomes the baseline of the next check."""
        taken, least = _taken(folders), self._least
        self._num_looks += 1
        if taken is not None and least is not None and self._num_looks < _LOOKS:
            self._least = {name: min(least[name], taken[name]) for name in MEASURED}
            if all(taken[name] - self._least[name] < self._growth(name) for name in MEASURED):
                return False
        self._least, self._num_looks = taken, 0
        return True

    def _growth(self, name: str) -> int:
        limit = self._limits.get(name)
        return _LEAST_GROWTH[name] if limit is None else min(_LEAST_GROWTH[name], limit // 16)

    async def _ended(self, end: Callable[[], Awaitable[None]]) -> None:
        self._is_ending = True
        try:
            await end()
        except GanglineError as error:  # the engine does not answer; retried after more is written
            log.error("disk.not_ended message=%s", error)
        finally:
            self._is_ending = False
