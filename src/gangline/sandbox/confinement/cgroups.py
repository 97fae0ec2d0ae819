"""Limits by control group, version 1 or 2, where this process may make groups. Each controller is handled separately.

A sandbox's groups are named `gangline@<owner>@<hash of its id>`, next to or below the node's own group, so that a
reaper finds them by name alone. Limits that could not be set are absent from `Cgroups.enforced`, and the caller falls
back.

In version 2 only a group without processes can enable controllers for its children. So groups are made in the nearest
ancestor of the node's group that enables any of the needed controllers, or can be made to.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

from gangline.domain.task import LimitsSpec

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_CONTROLLERS = {"memory_bytes": "memory", "max_pids": "pids", "cpus": "cpu"}
_REMOVE_TRIES = 200


class Cgroups:
    """The groups of one sandbox."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.enforced: dict[str, str] = {}
        """Limit name -> `cgroup v1` or `cgroup v2`."""

    @property
    def procs(self) -> list[str]:
        """Files through which a process joins the groups."""
        return [f"{folder}/cgroup.procs" for folder in self.folders]

    async def remove(self) -> None:
        """Remove the groups; their processes are dead, but the kernel may take a moment to notice."""
        for folder in self.folders:
            await _removed(folder)
        self.folders = []


def group_name(owner: str, runtime_id: str) -> str:
    return f"gangline@{owner}@{hashlib.sha256(runtime_id.encode()).hexdigest()[:24]}"


def make_groups(
    name: str, limits: LimitsSpec, root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")
) -> Cgroups:
    """Make the groups that `limits` asks for, as far as this machine allows."""
    groups = Cgroups()
    ours = _membership(membership)
    values = {limit: getattr(limits, limit) for limit in _CONTROLLERS if getattr(limits, limit) is not None}
    if (root / "cgroup.controllers").exists():
        _try_v2(groups, root, ours.get("", "/"), name, values)
        return groups
    for limit, value in values.items():
        if (controller := _CONTROLLERS[limit]) in ours:
            _try_v1(groups, root / controller, ours[controller], name, limit, value)
    return groups


def joined_groups(
    membership: Path, limits: LimitsSpec, root: Path = ROOT, own_membership: Path = Path("/proc/self/cgroup")
) -> Cgroups:
    """Groups that another program made for a process and that we may join, with the limits read from them.

    membership: that process's `/proc/<pid>/cgroup`.
    """
    groups = Cgroups()
    ours, theirs = _membership(own_membership), _membership(membership)
    is_v2 = (root / "cgroup.controllers").exists()
    for controller, path in theirs.items():
        folder = (root if is_v2 else root / controller) / path.lstrip("/")
        own = ours.get(controller, "/")
        if path == own or (not controller) != is_v2 or not _may_join(folder, root / own.lstrip("/"), is_v2):
            continue
        groups.folders.append(folder)
        for limit, name in _CONTROLLERS.items():
            if name == controller or is_v2:
                _note_held(groups, folder, limit, getattr(limits, limit), is_v2)
    return groups


def _may_join(folder: Path, own: Path, is_v2: bool) -> bool:
    """Whether the group may be joined. Version 2 also requires write access to the nearest common ancestor."""
    above = Path(os.path.commonpath([folder, own])) if is_v2 else folder
    return all(os.access(group / "cgroup.procs", os.W_OK) for group in (folder, above))


def _note_held(groups: Cgroups, folder: Path, limit: str, value: float | None, is_v2: bool) -> None:
    if value is None:
        return
    with suppress(OSError, ValueError):
        for file, text in (_settings_v2 if is_v2 else _settings_v1)(limit, value).items():
            if not 0 < int((folder / file).read_text().split()[0]) <= int(text.split()[0]):
                return  # unlimited is a word, -1, or a huge number; memory is rounded down to whole pages
        groups.enforced[limit] = "cgroup v2" if is_v2 else "cgroup v1"


def _membership(file: Path) -> dict[str, str]:
    """Controller -> path of our own group; version 2 has the empty name."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in file.read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _try_v1(groups: Cgroups, mount: Path, own: str, name: str, limit: str, value: float) -> None:
    folder = mount / own.lstrip("/") / name
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        try:
            for file, text in _settings_v1(limit, value).items():
                (folder / file).write_text(text)
        except OSError:
            folder.rmdir()
            raise
        groups.folders.append(folder)
        groups.enforced[limit] = "cgroup v1"


def _settings_v1(limit: str, value: float) -> Mapping[str, str]:
    if limit == "memory_bytes":
        return {"memory.limit_in_bytes": str(int(value))}
    if limit == "max_pids":
        return {"pids.max": str(int(value))}
    return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(max(1000, int(value * _PERIOD_US)))}


def _try_v2(groups: Cgroups, root: Path, own: str, name: str, limits: Mapping[str, float]) -> None:
    wanted = {_CONTROLLERS[limit] for limit in limits}
    folder, controllers = _folder_v2(root, own, name, wanted)
    if folder is None:
        return
    groups.folders = [folder]
    for limit, value in limits.items():
        if _CONTROLLERS[limit] in controllers:
            with suppress(OSError):
                for file, text in _settings_v2(limit, value).items():
                    (folder / file).write_text(text)
                groups.enforced[limit] = "cgroup v2"
    if not groups.enforced:
        groups.folders = []
        with suppress(OSError):
            folder.rmdir()


def _folder_v2(root: Path, own: str, name: str, wanted: Set[str]) -> tuple[Path | None, Set[str]]:
    """A new group in the nearest ancestor of ours that enables any `wanted` controllers for it, and these
    controllers."""
    for base in [root / own.lstrip("/"), *(root / own.lstrip("/")).parents]:
        if base == root.parent:
            break
        try:
            controllers = handed_down(base, wanted)
            if not controllers or not os.access(base / "cgroup.procs", os.W_OK):
                continue  # joining requires this right on the common ancestor
            (base / name).mkdir(exist_ok=True)
        except OSError:
            continue
        return base / name, controllers
    return None, frozenset()


def handed_down(base: Path, wanted: Set[str]) -> Set[str]:
    """The `wanted` controllers that groups in `base` have.

    Each is enabled separately, so that an unavailable one (often `cpu` for an ordinary user) does not affect the
    others. Raises: OSError.
    """
    control = base / "cgroup.subtree_control"
    available = set((base / "cgroup.controllers").read_text().split())
    for controller in sorted((wanted & available) - set(control.read_text().split())):
        with suppress(OSError):
            control.write_text(f"+{controller}")
    return wanted & set(control.read_text().split())


def _settings_v2(limit: str, value: float) -> Mapping[str, str]:
    if limit == "memory_bytes":
        return {"memory.max": str(int(value))}
    if limit == "max_pids":
        return {"pids.max": str(int(value))}
    return {"cpu.max": f"{max(1000, int(value * _PERIOD_US))} {_PERIOD_US}"}


async def remove_owned(owner: str, keep: frozenset[str], root: Path = ROOT) -> None:
    """Remove every group of `owner`, wherever it is, except for the runtimes in `keep`."""
    kept = {group_name(owner, runtime_id) for runtime_id in keep}
    for folder in await asyncio.to_thread(owned_groups, owner, root):
        if folder.name not in kept:
            await _removed(folder)


def owned_groups(owner: str, root: Path = ROOT) -> list[Path]:
    """Blocking."""
    prefix = f"gangline@{owner}@"
    return [Path(folder, name) for folder, names, _files in os.walk(root) for name in names if name.startswith(prefix)]


async def _removed(folder: Path) -> None:
    if (folder / "freezer.state").exists():  # version 1: frozen processes must be thawed to die
        with suppress(OSError):
            (folder / "freezer.state").write_text("THAWED")
    for _try in range(_REMOVE_TRIES):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError:
            await asyncio.sleep(0.005)
        else:
            return
