"""Copies folder trees that an untrusted program wrote, even while it runs, and even as root.

Invariants: every entry is opened from its parent's descriptor and never through a link. Links are copied as links,
pipes and sockets as such, and devices not at all. Modes, owners, times, hard links, holes and the user's extended
attributes are kept. Nothing waits for the program, holes are not read, and a tree that is moved about meanwhile is not
copied endlessly.
Blocking: call from a worker thread.

File copies skip holes, since a program can create at once holes that would take hours to read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest

from gangline.domain.errors import RuntimeFailed

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MAX_DEPTH = 200
"""Nesting depth of folders. Each level takes three descriptors."""
_FICLONE = 0x40049409
_KEPT_ATTRIBUTES = ("user.", "system.posix_acl_")
_OVERLAY_ATTRIBUTES = ("trusted.overlay.opaque", "trusted.overlay.redirect")
"""Without them removed files would reappear and renamed folders' files would vanish. Only root can set them."""

_PIECE_BYTES = 1 << 20


def copy_content(source: int, target: int, size: int) -> int:
    """Copy an open file of that size to an empty one. Returns the number of bytes written."""
    num_bytes = 0
    for start, end in _written(source, size):
        position = start
        while position < end:
            piece = os.pread(source, min(_PIECE_BYTES, end - position), position)
            if not piece:
                break
            os.pwrite(target, piece, position)
            position += len(piece)
            num_bytes += len(piece)
    os.ftruncate(target, size)
    return num_bytes


def have_equal_content(one: int, other: int, size: int) -> bool:
    """Whether two open files of that size have the same bytes and the same holes."""
    for mine, theirs in zip_longest(_written(one, size), _written(other, size)):
        if mine is None or mine != theirs or not _are_equal(one, other, *mine):
            return False
    return True


def _are_equal(one: int, other: int, start: int, end: int) -> bool:
    while start < end:
        pieces = [os.pread(fd, min(_PIECE_BYTES, end - start), start) for fd in (one, other)]
        if pieces[0] != pieces[1] or not pieces[0]:
            return False
        start += len(pieces[0])
    return True


def _written(fd: int, size: int) -> Generator[tuple[int, int]]:
    """Parts of a file that are not holes, as (start, end)."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole until the end
                return
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position


class TreeCopy:
    """One copy of one or more trees. Hard links between the trees stay links."""

    def __init__(
        self,
        target: int,
        *,
        previous: int | None = None,
        owners: Mapping[int, int] | int | None = None,
        overlay: bool = False,
        max_bytes: int | None = None,
        max_files: int | None = None,
        what: str = "a checkpoint",
    ) -> None:
        """
        target: descriptor of a folder that no other process writes.
        previous: descriptor of an earlier copy that no longer changes. Equal files are linked to it.
        owners: user (and group) -> the id to write instead; or the one id to write for all.
        overlay: whether the source is the upper layer of an overlay, whose marks of removed files are kept.
        max_bytes, max_files: the source's own limits. A tree that is moved about during the copy is copied repeatedly,
            and refused beyond them.
        what: the tree, for messages.
        """
        self._what = what
        self.num_bytes = 0
        """Bytes written."""
        self.num_files = 0
        self.has_cloned = False
        """Whether the file system shares bytes with the source."""
        self._num_folders = 0
        self._may_clone = True
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._root = target
        self._previous = previous
        self._owners: Mapping[int, int] | int = {} if owners is None else owners
        self._overlay = overlay
        self._attributes = _OVERLAY_ATTRIBUTES if overlay else ()
        self._is_root = os.geteuid() == 0
        self._linked: dict[tuple[int, int], str] = {}

    def add(self, source: int, name: str = "", *, mode: int | None = None) -> None:
        """Copy a folder's content and its own attributes.

        name: path in the target, made if it is missing; empty is the target itself.
        mode: of the copy; None keeps the source's.
        Raises: RuntimeFailed for a tree that is too deep, or too large; OSError.
        """
        with ExitStack() as stack:
            target, previous = self._root, self._previous
            for part in filter(None, name.split("/")):
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=target)
                target = stack.enter_context(_opened(part, target))
                previous = _below(stack, part, previous)
            self._folder(source, target, previous, f"{name}/" if name else "", 0)
            self._give_attributes(source, target, os.fstat(source))
            if mode is not None:
                os.fchmod(target, mode)

    def _folder(self, source: int, target: int, previous: int | None, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise RuntimeFailed(f"folders are nested more than {MAX_DEPTH} deep, which is too deep for {self._what}.")
        with os.scandir(source) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            with suppress(FileNotFoundError):  # removed by a process that was not frozen
                self._entry(name, source, target, previous, path, depth)

    def _entry(self, name: str, source: int, target: int, previous: int | None, path: str, depth: int) -> None:
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(found.st_mode)
        self._check_size()
        if kind == stat.S_IFDIR:
            self._num_folders += 1
            with ExitStack() as stack:
                below = stack.enter_context(self._readable(name, source, _FOLDER, found))
                if below is None:
                    return
                os.mkdir(name, 0o700, dir_fd=target)
                made = stack.enter_context(_opened(name, target))
                self._folder(below, made, _below(stack, name, previous), f"{path}{name}/", depth + 1)
                self._give_attributes(below, made, found)
            return
        self.num_files += 1
        if found.st_nlink > 1 and (known := self._linked.get((found.st_dev, found.st_ino))) is not None:
            os.link(known, name, src_dir_fd=self._root, dst_dir_fd=target, follow_symlinks=False)
            return
        if kind == stat.S_IFREG:
            self._file(name, source, target, previous, found)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            self._give_owner_and_times(name, target, found)
        elif kind in (stat.S_IFIFO, stat.S_IFSOCK):
            os.mknod(name, found.st_mode, dir_fd=target)
            os.chmod(name, stat.S_IMODE(found.st_mode), dir_fd=target)  # no other process can add a link
            self._give_owner_and_times(name, target, found)
        elif kind == stat.S_IFCHR and found.st_rdev == 0 and self._overlay:  # the mark of a removed file
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
        else:
            self.num_files -= 1
            return
        if found.st_nlink > 1:
            self._linked[found.st_dev, found.st_ino] = f"{path}{name}"

    def _check_size(self) -> None:
        """Raises: RuntimeFailed."""
        if self._max_files is not None and self.num_files + self._num_folders > self._max_files:
            raise RuntimeFailed(f"{self._what} would have more than {self._max_files} files, the sandbox's limit.")
        if self._max_bytes is not None and self.num_bytes > self._max_bytes:
            raise RuntimeFailed(f"{self._what} would have more than {self._max_bytes} bytes, the sandbox's limit.")

    def _file(self, name: str, source: int, target: int, previous: int | None, found: os.stat_result) -> None:
        with self._readable(name, source, _FILE, found) as fd:
            if fd is None or not stat.S_ISREG(os.fstat(fd).st_mode):
                return
            if previous is not None and found.st_nlink == 1 and self._is_same(name, fd, previous, found):
                os.link(name, name, src_dir_fd=previous, dst_dir_fd=target, follow_symlinks=False)
                return
            made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
            try:
                self._content(fd, made, os.fstat(fd))
                self._give_attributes(fd, made, found)
            finally:
                os.close(made)

    def _content(self, source: int, target: int, found: os.stat_result) -> None:
        if found.st_size == 0:
            return
        if self._may_clone:
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError:
                self._may_clone = False
            else:
                self.has_cloned = True
                return
        self.num_bytes += copy_content(source, target, found.st_size)

    def _is_same(self, name: str, fd: int, previous: int, found: os.stat_result) -> bool:
        """Whether the earlier copy has the same file. Compares contents, since writes through a mapping leave no
        trace."""
        try:
            earlier = os.open(name, _FILE, dir_fd=previous)
        except OSError:
            return False
        try:
            there = os.fstat(earlier)
            if not stat.S_ISREG(there.st_mode) or _facts(there) != _facts(found):
                return False
            if self._given(fd) != self._given(earlier):
                return False
            return have_equal_content(fd, earlier, found.st_size)
        finally:
            os.close(earlier)

    @contextmanager
    def _readable(self, name: str, parent: int, flags: int, found: os.stat_result) -> Generator[int | None]:
        """A descriptor, even if the owner has removed its own permission; None if the file cannot be opened."""
        needed = stat.S_IRUSR | stat.S_IXUSR if stat.S_ISDIR(found.st_mode) else stat.S_IRUSR
        is_closed = not self._is_root and found.st_mode & needed != needed
        with ExitStack() as stack:
            try:
                if is_closed:
                    fd = stack.enter_context(self._forced(name, parent, flags, found))
                else:
                    fd = os.open(name, flags, dir_fd=parent)
                    stack.callback(os.close, fd)
            except PermissionError:
                fd = stack.enter_context(self._forced(name, parent, flags, found))
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # otherwise it was replaced meanwhile
                    raise
                fd = None
            yield fd

    @staticmethod
    @contextmanager
    def _forced(name: str, parent: int, flags: int, found: os.stat_result) -> Generator[int | None]:
        """A descriptor of our own file. Its permissions are open until the context ends: in a closed folder, no files
        are found."""
        held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            there = os.fstat(held)
            if there.st_uid != os.geteuid() or stat.S_IFMT(there.st_mode) != stat.S_IFMT(found.st_mode):
                yield None
                return
            path = f"/proc/self/fd/{held}"
            os.chmod(path, stat.S_IMODE(there.st_mode) | stat.S_IRWXU)
            try:
                fd = os.open(path, flags & ~os.O_NOFOLLOW)
                try:
                    yield fd
                finally:
                    os.close(fd)
            finally:
                os.chmod(path, stat.S_IMODE(there.st_mode))
        finally:
            os.close(held)

    def _given(self, fd: int) -> dict[str, bytes]:
        """Extended attributes to copy."""
        try:
            names = os.listxattr(fd)
            wanted = [name for name in names if name.startswith(_KEPT_ATTRIBUTES) or name in self._attributes]
            return {name: os.getxattr(fd, name) for name in wanted}
        except OSError:  # unsupported by the file system, or the file was changed meanwhile
            return {}

    def _give_attributes(self, source: int, target: int, found: os.stat_result) -> None:
        """Set owner and attributes of an open file or folder."""
        if self._is_root:
            os.fchown(target, self._owner(found.st_uid), self._owner(found.st_gid))
        for name, value in self._given(source).items():
            os.setxattr(target, name, value)
        os.fchmod(target, stat.S_IMODE(found.st_mode))
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))

    def _give_owner_and_times(self, name: str, target: int, found: os.stat_result) -> None:
        if self._is_root:
            owner, group = self._owner(found.st_uid), self._owner(found.st_gid)
            os.chown(name, owner, group, dir_fd=target, follow_symlinks=False)
        os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=target, follow_symlinks=False)

    def _owner(self, number: int) -> int:
        return self._owners if isinstance(self._owners, int) else self._owners.get(number, number)


def _facts(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_mode, found.st_uid, found.st_gid


@contextmanager
def _opened(name: str, parent: int) -> Generator[int]:
    fd = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _below(stack: ExitStack, name: str, parent: int | None) -> int | None:
    """The folder of that name in an earlier copy, or None."""
    if parent is not None:
        with suppress(OSError):
            return stack.enter_context(_opened(name, parent))
    return None
