"""Files in untrusted folders, opened so that a task never contains files of this machine.

Invariants: a path stays in its folder. Every component is opened separately, from its parent's descriptor, and never
through a link. Only regular files are read, after their size is known. Anything else is refused by name.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from gangline.domain.errors import InvalidRequest

MAX_FILE_BYTES = 48 << 20
"""Limit of one file, and of the files of one folder: a submission is at most 64 MiB."""
_MAX_READ_BYTES = 3 * MAX_FILE_BYTES
"""Limit of one task, counting repeated reads of its files."""
_MAX_FILES = 20_000
_MAX_DEPTH = 64
_FOLDER = 0 if sys.platform == "win32" else os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = 0 if sys.platform == "win32" else os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_ODD = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_KINDS = {
    stat.S_IFLNK: "a link, and links are not followed. If you trust it, copy the folder with `cp -rL`, which "
    "puts files in their place",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder, and a file belongs there",
    stat.S_IFREG: "a file, and a folder belongs there",
}


class Found(NamedTuple):
    """A regular file in a folder."""

    path: SourcePath
    num_bytes: int


class SourcePath(msgspec.Struct, frozen=True):
    """A path below an untrusted folder. The folder's own path is the user's, and may be a link."""

    root: Path
    parts: tuple[str, ...] = ()
    spent: list[int] = msgspec.field(default_factory=lambda: [0])
    """Bytes read below the root: a single counter shared by all paths below it."""

    @classmethod
    def of(cls, root: Path) -> SourcePath:
        """Raises: InvalidRequest for a name that messages cannot display."""
        _check_name(root.name, str(root.parent))
        return cls(root)

    def __truediv__(self, below: str) -> SourcePath:
        """Raises: InvalidRequest for a path that leaves this folder, including absolute paths."""
        parts: list[str] = []
        for part in below.split("/"):
            if below.startswith("/") or (part == ".." and not parts):
                raise InvalidRequest(f"{below!r} leads out of the folder {self}.")
            if part == "..":
                parts.pop()
            elif part not in ("", "."):
                _check_name(part, str(self))
                parts.append(part)
        return SourcePath(self.root, (*self.parts, *parts), self.spent)

    def __str__(self) -> str:
        return str(self.root.joinpath(*self.parts))

    @property
    def name(self) -> str:
        return (self.parts or (self.root.name,))[-1]

    @property
    def parent(self) -> SourcePath:
        return SourcePath(self.root, self.parts[:-1], self.spent)

    def is_there(self) -> bool:
        """Raises: InvalidRequest if it is neither a file nor a folder."""
        return self._kind() is not None

    def has_file(self) -> bool:
        """False if it does not exist. Raises: InvalidRequest if it is not a file."""
        return self._is(stat.S_IFREG)

    def has_folder(self) -> bool:
        """False if it does not exist. Raises: InvalidRequest if it is not a folder."""
        return self._is(stat.S_IFDIR)

    def is_folder(self) -> bool:
        """Raises: InvalidRequest if it is neither a file nor a folder."""
        return self._kind() == stat.S_IFDIR

    def read(self, max_bytes: int = MAX_FILE_BYTES) -> tuple[bytes, bool]:
        """The content, and whether its owner may execute it. Raises: InvalidRequest."""
        with self.opened(max_bytes) as file:
            data = file.read(max_bytes + 1)
            self._count(len(data), max_bytes)
            return data, bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR)

    @contextmanager
    def opened(self, max_bytes: int) -> Generator[BinaryIO]:
        """The file. Raises: InvalidRequest unless it is a regular file of at most that size."""
        with _naming_errors(self), self.parent._opened() as folder:
            kind = stat.S_IFMT(os.stat(self.name, dir_fd=folder, follow_symlinks=False).st_mode)
            if kind != stat.S_IFREG:  # opening a device may already do something
                raise _refusal(self, kind)
            file = os.fdopen(os.open(self.name, _FILE, dir_fd=folder), "rb")
        with file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _refusal(self, stat.S_IFMT(found.st_mode))
            if found.st_size > max_bytes:
                raise _too_large(self, max_bytes)
            yield file

    def files(self, max_files: int = _MAX_FILES, max_bytes: int = MAX_FILE_BYTES) -> list[Found]:
        """The regular files below, sorted by name.

        Raises: InvalidRequest for a link or a special file, or if a limit is exceeded.
        """
        found: list[Found] = []
        waiting: list[SourcePath] = [self]
        num_entries = num_bytes = 0
        while waiting:
            folder = waiting.pop()
            for path, kind, size in folder._entries(max_files):
                num_entries, num_bytes = num_entries + 1, num_bytes + size
                if num_entries > max_files:
                    raise InvalidRequest(f"{self}: holds more than {max_files:,} files and folders.")
                if num_bytes > max_bytes:
                    raise InvalidRequest(
                        f"{path}: makes its folder larger than {_size(max_bytes)}: put data into the image."
                    )
                if len(path.parts) > _MAX_DEPTH:
                    raise InvalidRequest(f"{self}: has folders more than {_MAX_DEPTH} deep.")
                if kind == stat.S_IFDIR:
                    waiting.append(path)
                else:
                    found.append(Found(path, size))
        return sorted(found, key=lambda one: one.path.parts)

    def _entries(self, most: int) -> list[tuple[SourcePath, int, int]]:
        """(path, kind, bytes) of the folder's direct entries, at most one more than `most`. Raises: InvalidRequest for
        a link or a special file.
        """
        entries: list[tuple[SourcePath, int, int]] = []
        with _naming_errors(self), self._opened() as fd, os.scandir(fd) as listed:
            for entry in listed:
                mode = entry.stat(follow_symlinks=False)
                kind = stat.S_IFMT(mode.st_mode)
                path = self / entry.name
                if kind not in (stat.S_IFREG, stat.S_IFDIR):
                    raise _refusal(path, kind)
                entries.append((path, kind, mode.st_size if kind == stat.S_IFREG else 0))
                if len(entries) > most:
                    break
        return entries

    def _is(self, kind: int) -> bool:
        found = self._kind()
        if found not in (None, kind):
            raise _refusal(self, found)
        return found is not None

    def _kind(self) -> int | None:
        """None if it does not exist. Raises: InvalidRequest if it is neither a file nor a folder."""
        if not self.parts:
            return stat.S_IFDIR
        with _naming_errors(self):
            try:
                with self.parent._opened() as folder:
                    kind = stat.S_IFMT(os.stat(self.name, dir_fd=folder, follow_symlinks=False).st_mode)
            except FileNotFoundError:
                return None
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise _refusal(self, kind)
        return kind

    @contextmanager
    def _opened(self) -> Generator[int]:
        """Raises: InvalidRequest, naming the component that is not a folder; OSError."""
        if sys.platform == "win32":
            raise InvalidRequest(f"cannot read {self}: files that a task names are read on Linux and macOS only.")
        fd = os.open(self.root, _FOLDER & ~os.O_NOFOLLOW)
        try:
            for at, name in enumerate(self.parts, 1):
                kind = stat.S_IFMT(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
                if kind != stat.S_IFDIR:
                    raise _refusal(SourcePath(self.root, self.parts[:at]), kind)
                below = os.open(name, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _count(self, num_bytes: int, max_bytes: int) -> None:
        if num_bytes > max_bytes:
            raise _too_large(self, max_bytes)
        self.spent[0] += num_bytes
        if self.spent[0] > _MAX_READ_BYTES:
            raise InvalidRequest(f"{self.root}: names more than {_MAX_READ_BYTES >> 20} MiB of files.")


@contextmanager
def opened_source(path: Path, wall: Path, max_bytes: int) -> Generator[BinaryIO]:
    """A file of a dataset. It may be a link within `wall`, because Hugging Face downloads consist of such links.

    Raises: InvalidRequest if the file is outside, not a regular file, or larger.
    """
    try:
        inside = path.resolve(strict=True).relative_to(wall.resolve())
    except (ValueError, OSError, RuntimeError):
        raise InvalidRequest(f"{path}: is a link that leads out of {wall}, or nowhere. Copy the file there.") from None
    with SourcePath(wall, inside.parts).opened(max_bytes) as file:
        yield file


@contextmanager
def _naming_errors(path: SourcePath) -> Generator[None]:
    """Raises: InvalidRequest, naming the path, for a system error that is not specific to this process."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _refusal(path: SourcePath, kind: int | None) -> InvalidRequest:
    return InvalidRequest(f"{path}: is {_KINDS.get(kind or 0, 'no regular file')}.")


def _too_large(path: SourcePath, max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"{path}: is larger than {_size(max_bytes)}.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _check_name(name: str, folder: str) -> None:
    if _ODD.search(name):
        raise InvalidRequest(f"{folder!r} has the name {name!r}: names must be UTF-8 without control characters.")
