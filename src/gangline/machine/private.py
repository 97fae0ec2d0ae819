"""Permissions of a data folder: folders 0700 and files 0600, for any umask, including existing ones.

On a shared machine, prompts, replies, results and logs must not be readable by others. New files and folders are
private; an existing folder is closed once, with all its content. Files that a user names (exports) follow the user's
umask.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Collection
from pathlib import Path

from gangline.machine.durable import make_folder

log = logging.getLogger("gangline.machine.private")

_OTHERS = 0o077
_OURS = frozenset({"control_token", "demo", "harbor", "logs", "nodes", "runs", "server", "up.json", "up.lock"})
"""Names of Gangline's own files in a data folder."""


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open()`. A file opened for writing is accessible only to its owner, even if it existed
    before.
    """
    descriptor = os.open(path, flags, 0o600)
    if flags & (os.O_WRONLY | os.O_RDWR) and sys.platform != "win32":
        try:
            os.fchmod(descriptor, 0o600)
        except PermissionError as error:
            _not_ours(path, error)
    return descriptor


def make_private_file(path: Path) -> None:
    """Create an empty file if it is missing; an existing one keeps its content. Raises: OSError."""
    os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT))


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents durably, accessible only to their owner. Raises: OSError."""
    make_folder(path, 0o700)


def close_to_others(folder: Path, *, leave: Collection[str] = ()) -> None:
    """Create a folder, or close an existing one and its content to other users. Blocking.

    A folder that is already closed is not searched, because its content cannot be reached. Links are not followed.
    leave: names of folders that are closed but not entered, because their content has other owners. Raises: OSError.
    """
    make_private_folder(folder)
    if not _is_open(folder.stat()):
        return
    close_files(folder, leave=leave)
    _close(folder)  # last, because it marks the work as done


def close_files(folder: Path, *, leave: Collection[str] = ()) -> None:
    """Close all content of a folder to other users, such as files written by a library. Blocking."""
    for name, folders, files in os.walk(folder):
        for entry in (*folders, *files):
            _close(Path(name, entry))
        folders[:] = [entry for entry in folders if entry not in leave]


def open_data_folder(data_dir: Path) -> None:
    """Create a data folder, or close an existing one to other users. Raises: OSError.

    A folder that also contains other files, such as a home directory, is unchanged, but our own files in it are
    private.
    """
    make_private_folder(data_dir)
    if {entry.name for entry in data_dir.iterdir()} <= _OURS:
        _close(data_dir)
    for name in ("control_token", "up.json", "up.lock"):
        if (path := data_dir / name).exists():
            _close(path)
    for name in ("demo", "logs"):
        if (data_dir / name).is_dir():
            close_to_others(data_dir / name)
    for name in ("nodes", "runs"):
        if (data_dir / name).is_dir():
            _close(data_dir / name)


def _close(path: Path) -> None:
    try:
        found = path.lstat()
        if _is_open(found) and not stat.S_ISLNK(found.st_mode):
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    except FileNotFoundError:
        return
    except PermissionError as error:
        _not_ours(str(path), error)


def _is_open(found: os.stat_result) -> bool:
    return bool(stat.S_IMODE(found.st_mode) & _OTHERS)


def _not_ours(path: str, error: OSError) -> None:
    log.warning("folder.not_private path=%s message=%s: other users may read it", path, error.strerror)
