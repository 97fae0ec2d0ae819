"""The files of a sandbox as a `bwrap` command line, and `bwrap` as a launcher of namespaces.

The root is an empty, read-only file system in memory; every host path in it is bound, read-only, by name. A folder that
must contain a mount point cannot be bound whole, since nothing can be created in it; its entries are bound one by one.
So `/root/tools` can be exposed without the rest of `/root`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.sandbox.commands.holder import PATH, WAITING
from gangline.sandbox.confinement.masks import masked

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
IMAGE_RESERVED = ("/proc", "/dev", "/sys", "/run", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""The same where the root is an image's."""
IMAGE_ROOT = "/image"
"""Where the root of an image is made. The first process is the host's own `sh`, since an image's could be anything:
it starts outside of it, then the folder becomes the root."""
_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_MAX_LINKS = 40
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
    files: Collection[str]
    """Names of files in /etc that we write. `passwd` and `group` are shown where the root has them."""
    host_network: bool
    user_namespace: bool


def _in_memory(held: ExitStack, content: bytes) -> int:
    """A descriptor of a file with this content, which `held` closes."""
    fd = os.memfd_create("gangline")
    held.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class BubblewrapLaunch:
    """See `holder.Launch`."""

    def __init__(self, arguments: Sequence[str], entering: Sequence[str], files: Mapping[str, str]) -> None:
        """
        entering: start of the command line, which enters the namespace where its folders are mounted.
        files: word of the arguments -> content of the file whose descriptor takes its place.
        """
        self._arguments = arguments
        self._entering = entering
        self._files = files
        self._info_fd = -1

    def spawn(self, label: str) -> subprocess.Popen[bytes]:
        try:
            with ExitStack() as given:  # the sandbox can read the command line
                files = {word: _in_memory(given, text.encode()) for word, text in self._files.items()}
                words = [str(files.get(word, word)) for word in self._arguments]
                file = _in_memory(given, b"\0".join(map(os.fsencode, words)))
                self._info_fd, info_fd = os.pipe2(os.O_CLOEXEC)
                given.callback(os.close, info_fd)
                return subprocess.Popen(
                    [
                        *self._entering,
                        *("bwrap", "--info-fd", str(info_fd), "--args", str(file)),
                        *WAITING,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[info_fd, file, *files.values()],
                    env={"PATH": PATH, "GANGLINE_RUNTIME": label},
                    cwd="/",
                )
        except OSError as error:
            raise RuntimeFailed(f"bwrap could not be started: {error}. Run `apt-get install bubblewrap`.") from error

    async def first_pid(self, process: subprocess.Popen[bytes]) -> int:
        """Returns at once: bwrap reports it before the command starts."""
        return json.loads(os.read(self._info_fd, 65536))["child-pid"]

    def close(self) -> None:
        if self._info_fd >= 0:
            os.close(self._info_fd)


_LISTS_OF_KEYS = ("/proc/keys", "/proc/key-users")
"""The kernel shows a user's keys to all processes of that user, in any namespaces."""
_Mount = tuple[str, ...]
"""Words of `bwrap` that end with a path inside."""


def arguments(view: View) -> list[str]:
    """Arguments of `bwrap`, up to the command. Raises: InvalidRequest when the image is not a folder."""
    empty = masked(view.hidden, _seen(view)) if view.hidden else []
    mounts = [*_root(view), *_devices(), *_folders(view, empty)]
    mounts += [("--remount-ro", path) for path in (*empty, "/dev", "/")]
    above: list[_Mount] = []
    at = ""
    if view.image is not None:
        above = [("--ro-bind-try", f"/{name}", f"/{name}") for name in _PROGRAMS]
        above += [("--perms", "0755", "--tmpfs", IMAGE_ROOT)]
        at = IMAGE_ROOT
    placed = [*above, *((*words, f"{at}{inside}") for *words, inside in mounts)]
    return [*_namespaces(view), *(word for mount in placed for word in mount)]


def _tops(view: View) -> list[Path]:
    """Raises: InvalidRequest when the image is not a folder."""
    if view.image is None:
        return [Path("/") / name for name in HOST_ROOTS]
    if not view.image.is_dir():
        raise InvalidRequest(f"runtime.image must be a folder with a root file system, {str(view.image)!r} is none.")
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


def _root(view: View) -> list[_Mount]:
    files = _files(view)
    inner = [*map(str, map(PurePosixPath, view.shared)), *map(str, map(PurePosixPath, _read_only(view))), *files]
    bound = partial(_bound, inner=inner, is_ours=view.image is None)
    mounts = [mount for top in _tops(view) if os.path.lexists(top) for mount in bound(top, f"/{top.name}")]
    if not _is_folder(_etc(view)):
        mounts.append(("--perms", "0755", "--dir", "/etc"))
    mounts += [(*words, path) for path, words in files.items()]
    return [*mounts, *(("--ro-bind", "/dev/null", str(path)) for path in view.masked)]


def _etc(view: View) -> Path:
    return (view.image or Path("/")) / "etc"


def _files(view: View) -> dict[str, Sequence[str]]:
    """Path inside -> words of the mount before it, for the files that replace the root's."""
    etc = _etc(view)
    has_etc = _is_folder(etc)
    files: dict[str, Sequence[str]] = {
        f"/etc/{name}": ("--perms", "0644", "--ro-bind-data", name)
        for name in view.files
        if name not in ("passwd", "group") or (has_etc and os.path.lexists(etc / name))
    }
    resolver = Path("/etc/resolv.conf").resolve()
    if view.host_network and resolver.is_file():  # often a link to a file outside /etc
        if view.image is not None:
            files["/etc/resolv.conf"] = ("--ro-bind", str(resolver))
        elif not resolver.is_relative_to("/etc"):
            files[str(resolver)] = ("--ro-bind", str(resolver))
    return files


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _bound(source: Path, target: str, inner: Sequence[str], *, is_ours: bool) -> list[_Mount]:
    """Bind `source` read-only at `target`. Leaves out mount points in `inner` that `source` does not have.

    is_ours: whether the links are the host's own. An image's link is not shown where a mount would follow it: while
    `bwrap` makes the mounts, `/oldroot` is the host's root.
    """
    below = [path for path in inner if path.startswith(f"{target}/")]
    if target in inner and not is_ours:
        return []
    if source.is_symlink() and (is_ours or not below):
        return [("--symlink", os.readlink(source), target)]
    if all(_is_there(source, path.removeprefix(f"{target}/"), is_ours=is_ours) for path in below):
        return [("--ro-bind", str(source), target)]
    mounts: list[_Mount] = [("--perms", "0755", "--dir", target)]
    for entry in sorted(source.iterdir()) if _is_folder(source) else ():
        if f"{target}/{entry.name}" not in below:
            mounts += _bound(entry, f"{target}/{entry.name}", below, is_ours=is_ours)
    return mounts


def _is_there(top: Path, below: str, *, is_ours: bool) -> bool:
    """Whether a folder has a mount point, without a link on the way."""
    if is_ours:
        return (top / below).exists()
    path = top
    for part in PurePosixPath(below).parts:
        if not _is_folder(path):
            return False
        path /= part
    return os.path.lexists(path) and not path.is_symlink()


def content_of(image: Path, inside: str) -> Path | None:
    """The folder that an image has at a path, with links as they would lead inside it; None without one. Blocking."""
    found: list[str] = []
    left = [*reversed(PurePosixPath(inside).parts[1:])]
    num_links = 0
    try:
        while left:
            part = left.pop()
            if part == "..":
                found = found[:-1]
            elif (here := image.joinpath(*found, part)).is_symlink():
                num_links += 1
                if num_links > _MAX_LINKS:
                    return None
                target = PurePosixPath(os.readlink(here))
                found = [] if target.is_absolute() else found
                left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            else:
                found.append(part)
        folder = image.joinpath(*found)
        return folder if _is_folder(folder) else None
    except OSError:  # a name that is too long
        return None


def _devices() -> list[_Mount]:
    keys = [("--ro-bind", "/dev/null", path) for path in _LISTS_OF_KEYS if os.path.exists(path)]
    shm = ("--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm")
    return [("--proc", "/proc"), *keys, ("--dev", "/dev"), shm, ("--perms", "0755", "--dir", "/run")]


def _folders(view: View, empty: Sequence[str]) -> list[_Mount]:
    """Exposed, empty and shared folders, outer ones first, so that they do not hide inner ones.

    Their parent folders are listed too, since bubblewrap would create them accessible only to their owner.
    """
    mounts = [(("--ro-bind", str(path)), PurePosixPath(inside)) for inside, path in _read_only(view).items()]
    mounts += [(("--perms", "0755", "--size", "4096", "--tmpfs"), PurePosixPath(path)) for path in empty]
    mounts += [(("--bind", str(folder)), PurePosixPath(inside)) for inside, folder in view.shared.items()]
    found: list[_Mount] = []
    if view.image is None:
        found = [("--perms", "0755", "--dir", "/var"), ("--perms", "1777", "--dir", "/var/tmp")]
    made: set[PurePosixPath] = {PurePosixPath("/")}
    for options, inside in sorted(mounts, key=lambda mount: len(mount[1].parts)):
        for parent in sorted(set(inside.parents) - made, key=lambda path: len(path.parts)):
            found.append(("--perms", "0755", "--dir", str(parent)))
        made |= set(inside.parents)
        found.append((*options, str(inside)))
    return found


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
