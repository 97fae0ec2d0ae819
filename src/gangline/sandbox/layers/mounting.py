"""One view of several layers: an overlay mount that exists only in a separate mount namespace.

Laws
- The host never has the mount. A descriptor holds its namespace, and the kernel unmounts it with the last descriptor or
  process that uses it, even if this process crashes.
- Every layer shows its files as owned by the sandbox's user: the mount maps other owners.
- Removed files and replaced or renamed folders of a layer are marked by attributes that only root can set.
- Nothing is synced: the files need not survive a crash of the machine (`volatile`).

A namespace belongs to a thread, so each view is made by a separate thread, which then ends. Blocking.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import NamedTuple, TypeVar

from gangline.domain.errors import RuntimeFailed

_T = TypeVar("_T")
_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 4096, 1 << 14, 1 << 19
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
"""System call numbers since Linux 5.12, the same on all supported machines."""
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 1, 4, 0x100000
_OPTIONS = "index=off,metacopy=off,redirect_dir=on,xino=off,volatile"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Lower(NamedTuple):
    """A frozen layer."""

    folder: Path
    owners: Mapping[int, int]
    """User on disk -> user in the view; empty: unchanged."""


class View:
    """The merged files of one sandbox."""

    def __init__(self, namespace_fd: int, root_fd: int) -> None:
        self._namespace_fd = namespace_fd
        self._root_fd = root_fd

    @property
    def root(self) -> Path:
        """The merged root, usable by all programs of this user on the host."""
        return Path(f"/proc/{os.getpid()}/fd/{self._root_fd}")

    @property
    def entering(self) -> list[str]:
        """Start of a command line that sees the mounts."""
        return ["nsenter", f"--mount=/proc/{os.getpid()}/fd/{self._namespace_fd}", "--"]

    def close(self) -> None:
        """Release the view; it is unmounted when its last process ends. Idempotent."""
        if self._root_fd >= 0:
            os.close(self._root_fd)
            os.close(self._namespace_fd)
            self._root_fd = self._namespace_fd = -1


def mounted(folder: Path, lowers: Sequence[Lower], names: Sequence[str]) -> View:
    """Mount layers, the topmost first, under the new layer `folder/upper/files`.

    folder: the sandbox's; working folders are made in it.
    names: folders in `folder`; the view's folder of the same name is mounted over each.
    Raises: RuntimeFailed.
    """
    return _in_thread(lambda: _mounted(folder, lowers, names))


def can_mount(folder: Path) -> bool:
    """Whether views with mapped owners can be mounted from layers in `folder`."""
    if os.geteuid() != 0 or shutil.which("nsenter") is None:
        return False
    try:
        with TemporaryDirectory(prefix=".gangline-", dir=folder) as name:
            below = Path(name, "below", "inside")
            below.mkdir(parents=True)
            os.chown(below, 1, 1)
            Path(name, "inside").mkdir()
            view = mounted(Path(name), [Lower(below.parent, {0: 0, 1: 2})], ["inside"])
            try:
                return (view.root / "inside").stat().st_uid == 2
            finally:
                view.close()
    except (RuntimeFailed, OSError):
        return False


def _in_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a new thread, whose namespace ends with it. Raises: RuntimeFailed."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, name="layers")
    thread.start()
    thread.join()
    if failed:
        raise RuntimeFailed(f"the layers of a sandbox cannot be mounted: {failed[0]}.") from failed[0]
    return done[0]


def _mounted(folder: Path, lowers: Sequence[Lower], names: Sequence[str]) -> View:
    _called("unshare", _libc.unshare(_CLONE_FS | _CLONE_NEWNS))
    _called("mount /", _libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None))
    upper = folder / "upper"
    shutil.rmtree(upper / "work", ignore_errors=True)  # with its `volatile` mark
    for path in (upper / "files", upper / "work", folder / "view"):
        path.mkdir(parents=True, exist_ok=True)
    users: dict[tuple[tuple[int, int], ...], int] = {}
    try:
        for number, lower in enumerate(lowers):
            point = folder / "lower" / str(number)
            point.mkdir(parents=True, exist_ok=True)
            _show(lower, point, users)
    finally:
        for fd in users.values():
            os.close(fd)
    os.chdir(folder / "lower")  # for this thread only; short names, since the kernel limits options to 4,096 bytes
    below = ":".join(map(str, range(len(lowers))))
    options = f"lowerdir={below},upperdir=../upper/files,workdir=../upper/work,{_OPTIONS}"
    flags = _MS_NOSUID | _MS_NODEV
    _called("mount overlay", _libc.mount(b"overlay", b"../view", b"overlay", flags, options.encode()))
    os.chdir("/")
    for name in names:
        source, target = os.fsencode(folder / "view" / name), os.fsencode(folder / name)
        _called(f"bind {name}", _libc.mount(source, target, None, _MS_BIND, None))
    root = os.open(folder / "view", _FOLDER)
    try:
        return View(os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), root)
    except BaseException:
        os.close(root)
        raise


def _show(lower: Lower, point: Path, users: dict[tuple[tuple[int, int], ...], int]) -> None:
    """Mount a layer with mapped owners. `users`: mapping -> descriptor of its user namespace; extended here."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = _called("open_tree", _libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(lower.folder), flags))
    try:
        if lower.owners:
            key = tuple(sorted(lower.owners.items()))
            if key not in users:
                users[key] = _user_namespace(lower.owners)
            attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_IDMAP, 0, 0, users[key])
            size = ctypes.sizeof(attributes)
            given = _libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size)
            _called("mount_setattr", given)
        moved = _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(point), _MOVE_MOUNT_F_EMPTY_PATH)
        _called("move_mount", moved)
    finally:
        os.close(tree)


def _user_namespace(owners: Mapping[int, int]) -> int:
    """Descriptor of a user namespace that maps users and groups this way."""
    lines = "".join(f"{there} {here} 1\n" for there, here in owners.items())
    argv = ["unshare", "--user", "--", "sh", "-c", "echo; read _"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.read(1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{process.pid}/{name}").write_text(lines)
            return os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            process.kill()


def _called(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result
