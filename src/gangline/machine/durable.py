"""Writes files that are complete or absent and survive a power cut. Only this module renames and syncs.

A function documented as durable has synced the file's bytes and the folder that contains it before it returns. All
functions block. Disk errors are `OSError`; `disk_full_error` explains a full disk. On Windows nothing is synced, and no
service holds a lock.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from gangline.domain.errors import DiskFull

if sys.platform != "win32":
    import fcntl

_UNFINISHED = ".new"
_PRIVATE = 0o600


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Generator[Path]:
    """Yield an empty file next to `path`. If the block ends without an error, it durably replaces `path`.

    mode: permissions of the file, minus the umask. Raises: OSError, leaving `path` unchanged.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_UNFINISHED}")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file readable only by its owner, atomically and durably."""
    with replacing(path, mode=_PRIVATE) as unfinished:
        unfinished.write_bytes(data)


def write_once(path: Path, data: bytes) -> bool:
    """Write a file like `write_whole` unless it exists. Returns whether it was written; only one of several writers
    succeeds.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_UNFINISHED}")
    try:
        write_new(unfinished, data)
        os.link(unfinished, path)
    except FileExistsError:
        return False
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)
    return True


def write_new(path: Path, data: bytes) -> None:
    """Write a new file readable only by its owner. Its bytes are synced but its name is not, because it is renamed
    later.

    Raises: FileExistsError; OSError, after which a partial file may remain.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append(path: Path, data: bytes) -> None:
    """Append to a file readable only by its owner, creating it if missing. Durable; a crash may leave a part of
    `data`.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE), "ab") as file:
        is_new = file.tell() == 0
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files left by a crash. Only for a folder with a single writer, before it writes."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def make_folder(folder: Path, mode: int | None = None) -> None:
    """Create a folder and its missing parents durably; existing ones are unchanged.

    mode: permissions of created folders, independent of the umask; None uses the permissions of each one's parent.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, mode)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode) if mode is None else mode)
    sync(folder.parent)


@contextmanager
def making(unfinished: Path) -> Generator[None]:
    """Write a new folder inside the block. If that fails, it is removed completely. Raises: DiskFull."""
    try:
        yield
    except BaseException as error:
        full = disk_full_at(error, unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
        if full is None:
            raise
        raise full from error


def sync(path: Path) -> None:
    """Sync a file's bytes, or a folder's entries, so that they survive a power cut."""
    if sys.platform == "win32":  # neither a folder nor a file that is only read can be synced there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` every file and folder below a folder, and the folder itself. Its own name must be synced with its
    parent.
    """
    for name, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync(Path(name, file))
        sync(Path(name))


def acquire(path: Path, *, wait: bool = False) -> int:
    """Lock a file, creating it if missing. Returns the descriptor that holds the lock until it is closed or the process
    ends.

    Raises: BlockingIOError if another process holds it, unless `wait`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Generator[None]:
    """Hold the lock of `acquire` for a block."""
    descriptor = acquire(path, wait=wait)
    try:
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process currently holds the lock of a file. False if the file does not exist or is unreadable."""
    if sys.platform == "win32":
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full_error(error: BaseException, what: str) -> DiskFull | None:
    """The error to raise if `error` reports a full disk, otherwise None. what: the thing stored on it, such as "the
    journal".
    """
    if not is_disk_full(error):
        return None
    return DiskFull(f"the disk that holds {what} is full; free some space, then try again. Nothing was lost.")


_LIBRARIES_SAY = ("No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed", "inline_container.cc")
"""Errors of libraries that write files themselves without raising OSError. The last two do not give the reason."""
_NO_ROOM_BYTES = 16 << 20


def disk_full_at(error: BaseException, path: Path) -> DiskFull | None:
    """The error to raise if `error` was caused by a full disk while writing below `path`, otherwise None."""
    while not path.exists():
        path = path.parent
    free_bytes = shutil.disk_usage(path).free
    says = [number for number, text in enumerate(_LIBRARIES_SAY) if text in str(error)]
    if not is_disk_full(error) and (not says or (min(says) >= 2 and free_bytes > _NO_ROOM_BYTES)):
        return None
    return DiskFull(
        f"the disk of {path} is full ({free_bytes / (1 << 20):.1f} MiB free): what was being written is lost, what was "
        "finished before is whole. Free some space there, or choose a folder on another disk, then start again."
    )
