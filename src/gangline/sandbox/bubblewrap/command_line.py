"""The files of a sandbox as a `bwrap` command line, and `bwrap` as a launcher of namespaces.

The root is an empty, read-only file system in memory; every host path in it is bound, read-only, by name. A folder that
must contain a mount point cannot be bound whole, since nothing can be created in it; its entries are bound one by one.
So `/root/tools` can be exposed without the rest of `/root`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.sandbox.commands.holder import PATH, WAITING
from gangline.sandbox.confinement.masks import masked, refuse_hidden_image

HOST_ROOTS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt")
"""Top-level folders of the host that a sandbox sees."""
RESERVED = (
    "/proc",
    "/dev",
    "/sys",
    "/run",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/opt",
)
"""Paths that cannot be a workdir."""
_MADE_BY_US = ("proc", "dev", "sys", "run", "tmp")
SHM_BYTES = 256 << 20
HOST_NAME = "gangline"
"""Host name of every sandbox. It resolves to the loopback, which belongs to the sandbox except under `network:
full`."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The files that a sandbox sees."""

    image: Path | None
    """Folder used as root file system; None is the host's own."""
    shared: Mapping[str, Path]
    """Path inside -> host folder, writable."""
    expose: Sequence[Path]
    """Host paths seen read-only at the same path."""
    mounts: Mapping[str, Path] = {}
    """Path inside -> host folder, read-only."""
    masked: Sequence[Path] = ()
    """Host files that appear empty."""
    hidden: Sequence[Path] = ()
    """Host folders that appear empty, wherever they would appear."""
    passwd: Path
    group: Path
    """Files that replace /etc/passwd and /etc/group, where these exist."""
    hosts: Path
    """The file shown as /etc/hosts."""
    host_network: bool
    user_namespace: bool


class BubblewrapLaunch:
    """See `holder.Launch`."""

    def __init__(self, arguments: Sequence[str], entering: Sequence[str] = ()) -> None:
        """`entering`: start of the command line, which enters the namespace where its folders are mounted."""
        self._arguments = arguments
        self._entering = entering
        self._info_read, self._info_write = os.pipe2(os.O_CLOEXEC)

    def spawn(self, label: str) -> subprocess.Popen[bytes]:
        try:
            with os.fdopen(os.memfd_create("arguments"), "w+b") as file:  # the sandbox can read the command line
                file.write(b"\0".join(map(os.fsencode, self._arguments)))
                file.seek(0)
                return subprocess.Popen(
                    [
                        *self._entering,
                        *("bwrap", "--info-fd", str(self._info_write), "--args", str(file.fileno())),
                        *WAITING,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[self._info_write, file.fileno()],
                    env={"PATH": PATH, "GANGLINE_RUNTIME": label},
                    cwd="/",
                )
        except OSError as error:
            raise RuntimeFailed(f"bwrap could not be started: {error}. Run `apt-get install bubblewrap`.") from error
        finally:
            os.close(self._info_write)

    async def first_pid(self, process: subprocess.Popen[bytes]) -> int:
        """Returns at once: bwrap reports it before the command starts."""
        return json.loads(os.read(self._info_read, 65536))["child-pid"]

    def close(self) -> None:
        os.close(self._info_read)


_LISTS_OF_KEYS = ("/proc/keys", "/proc/key-users")
"""The kernel shows a user's keys to all processes of that user, in any namespaces."""


def arguments(view: View) -> list[str]:
    """Arguments of `bwrap`, up to the command. Raises: InvalidRequest when the image is not a folder."""
    empty = masked(view.hidden, _seen(view)) if view.hidden else []
    mounts = [*_root(view), *_devices(view), *_folders(view, empty)]
    closed = (*empty, "/dev", "/")
    return [*_namespaces(view), *mounts, *(word for path in closed for word in ("--remount-ro", path))]


def _tops(view: View) -> list[Path]:
    """Raises: InvalidRequest when the image is not a folder, or a hidden one."""
    if view.image is None:
        return [Path("/") / name for name in HOST_ROOTS]
    if not view.image.is_dir():
        raise InvalidRequest(f"runtime.image must be a folder with a root file system, {str(view.image)!r} is none.")
    refuse_hidden_image(view.image, view.hidden)
    return sorted(entry for entry in view.image.iterdir() if entry.name not in _MADE_BY_US)


def _seen(view: View) -> dict[str, Path]:
    """Path inside -> host folder, for the paths bound read-only; links stay links."""
    tops = {f"/{top.name}": top for top in _tops(view) if not top.is_symlink()}
    return tops | _read_only(view)


def _read_only(view: View) -> dict[str, Path]:
    """Path inside -> host folder, for the folders seen in addition to the root's."""
    return {**{str(path): path for path in view.expose}, **view.mounts}


def _namespaces(view: View) -> list[str]:
    names = ["pid", "ipc", "uts", "cgroup-try"]
    names += ["user"] if view.user_namespace else []
    names += [] if view.host_network else ["net"]
    return [
        "--die-with-parent",
        *(f"--unshare-{name}" for name in names),
        "--hostname",
        HOST_NAME,
        "--clearenv",
        "--setenv",
        "PATH",
        "/usr/bin:/bin",
    ]


def _root(view: View) -> list[str]:
    inner = [*map(str, map(PurePosixPath, view.shared)), *map(str, map(PurePosixPath, _read_only(view)))]
    if not _etc(view, "hosts").is_file():
        inner.append("/etc/hosts")
    args: list[str] = []
    for top in _tops(view):
        if os.path.lexists(top):
            args += _bound(top, f"/{top.name}", inner)
    if view.host_network:
        args += _resolver()
    for name, file in (("passwd", view.passwd), ("group", view.group)):
        if _etc(view, name).is_file():
            args += ["--ro-bind", str(file), f"/etc/{name}"]
    args += [] if _etc(view, "").exists() else ["--perms", "0755", "--dir", "/etc"]
    args += ["--ro-bind", str(view.hosts), "/etc/hosts"]
    for path in view.masked:
        args += ["--ro-bind", "/dev/null", str(path)]
    return args


def _etc(view: View, name: str) -> Path:
    return (view.image or Path("/")) / "etc" / name


def _bound(source: Path, target: str, inner: Iterable[str]) -> list[str]:
    """Bind `source` read-only at `target`. Leaves out mount points in `inner` that `source` does not have."""
    if source.is_symlink():
        return ["--symlink", os.readlink(source), target]
    below = [path for path in inner if path.startswith(f"{target}/")]
    if not source.is_dir() or all(os.path.isdir(f"{source}{path.removeprefix(target)}") for path in below):
        return ["--ro-bind", str(source), target]
    args = ["--perms", "0755", "--dir", target]
    for entry in sorted(source.iterdir()):
        if f"{target}/{entry.name}" not in below:
            args += _bound(entry, f"{target}/{entry.name}", below)
    return args


def _resolver() -> list[str]:
    """With the host's network, names must resolve, and /etc/resolv.conf is often a link to a file outside /etc."""
    real = Path("/etc/resolv.conf").resolve()
    return ["--ro-bind", str(real), str(real)] if real.is_file() and not str(real).startswith("/etc/") else []


def _devices(view: View) -> list[str]:
    shm = ["--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
    keys = [word for path in _LISTS_OF_KEYS if os.path.exists(path) for word in ("--ro-bind", "/dev/null", path)]
    return ["--proc", "/proc", *keys, "--dev", "/dev", *shm, "--perms", "0755", "--dir", "/run"]


def _folders(view: View, empty: Sequence[str]) -> list[str]:
    """Exposed, empty and shared folders, outer ones first, so that they do not hide inner ones.

    Their parent folders are listed too, since bubblewrap would create them accessible only to their owner.
    """
    mounts = [(("--ro-bind", str(path)), PurePosixPath(inside)) for inside, path in _read_only(view).items()]
    mounts += [(("--perms", "0755", "--size", "4096", "--tmpfs"), PurePosixPath(path)) for path in empty]
    mounts += [(("--bind", str(folder)), PurePosixPath(inside)) for inside, folder in view.shared.items()]
    args = ["--perms", "0755", "--dir", "/var", "--perms", "1777", "--dir", "/var/tmp"] if view.image is None else []
    made: set[PurePosixPath] = {PurePosixPath("/")}
    for options, inside in sorted(mounts, key=lambda mount: len(mount[1].parts)):
        for parent in sorted(set(inside.parents) - made, key=lambda path: len(path.parts)):
            args += ["--perms", "0755", "--dir", str(parent)]
        made |= set(inside.parents)
        args += [*options, str(inside)]
    return args


def private_files(etc: Path = Path("/etc")) -> list[Path]:
    """Files under `etc` that not everyone may read, which must be hidden from a sandbox that runs as their owner.

    Folders that not everyone may enter are listed as well.
    """
    found: list[Path] = []
    for name, folders, files in os.walk(etc):
        folder = Path(name)
        if not os.stat(folder).st_mode & 0o001:
            folders.clear()
            found += (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
            continue
        for path in (folder / file for file in files):
            if not path.is_symlink() and not path.stat().st_mode & 0o004:
                found.append(path)
    return found
