"""Freezes all processes of a sandbox for a moment, by a control group, without their noticing.

The processes are found by the sandbox's own users, in its groups or, if it has no groups, on the whole machine. The
group is made when first needed, and later commands join it like the other groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from gangline.sandbox.confinement.cgroups import ROOT, Cgroups

_PATIENCE_S = 1.0
_PAUSE_S = 0.0005
_MAX_SWEEPS = 100


class Freezer:
    """Blocking."""

    def __init__(self, groups: Cgroups, name: str, users: Iterable[int], root: Path = ROOT) -> None:
        """
        name: of the group to make.
        users: ids on the host that only the sandbox's processes have; if empty, the processes cannot be found.
        """
        self._groups = groups
        self._name = name
        self._users = frozenset(users)
        self._root = root
        self._group: Path | None = None

    def is_populated(self) -> bool:
        """Whether any process is alive, or this is unknown."""
        return not self._users or bool(self._pids())

    @contextmanager
    def frozen(self) -> Generator[bool]:
        """Freeze all processes within the context. Yields False if they cannot be frozen and keep running."""
        group = self._found() if self._users else None
        if group is None:
            yield False
            return
        try:
            yield self._freeze(group)
        finally:
            _thaw(group)

    def _freeze(self, group: Path) -> bool:
        """Freeze them; the next sweep finds processes started meanwhile."""
        _write(group, "1", "FROZEN")
        moved: set[int] = set()
        for _sweep in range(_MAX_SWEEPS):
            outside = set(self._pids()) - _members(group) - moved
            if not outside:
                return _is_frozen(group)
            for pid in outside:
                with suppress(OSError):  # it has ended
                    (group / "cgroup.procs").write_text(str(pid))
            moved |= outside
        return False

    def _pids(self) -> list[int]:
        folders = self._groups.folders
        known = set[int]().union(*map(_members, folders)) if folders else _all_pids()
        return [pid for pid in known if _user(pid) in self._users]

    def _found(self) -> Path | None:
        """The group that can freeze them; None if it cannot be made."""
        if self._group is None:
            self._group = next((folder for folder in self._groups.folders if (folder / "cgroup.freeze").exists()), None)
        if self._group is None:
            for base in (self._root, self._root / "unified", self._root / "freezer"):
                group = base / self._name
                with suppress(OSError):
                    group.mkdir(exist_ok=True)
                    if (group / "cgroup.freeze").exists() or (group / "freezer.state").exists():
                        self._groups.folders.append(group)
                        self._group = group
                        break
                    group.rmdir()
        return self._group


def _write(group: Path, for_v2: str, for_v1: str) -> None:
    if (group / "cgroup.freeze").exists():
        (group / "cgroup.freeze").write_text(for_v2)
    else:
        (group / "freezer.state").write_text(for_v1)


def _thaw(group: Path) -> None:
    _write(group, "0", "THAWED")


def _is_frozen(group: Path) -> bool:
    """Wait until the group is frozen; False if a process does not stop in time."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if (group / "cgroup.freeze").exists():
            if "frozen 1" in (group / "cgroup.events").read_text():
                return True
        else:
            _write(group, "1", "FROZEN")  # a process forked meanwhile
            if (group / "freezer.state").read_text().strip() == "FROZEN":
                return True
        time.sleep(_PAUSE_S)
    return not _members(group)


def _members(group: Path) -> set[int]:
    with suppress(OSError):
        return set(map(int, (group / "cgroup.procs").read_text().split()))
    return set()


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _user(pid: int) -> int | None:
    """User of a process. The folder's owner would be root for an untraceable process."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        if any(line.startswith("State:\tZ") for line in lines):
            return None
        return int(next(line for line in lines if line.startswith("Uid:")).split()[1])
    return None
