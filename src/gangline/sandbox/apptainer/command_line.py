"""Apptainer's command line for one sandbox, and `apptainer exec` as a launcher of namespaces.

Written for, and run with, Apptainer 1.4.5; see docs/adr/0016.
"""

from __future__ import annotations

import asyncio
import csv
import io
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.sandbox.bubblewrap.command_line import HOST_ROOTS
from gangline.sandbox.commands.forkserver import launcher_argv
from gangline.sandbox.commands.holder import PATH, WAITING
from gangline.sandbox.confinement.masks import masked

_OF_APPTAINER = ("APPTAINER_", "SINGULARITY_", "GANGLINE_")
_OF_ITS_SHELL = {"PS1", "PROMPT_COMMAND", "PWD", "OLDPWD", "HOME", "TERM", "SHLVL", "_", "USER_PATH"}
_ITS_DEFAULTS = {("LANG", "C"), ("LD_LIBRARY_PATH", "/.singularity.d/libs")}
"""Their values where the image sets none."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The files that a container sees."""

    image: str
    """Apptainer image file, or a folder with a root file system."""
    overlay: Path
    """Folder for files written to the image's own paths."""
    shared: Mapping[str, Path]
    """Path inside -> host folder, writable."""
    expose: Sequence[Path]
    """Host paths seen read-only at the same path."""
    mounts: Mapping[str, Path] = {}
    """Path inside -> host folder, read-only."""
    files: Mapping[str, Path]
    """Path inside -> host file, read-only."""
    empty: Path
    """An empty host folder."""
    hidden: Sequence[Path]
    """Host folders that appear empty, wherever they would appear."""
    host_network: bool
    user_namespace: bool
    fakeroot: bool


def exec_arguments(program: Sequence[str], view: View) -> list[str]:
    """The whole command line, up to the command."""
    identity = ["--fakeroot"] if view.fakeroot else ["--no-privs", *(["--userns"] if view.user_namespace else [])]
    network = [] if view.host_network else ["--net", "--network", "none"]
    folders = {**{str(path): path for path in view.expose}, **view.mounts}
    mounts = [(str(path), inside, True) for inside, path in folders.items()]
    seen = folders | ({"/": Path(view.image)} if os.path.isdir(view.image) else {})
    mounts += [(str(view.empty), inside, True) for inside in masked(view.hidden, seen)]
    mounts += [(str(folder), inside, False) for inside, folder in view.shared.items()]
    mounts += [(str(file), inside, True) for inside, file in view.files.items()]
    return [
        *program,
        *("--silent", "--nocolor", "exec", "--containall", "--no-eval", "--no-mount", "home,tmp,sys,bind-paths"),
        *("--hostname", "gangline", "--pwd", "/", "--overlay", str(view.overlay)),
        *identity,
        *network,
        *(word for mount in _outer_first(mounts) for word in ("--mount", _mount(*mount))),
        view.image,
    ]


def _outer_first(mounts: Iterable[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    """Sort mounts so that an inner one is not hidden by an outer one."""
    return sorted(mounts, key=lambda mount: mount[1].count("/"))


def _mount(source: str, inside: str, read_only: bool) -> str:
    """One line of comma-separated values; paths are quoted where needed."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"destination={inside}", *(["ro"] if read_only else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def checked_image(image: str | None) -> str | None:
    """Raises: InvalidRequest. Never pulls: that takes minutes without any output."""
    if image is None:
        return None
    if "://" in image:
        raise InvalidRequest(f"runtime `apptainer` pulls no images. Run: apptainer pull IMAGE.sif {image}")
    if not os.path.isabs(image) or not os.path.exists(image):
        raise InvalidRequest(
            f"runtime.image must be the absolute path of an image file (.sif) or of a folder with a root file system, "
            f"on the node's machine; {image!r} is none. `gangline image build` makes one."
        )
    return image


def make_host_root(folder: Path) -> list[Path]:
    """Make `folder` a root file system for the host's programs. Returns the host folders to bind into it."""
    seen: list[Path] = []
    for name in ("proc", "dev", "sys", "run", "tmp", "var/tmp", *HOST_ROOTS):
        top, inside = Path("/", name), folder / name
        if top.is_symlink():
            inside.symlink_to(os.readlink(top))
        elif name not in HOST_ROOTS or top.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
            seen += [top] if name in HOST_ROOTS else []
    return seen


class ApptainerLaunch:
    """See `holder.Launch`. It clears its environment, including our label, so the reaper finds it by its mounts."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        """`folder`: where Apptainer keeps its files."""
        self._arguments = arguments
        self._folder = folder

    def spawn(self, label: str) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                launcher_argv([*self._arguments, *WAITING]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    "PATH": PATH,
                    "HOME": str(self._folder),
                    "APPTAINER_CONFIGDIR": str(self._folder),
                    "APPTAINER_CACHEDIR": str(self._folder),
                    "APPTAINER_TMPDIR": str(self._folder),
                    "GANGLINE_RUNTIME": label,
                },
                cwd="/",
            )
        except OSError as error:
            raise RuntimeFailed(f"apptainer could not be started: {error}.") from error

    async def first_pid(self, process: subprocess.Popen[bytes]) -> int:
        return await asyncio.to_thread(_first_pid, process.pid)

    def close(self) -> None:
        """There is nothing to release."""


def _first_pid(launcher: int) -> int:
    """Raises: RuntimeFailed."""
    for pid in _descendants(launcher):
        if _numbers(pid)[-1:] == ["1"]:
            return pid
    raise RuntimeFailed("the container was gone before it could be entered.")


def _numbers(pid: int) -> list[str]:
    """Process ids in each of its namespaces, outermost first; empty if the process is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return []


def _is_its_own(name: str, value: str) -> bool:
    return name in _OF_ITS_SHELL or name.startswith(_OF_APPTAINER) or (name, value) in _ITS_DEFAULTS


def _descendants(pid: int) -> list[int]:
    """Nearest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                parent = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    found = list(children.get(pid, []))
    for one in found:
        found += children.get(one, [])
    return found


def container_environment(first_pid: int) -> dict[str, str]:
    """The image's variables: the environment of the waiting shell, without Apptainer's own."""
    for pid in _descendants(first_pid):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
            pairs = dict(line.split("=", 1) for line in lines if "=" in line)
            return {name: value for name, value in pairs.items() if not _is_its_own(name, value)}
    return {}
