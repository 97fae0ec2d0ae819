"""Files that are whole or absent, and that survive a power cut: the only place that renames and syncs.

A function that calls itself durable has synced the file's bytes and the folder that names it before it returns. All
functions block. Errors of the disk are `OSError`; `disk_full_error` explains a full one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from gangline.domain.errors import DiskFull

__all__ = [
    "acquire",
    "append",
    "disk_full_at",
    "disk_full_error",
    "is_disk_full",
    "is_locked",
    "locked",
    "make_folder",
    "making",
    "remove_unfinished",
    "replacing",
    "sync",
    "sync_tree",
    "write_new",
    "write_once",
    "write_whole",
]

_UNFINISHED = ".new"
_PRIVATE = 0o600


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Generator[Path]:
    """Yield an empty file beside `path`; when the block ends without an error, it durably takes the place of `path`.

    mode: permissions of the file, less the umask. Raises: OSError, with `path` as it was before.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_UNFINISHED}")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file that only its owner may read: whole or not at all, and durable."""
    with replacing(path, mode=_PRIVATE) as unfinished:
        unfinished.write_bytes(data)


def write_once(path: Path, data: bytes) -> bool:
    """Write a file like `write_whole` unless it exists. Returns whether it was written: one of several writers wins."""
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
    """Write a new file that only its owner may read. Its bytes are synced; its name is not, for it is renamed later.

    Raises: FileExistsError; OSError, after which a partial file may remain.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append(path: Path, data: bytes) -> None:
    """Append to a file that only its owner may read, made if missing. Durable; a crash may leave a part of `data`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _PRIVATE), "ab") as file:
        is_new = file.tell() == 0
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove files that a crash kept from their place. Only for a folder with one writer, before it writes."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def make_folder(folder: Path, mode: int | None = None) -> None:
    """Make a folder and its missing parents durably; existing ones stay as they are.

    mode: permissions of the folders made, independent of the umask; None gives each those of its parent.
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
    """Write a new folder in the block; when that fails, nothing of it stays. Raises: DiskFull."""
    try:
        yield
    except BaseException as error:
        full = disk_full_at(error, unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
        if full is None:
            raise
        raise full from error


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` every file and folder below a folder, and the folder itself. Its own name is its parent's business."""
    for name, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync(Path(name, file))
        sync(Path(name))


def acquire(path: Path, *, wait: bool = False) -> int:
    """Lock a file, made if missing. Returns the descriptor that holds it: closing it, or the process's end, lets go.

    Raises: BlockingIOError where another process holds it, unless `wait`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
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
    """Whether a process holds the lock of a file now. False where there is no such file, or none that may be read."""
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
    """The error to raise where `error` reports a full disk, else None. what: the thing on it, such as "the journal"."""
    if not is_disk_full(error):
        return None
    return DiskFull(f"the disk that holds {what} is full; free some space, then try again. Nothing was lost.")


_LIBRARIES_SAY = ("No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed", "inline_container.cc")
"""Errors of libraries that write files themselves, and raise no OSError. The last two do not say why."""
_NO_ROOM_BYTES = 16 << 20


def disk_full_at(error: BaseException, path: Path) -> DiskFull | None:
    """The error to raise where `error` came from a full disk while something was written below `path`; else None."""
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
