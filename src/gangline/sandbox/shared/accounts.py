"""Resource use of a sandbox: of its control groups (processor time, peak memory, out-of-memory kills), its commands'
processes, and its network.

Version 2 accounts for processor time in every group, and for memory if that controller is enabled. Version 1 has a
hierarchy for each controller, so each folder reports only its own. A missing or unreadable file means that the value is
not measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gangline.domain.usage import AMOUNTS, Amount, Usage

_COMMANDS = "processes of its commands, once they have ended, without those that a command left behind"
_LARGEST = "the largest process of its commands that have ended"
_NO_COMMAND = "no command has ended yet"
_NEARLY_BYTES = 1 << 20
"""Processors take memory from a group in advance, so its last pages may never count as used."""
_MAX_FILE_BYTES = 1 << 16
_NETWORK = [name for name in AMOUNTS if name.startswith(("proxy_", "list_"))]


class MemoryKills(NamedTuple):
    """How often groups reached their memory limit, and how many of their processes the kernel killed for it."""

    num_times_full: int = 0
    num_killed: int = 0

    def began_since(self, before: MemoryKills) -> bool:
        """Whether the groups' own limit killed a process, and not a shortage of the machine's memory."""
        return self.num_times_full > before.num_times_full and self.num_killed > before.num_killed


def memory_kills(folders: Sequence[Path]) -> MemoryKills:
    num_full = num_killed = 0
    for folder in folders:
        events = _table(folder, "memory.events") or _table(folder, "memory.oom_control")
        if not events:
            continue  # another controller's: this is read before each command
        killed = events.get("oom_kill", 0)
        num_killed += killed
        num_full += events["oom"] if "oom" in events else _num_times_full_v1(folder, killed)
    return MemoryKills(num_full, num_killed)


def _num_times_full_v1(folder: Path, num_killed: int) -> int:
    """How often the memory limit was reached. Engines set the same limit for memory and for memory with swap. The
    second is then reached first, and recent kernels do not count it: once the peak is at the limit, each kill counts as
    one."""
    limit, with_swap = _number(folder, "memory.limit_in_bytes"), _number(folder, "memory.memsw.limit_in_bytes")
    peak = _number(folder, "memory.memsw.max_usage_in_bytes")
    if limit is not None and limit == with_swap and peak is not None and peak >= limit - _NEARLY_BYTES:
        return num_killed
    return sum(_number(folder, name) or 0 for name in ("memory.failcnt", "memory.memsw.failcnt"))


class MemoryWatch:
    """Detects whether the sandbox's own memory limit kills any of its processes from now on."""

    def __init__(self, folders: Sequence[Path], limit_bytes: int | None) -> None:
        """folders: the sandbox's control groups."""
        self._folders = folders
        self._before = memory_kills(folders)
        self._limit_bytes = limit_bytes

    def limit_that_killed(self) -> int | None:
        """The limit in bytes, or None if it killed no process."""
        return self._limit_bytes if memory_kills(self._folders).began_since(self._before) else None


def cpu_s(folder: Path) -> float | None:
    """Processor time of all processes of the group so far, in seconds."""
    if (used := _table(folder, "cpu.stat").get("usage_usec")) is not None:
        return used / 1e6
    nanoseconds = _number(folder, "cpuacct.usage")
    return None if nanoseconds is None else nanoseconds / 1e9


def peak_memory_bytes(folder: Path) -> int | None:
    """Peak memory of all processes of the group together, including the page cache."""
    peak = _number(folder, "memory.peak")
    return _number(folder, "memory.max_usage_in_bytes") if peak is None else peak


def memory_now(folders: Sequence[Path], proc: Path | None) -> int | None:
    """Memory in use now by all processes of a sandbox: of its control groups, without cached files that are not in use;
    without such groups, the resident memory of the processes in its /proc, shared pages counted for each."""
    for folder in folders:
        used = _number(folder, "memory.current")
        used = _number(folder, "memory.usage_in_bytes") if used is None else used
        if used is not None:
            cached = _table(folder, "memory.stat")
            return max(0, used - cached.get("total_inactive_file", cached.get("inactive_file", 0)))
    if proc is None:
        return None
    pages = 0
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir(proc)):
            with suppress(OSError, ValueError, IndexError):
                pages += int(_text(proc / name, "statm").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") or None


class Spent:
    """The kernel's accounts of processes, reported by supervisors as each command ends."""

    def __init__(self) -> None:
        self.num_commands = 0
        self.cpu_s = 0.0
        self.peak_memory_bytes = 0
        """Peak of the largest process."""
        self.written_bytes = 0

    def add(self, report: str) -> None:
        """`CPU_S PEAK_MEMORY_BYTES WRITTEN_BYTES`; empty if a supervisor was killed before it could report."""
        if not report:
            return
        cpu_s, peak, written = report.split()
        self.num_commands += 1
        self.cpu_s += float(cpu_s)
        self.peak_memory_bytes = max(self.peak_memory_bytes, int(peak))
        self.written_bytes += int(written)


class Traffic:
    """Bytes between a sandbox and its network."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        """Sent by the sandbox."""
        self.received_bytes = 0


class Accounts:
    """Usage of one sandbox over all its lives. The groups of an earlier life are gone; their last values count."""

    def __init__(self) -> None:
        self._cpu_s: dict[tuple[int, int], float] = {}
        """By device and inode of a group's folder, since a new life may have another group at the same path."""
        self._peak_bytes: int | None = None

    def read(self, folders: Sequence[Path]) -> None:
        """Record the groups' current values. Call it before they may vanish."""
        for folder in folders:
            with suppress(OSError):
                found = folder.stat()
                if (used := cpu_s(folder)) is not None:
                    self._cpu_s[found.st_dev, found.st_ino] = used
                if (peak := peak_memory_bytes(folder)) is not None:
                    self._peak_bytes = max(peak, self._peak_bytes or 0)

    def usage(self, disk: Usage, spent: Spent, network: Mapping[str, Traffic] | str) -> Usage:
        """
        disk: a usage with the disk fields set.
        network: way (`proxy`, `list`) -> its bytes, or the reason why they are not measured.
        """
        amounts: dict[str, Any] = {}
        how: dict[str, str] = {}

        def note(name: Amount, amount: float | None, by: str) -> None:
            amounts[name], how[name] = amount, by

        if spent.num_commands:
            note("cpu_s", spent.cpu_s, _COMMANDS)
            note("peak_memory_bytes", spent.peak_memory_bytes, _LARGEST)
            note("written_bytes", spent.written_bytes, _COMMANDS)
        else:
            how = dict.fromkeys(("cpu_s", "peak_memory_bytes", "written_bytes"), _NO_COMMAND)
        if self._cpu_s:
            note("cpu_s", sum(self._cpu_s.values()), "control group")
        if self._peak_bytes is not None:
            note("peak_memory_bytes", self._peak_bytes, "control group, with cached files")
        if isinstance(network, str):
            how |= dict.fromkeys(_NETWORK, network)
        else:
            for way, traffic in network.items():
                amounts[f"{way}_sent_bytes"] = traffic.sent_bytes
                amounts[f"{way}_received_bytes"] = traffic.received_bytes
            how |= dict.fromkeys(_NETWORK, "counted on the way")
        return msgspec.structs.replace(disk, measured=how, **amounts)


def _number(folder: Path, name: str) -> int | None:
    try:
        return int(_text(folder, name))
    except (OSError, ValueError):
        return None


def _table(folder: Path, name: str) -> dict[str, int]:
    """Parses lines of a name and a number."""
    try:
        pairs = [line.split() for line in _text(folder, name).splitlines()]
        return {key: int(number) for key, number in pairs}
    except (OSError, ValueError):
        return {}


def _text(folder: Path, name: str) -> str:
    """Read before each command: `Path` would take ten times as long. Raises: OSError."""
    file = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(file, _MAX_FILE_BYTES).decode()
    finally:
        os.close(file)
