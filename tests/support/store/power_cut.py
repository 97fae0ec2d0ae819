"""A disk that forgets: of a folder, a power cut leaves only what was synced.

`os.fsync` and `os.fdatasync` are the only moments at which anything becomes durable, so a snapshot is taken at each: of
a file its bytes, of a folder the files that it names. The worst case is assumed for everything else: a file that was
never synced is empty, a name whose folder was never synced is missing. SQLite syncs in C and is not seen.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

__all__ = ["PowerCut"]


class PowerCut:
    """Watches a folder, whose present content counts as synced. To be closed."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, tuple[int, bool]]] = {}
        """By inode: the names in it, with inode and whether it is a folder."""
        self._held: dict[int, int] = {}
        """A descriptor of every inode seen, so that no number is used twice."""
        for name, _, files in os.walk(root):
            for path in (Path(name), *(Path(name, file) for file in files)):
                self._snapshot(os.open(path, os.O_RDONLY))
        self._real = os.fsync
        monkeypatch.setattr(os, "fsync", self._synced)
        monkeypatch.setattr(os, "fdatasync", self._synced)

    def _synced(self, file: int) -> None:
        self._real(file)
        self._snapshot(os.open(f"/proc/self/fd/{file}", os.O_RDONLY))

    def _snapshot(self, file: int) -> None:
        found = os.fstat(file)
        if stat.S_ISDIR(found.st_mode):
            names = {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(file)}
            self._folders[found.st_ino] = names
        else:
            self._files[found.st_ino] = os.pread(file, found.st_size, 0)
        if self._held.setdefault(found.st_ino, file) != file:
            os.close(file)

    def leaves(self, target: Path) -> Path:
        """Lay out in `target`, which must not exist, the folder as a power cut now leaves it. Returns `target`."""
        self._lay_out(self._root.stat().st_ino, target)
        return target

    def _lay_out(self, folder: int, target: Path) -> None:
        target.mkdir()
        for name, (inode, is_folder) in self._folders.get(folder, {}).items():
            if is_folder:
                self._lay_out(inode, target / name)
            else:
                (target / name).write_bytes(self._files.get(inode, b""))

    def close(self) -> None:
        for file in self._held.values():
            os.close(file)
