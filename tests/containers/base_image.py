"""A small image out of this machine's own Debian packages: no registry, no mirror, seconds."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

__all__ = ["write_root"]

_PACKAGES = (
    "base-files",
    "base-passwd",
    "bash",
    "coreutils",
    "dash",
    "findutils",
    "git",
    "grep",
    "gzip",
    "hostname",
    "libc-bin",
    "libstdc++6",
    "procps",
    "python3",
    "sed",
    "tar",
    "util-linux",
)
_MERGED = ("bin", "sbin", "lib", "lib64")
"""Links into /usr."""
_MADE = ("etc/passwd", "etc/group", "etc/ld.so.cache", "etc/alternatives")
"""By installation scripts: no package lists them."""
_LEFT_OUT = re.compile(r"usr/share/(doc|man|locale|info|lintian)\b|etc/alternatives\b|(root|tmp)$")
"""Papers, and what is made above and below."""


def write_root(file: Path, packages: tuple[str, ...] = _PACKAGES) -> None:
    """Write a root file system as a tar archive: those packages of this machine, and all that they need."""
    paths = sorted({_real(line) for line in _files(_closure(packages)) if line.startswith("/") and line != "/."})
    with tarfile.open(file, "w") as tar:
        for name in (*_MERGED, *_MADE):
            if Path("/", name).exists():
                tar.add(f"/{name}", name, recursive=not Path("/", name).is_symlink())
        for path in paths:
            if not _LEFT_OUT.match(path) and Path("/", path).exists():
                tar.add(f"/{path}", path, recursive=False)
        for name, mode in (("root", 0o700), ("tmp", 0o1777)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)


def _closure(packages: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    wanted = set(packages)
    while wanted:
        found |= wanted
        told = _output("dpkg-query", "--show", "--showformat=${Pre-Depends},${Depends},", *sorted(wanted))
        wanted = {re.split(r"[|(:]", piece)[0].strip() for piece in told.split(",")} - found - {""}
    return found


def _files(packages: set[str]) -> list[str]:
    return _output("dpkg-query", "--listfiles", *sorted(packages)).splitlines()


def _output(*argv: str) -> str:
    """What it says of those packages that are installed; virtual ones are not."""
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def _real(path: str) -> str:
    """Packages name `/bin/sh` what lies in `/usr/bin`."""
    parts = PurePosixPath(path).parts[1:]
    return str(PurePosixPath(*(("usr",) if parts[0] in _MERGED and Path("/", parts[0]).is_symlink() else ()), *parts))
