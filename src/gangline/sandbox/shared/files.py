"""Copies bytes into and out of folders that an untrusted program writes, from the host's side.

Invariants: every path component is opened separately, from its parent's descriptor, and never through a link. Only a
regular file is read, and only a bounded part of it. A write replaces any file of that name, so planted links and pipes
have no effect. Blocking: call from a worker thread.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath

from gangline.domain.errors import InvalidRequest, LimitExceeded, NotFound
from gangline.sandbox.shared.removal import remove_tree

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG, errno.EINVAL)


class SharedFolders:
    """The folders that a runtime shares with the host: path inside -> host folder."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        workdir: str,
        *,
        uid: int | None = None,
        closed: Sequence[str] = (),
        lasting: Sequence[str] = (),
        owners: Mapping[str, int] | None = None,
    ) -> None:
        """
        workdir: where relative paths begin.
        uid: owner (and group) of written files; None is the current user.
        closed: paths inside whose files can be neither read nor written.
        owners: paths inside whose files have another owner.
        lasting: folders inside that `clear` empties but never removes, like `folders`.
        """
        self._folders = {PurePosixPath(inside): folder for inside, folder in folders.items()}
        self._closed = {PurePosixPath(inside) for inside in closed}
        self._lasting = {*self._folders, *map(PurePosixPath, lasting)}
        self._workdir = PurePosixPath(workdir)
        self._owners = {PurePosixPath("/"): uid, **{PurePosixPath(path): uid for path, uid in (owners or {}).items()}}

    def read(self, path: str, max_bytes: int) -> bytes:
        """Raises: NotFound, LimitExceeded, InvalidRequest."""
        root, names = self._file(path)
        with _naming_errors(path), _parent(root, names, None) as parent:
            fd = os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise InvalidRequest(f"{path!r} is not a regular file.")
                data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise LimitExceeded(f"{path!r} is longer than {max_bytes} bytes.", limit_bytes=max_bytes)
        return data

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Raises: InvalidRequest when a component is a link or not a folder, or the path is a folder."""
        root, names = self._file(path)
        own = partial(_own, self._owner(path))
        with _naming_errors(path), _parent(root, names, own) as parent:
            temporary = f".gangline-{secrets.token_hex(8)}"
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fchmod(fd, mode)
                    own(fd)
                os.rename(temporary, names[-1], src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=parent)
                raise

    def clear(self, path: str) -> None:
        """See `Sandbox.clear`. Raises: InvalidRequest when something cannot be removed."""
        root, names = self._located(path)
        with _naming_errors(path):
            fd = _opened_by_its_owner(os.open(root, (_FOLDER | os.O_PATH) & ~os.O_NOFOLLOW))
            try:
                for name in names[:-1]:
                    below = self._entered(name, fd)
                    if below is None:
                        return  # already gone
                    os.close(fd)
                    fd = below
                if names and self._workdir / path in self._lasting:
                    fd = self._entered_lasting(names[-1], fd, self._owner(path))
                    names = ()
                for name in names[-1:] or os.listdir(fd):
                    _remove(name, fd)
            finally:
                os.close(fd)

    def _entered_lasting(self, name: str, parent: int, owner: int | None) -> int:
        """Descriptor of a folder, in place of its parent's. Creates the folder again if it was replaced or removed."""
        below = self._entered(name, parent)
        if below is None:
            os.mkdir(name, 0o755, dir_fd=parent)
            below = os.open(name, _FOLDER, dir_fd=parent)
            _own(owner, below)
        os.close(parent)
        return below

    @staticmethod
    def _entered(name: str, parent: int) -> int | None:
        """Descriptor of a folder, with its owner's rights restored. Removes a path that is not a folder and returns
        None."""
        try:
            found = os.open(name, _FOLDER | os.O_PATH, dir_fd=parent)  # works without read permission
        except (FileNotFoundError, NotADirectoryError):
            _remove(name, parent)
            return None
        return _opened_by_its_owner(found)

    def _owner(self, path: str) -> int | None:
        whole = self._workdir / path
        return next(self._owners[above] for above in (whole, *whole.parents) if above in self._owners)

    def _file(self, path: str) -> tuple[Path, tuple[str, ...]]:
        root, names = self._located(path)
        if not names:
            raise InvalidRequest(f"{path!r} is a folder.")
        return root, names

    def _located(self, path: str) -> tuple[Path, tuple[str, ...]]:
        """Host folder, and the components below it. The longest mount point wins."""
        whole = self._workdir / path
        if not path or "\0" in path or ".." in whole.parts:
            raise InvalidRequest(f"{path!r} must name a file without `..`.")
        for inside in (whole, *whole.parents):
            if inside in self._closed:
                raise InvalidRequest(f"{path!r} is in {str(inside)!r}, through which no files are moved.")
            if inside in self._folders:
                return self._folders[inside], whole.relative_to(inside).parts
        known = ", ".join(sorted(map(str, self._folders)))
        raise InvalidRequest(f"{path!r} is outside the folders that files can be moved through: {known}.")


def _own(uid: int | None, fd: int) -> None:
    if uid is not None:
        os.fchown(fd, uid, uid)


def _opened_by_its_owner(held: int) -> int:
    """Descriptor of a folder, in place of an `O_PATH` one, even if its owner has closed it."""
    try:
        _give_owner_its_rights(held)
        return os.open(f"/proc/self/fd/{held}", _FOLDER & ~os.O_NOFOLLOW)
    finally:
        os.close(held)


def _give_owner_its_rights(fd: int) -> None:
    """Open a folder that its owner has closed. Other users' folders, such as a container's root, stay unchanged."""
    found = os.fstat(fd)
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU and os.geteuid() in (0, found.st_uid):
        os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRWXU)


def _remove(name: str, parent: int) -> None:
    path = Path(f"/proc/{os.getpid()}/fd/{parent}", name)  # a path that helper programs can see too
    remove_tree(path)
    if os.path.lexists(path):
        raise PermissionError(errno.EACCES, "it cannot be removed")


@contextmanager
def _parent(root: Path, names: tuple[str, ...], own: Callable[[int], None] | None) -> Generator[int]:
    """Descriptor of the last component's folder. With `own`, missing folders are created and passed to it."""
    fd = os.open(root, _FOLDER & ~os.O_NOFOLLOW)  # the root is a host path, and may be a link of /proc
    try:
        for name in names[:-1]:
            if own is not None:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=fd)
                    made = os.open(name, _FOLDER, dir_fd=fd)
                    own(made)
                    os.close(made)
            below = os.open(name, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _naming_errors(path: str) -> Generator[None]:
    """Translates system errors. A full disk is not the caller's fault, so its error is passed on unchanged."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"{path!r} does not exist in the runtime.") from None
    except (NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError) as error:
        raise InvalidRequest(f"{path!r}: {error.strerror}; links are not followed.") from None
    except OSError as error:
        if error.errno in _NOT_A_PLAIN_FILE:
            raise InvalidRequest(f"{path!r} is a link or no regular file.") from None
        raise
