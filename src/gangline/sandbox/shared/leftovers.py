"""Finds and removes leftovers of a crash: processes by a label in their environment or by their mounts, folders by a
mark.

No state is kept in memory: a restarted node finds all leftovers. Blocking functions say so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from gangline.sandbox.shared.removal import remove_tree

LABEL = "GANGLINE_RUNTIME"
"""Environment variable `<owner>/<runtime_id>/<kind of runtime>`."""
_MARK = ".gangline-runtime.json"
_MAX_DEPTH = 3
_MAX_SWEEPS = 500


class Mark(msgspec.Struct, frozen=True):
    """Names the owner of a folder; written before anything is started in it."""

    owner: str
    runtime: str
    runtime_id: str

    @property
    def label(self) -> str:
        return f"{self.owner}/{self.runtime_id}/{self.runtime}"


def write_mark(folder: Path, mark: Mark) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_bytes(msgspec.json.encode(mark))


def marked(root: Path) -> Iterator[tuple[Path, Mark]]:
    """Runtimes' folders under `root`, at most three levels down. The content of a runtime is not entered. Blocking."""
    for name, names, files in os.walk(root):
        folder = Path(name)
        if _MARK in files:
            names.clear()
            with suppress(msgspec.DecodeError, OSError):
                yield folder, msgspec.json.decode((folder / _MARK).read_bytes(), type=Mark)
        elif len(folder.relative_to(root).parts) >= _MAX_DEPTH:
            names.clear()


def remove_folder(folder: Path) -> None:
    """Remove a folder that an untrusted program wrote: closed folders, any depth, links not followed. Blocking.

    Its mark is removed last, so that `reap` finds the rest after a crash.
    """
    inside: list[Path] = []
    with suppress(OSError):  # if it is closed, remove all at once
        inside = [path for path in folder.iterdir() if path.name != _MARK]
    for path in (*inside, folder):
        remove_tree(path)


def _remove_unmarked(root: Path) -> None:
    """Remove folders that a crash left empty, or with an incomplete mark."""
    whole = {folder for folder, _mark in marked(root)}
    for folder in set(root.iterdir() if root.is_dir() else ()) - whole:
        if folder.is_symlink() or not folder.is_dir():
            continue
        with suppress(OSError):
            if set(os.listdir(folder)) <= {_MARK}:
                remove_folder(folder)


def kill_labelled(wanted: Callable[[str], bool]) -> set[str]:
    """Kill every process whose label `wanted` accepts, and the processes that they start meanwhile. Blocking.

    Returns their labels.
    """
    return _kill_all(lambda names: _labelled(wanted, names))


def kill_mounted(runtime: str, owner: str, root: Path, keep: frozenset[str]) -> None:
    """Kill every process that lives in a sandbox of `owner`'s runtimes of this kind under `root`. Blocking.

    For launchers that clear their environment: a process with the sandbox's HOME mounted belongs to it.
    """
    homes = {
        f"/{folder.parent.name}/{folder.name}/home"
        for folder, mark in marked(root)
        if (mark.owner, mark.runtime) == (owner, runtime) and mark.runtime_id not in keep
    }
    if homes:
        _kill_all(lambda names: _mounted(homes, names))


def _kill_all(find: Callable[[Iterable[str]], Iterator[tuple[int, str]]]) -> set[str]:
    """Stop all before killing the first, so that none escapes by forking. Returns the labels found.

    find: looks at processes by their numbers, as text. One that forks and ends faster than all processes are looked at
    would never be found, so those that began meanwhile are looked at by themselves.
    """
    found: set[str] = set()
    for _sweep in range(_MAX_SWEEPS):
        stopped: dict[int, str] = {}
        newest, names = _newest(), os.listdir("/proc")
        while names:
            new = {pid: what for pid, what in find(filter(str.isdigit, names)) if pid not in stopped}
            _signal_all(new, signal.SIGSTOP)
            stopped |= new
            before, newest = newest, _newest()
            # All of them again where one was found: it may have had children, with any number.
            names = os.listdir("/proc") if new else [str(pid) for pid in range(before + 1, newest + 1)]
        if not stopped:
            break
        _signal_all(stopped, signal.SIGKILL)
        found.update(stopped.values())
    return found


def _newest() -> int:
    """The number of the process or thread that was started last."""
    return int(Path("/proc/loadavg").read_text().split()[-1])


def _mounted(homes: set[str], names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields (pid, home). A dying process has no mounts left, and is not found."""
    for name in names:
        with suppress(OSError):
            lines = Path("/proc", name, "mountinfo").read_text(errors="replace").splitlines()
            sources = {line.split(" ", 4)[3] for line in lines}
            if home := next((home for home in homes if any(source.endswith(home) for source in sources)), None):
                yield int(name), home


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _labelled(wanted: Callable[[str], bool], names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields (pid, label). A dying process has no environment left, and is not found."""
    prefix = f"{LABEL}=".encode()
    for name in names:
        if Path("/proc/self/task", name).exists():  # ours, or one of our threads
            continue
        with suppress(OSError):
            for variable in _environment(name).split(b"\0"):
                text = variable.removeprefix(prefix).decode(errors="replace")
                if variable.startswith(prefix) and wanted(text):
                    yield int(name), text


def _environment(pid: str) -> bytes:
    """Environment of a process. If its first thread has ended, only other threads show it. Raises: OSError when it is
    gone."""
    if found := Path("/proc", pid, "environ").read_bytes():
        return found
    threads = (Path("/proc", pid, "task", thread, "environ") for thread in os.listdir(f"/proc/{pid}/task"))
    return next((found for thread in threads if (found := thread.read_bytes())), b"")


def reap(runtime: str, owner: str, root: Path, keep: frozenset[str]) -> set[str]:
    """Remove the processes of `owner`'s runtimes of this kind, and their folders under `root`. Blocking.

    Returns the ids of the runtimes that were removed.
    """

    def left(mark: Mark) -> bool:
        return (mark.owner, mark.runtime) == (owner, runtime) and mark.runtime_id not in keep

    def wanted(label: str) -> bool:
        parts = label.split("/")
        return len(parts) == 3 and left(Mark(owner=parts[0], runtime_id=parts[1], runtime=parts[2]))

    removed = {label.split("/")[1] for label in kill_labelled(wanted)}
    for folder, mark in list(marked(root)):
        if left(mark):
            remove_folder(folder)
            removed.add(mark.runtime_id)
    _remove_unmarked(root)
    return removed
