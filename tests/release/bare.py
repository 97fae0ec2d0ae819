"""A machine without anything: the essential packages of this Debian or Ubuntu, and those that are named, in a root of
their own. uv is there too, with this machine's cache; nothing of the checkout or of its environments is.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from release.installed import run_uv

__all__ = ["BareMachine"]

_GIVE_UP_S = 500.0
_LEFT_OUT = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/info")
_SETTINGS = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", os.environ.get("SSL_CERT_FILE", ""))
"""The machine's way to the package index."""
_EVERYWHERE = ("libstdc++6",)
"""What apt needs, and so every Debian and Ubuntu has."""
_QUERY = "${Package}\t${Essential}\t${Provides}\t${Pre-Depends}, ${Depends}\n"


@dataclass(frozen=True)
class BareMachine:
    """root: its file system, from `of`. home: the folder of its only user, with what commands left there."""

    root: Path
    home: Path

    @classmethod
    def of(cls, folder: Path, *packages: str) -> BareMachine:
        """Below a new folder, with these packages and all that they depend on."""
        machine = cls(folder / "root", folder / "home")
        machine.home.mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):  # links lead there
            (machine.root / "usr" / name).mkdir(parents=True)
        files = subprocess.run(
            ["dpkg-query", "--listfiles", *_with_dependencies(packages)], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        wanted = sorted(
            {file for file in files if file[1:] and not file.startswith(_LEFT_OUT) and os.path.lexists(file)}
        )
        names = "\0".join(file[1:] for file in wanted).encode()
        packed = ["tar", "--create", "--directory", "/", "--null", "--no-recursion", "--files-from", "-"]
        with subprocess.Popen([*packed], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tar:
            assert tar.stdin is not None
            unpacking = ["tar", "--extract", "--no-same-owner", "--directory", machine.root]
            with subprocess.Popen(unpacking, stdin=tar.stdout) as unpack:
                tar.stdin.write(names)
                tar.stdin.close()
            assert (tar.wait(), unpack.wait()) == (0, 0)
        machine._finish()
        return machine

    def _finish(self) -> None:
        """What the packages' scripts would do, as far as Python and uv need it."""
        for name in ("dev", "proc", "sys", "tmp", "root", "etc", "wheels", "usr/local/bin"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        uid, gid = os.getuid(), os.getgid()
        (self.root / "etc" / "passwd").write_text(f"newcomer:x:{uid}:{gid}::/root:/bin/sh\n")
        (self.root / "etc" / "group").write_text(f"newcomer:x:{gid}:\n")

    def run(self, script: str, wheel: Path) -> str:
        """What a shell script prints that succeeds; the wheel is in /wheels. It runs in the user's home."""
        done = subprocess.run(
            [*self._entered(wheel), "/bin/sh", "-euc", script],
            env=_environ(),
            capture_output=True,
            text=True,
            timeout=_GIVE_UP_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def _entered(self, wheel: Path) -> list[str]:
        uv, cache = Path(find_uv_bin()), _cache()
        settings = [path for path in _SETTINGS if path and Path(path).exists()]
        find_links = [path for path in (os.environ.get("PIP_FIND_LINKS", ""),) if Path(path).is_dir() and path]
        seen = {path: path for path in (*settings, *find_links)} | {
            str(wheel.parent): "/wheels",
            str(uv): "/usr/local/bin/uv",
            str(uv.with_name("uvx")): "/usr/local/bin/uvx",
        }
        return [
            *("bwrap", "--bind", str(self.root), "/", "--proc", "/proc", "--dev", "/dev", "--dev-bind", "/sys", "/sys"),
            *("--tmpfs", "/tmp", "--bind", str(self.home), "/root", "--bind", cache, cache),
            *(word for here, there in seen.items() for word in ("--ro-bind", here, there)),
            *("--unshare-pid", "--die-with-parent", "--cap-add", "ALL", "--chdir", "/root", "--"),
        ]


def _cache() -> str:
    """uv's cache of this machine. It has the same path there, for what is installed names it."""
    return run_uv("cache", "dir").strip()


def _environ() -> dict[str, str]:
    """What leads to the package index. PyTorch is the one for CPUs, from the index or where pip finds wheels here."""
    kept = {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
    kept |= {name: value for name, value in os.environ.items() if re.fullmatch("(?i)(http|https|no)_proxy", name)}
    links = os.environ.get("PIP_FIND_LINKS")
    torch = {"UV_TORCH_BACKEND": "cpu"} if links is None else {"UV_FIND_LINKS": links}
    path = "/root/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    uv = {"UV_CACHE_DIR": _cache(), "UV_PYTHON_DOWNLOADS": "never"}
    return {**kept, **torch, **uv, "HOME": "/root", "PATH": path, "LANG": "C.UTF-8"}


def _with_dependencies(packages: tuple[str, ...]) -> list[str]:
    """Names of installed packages: essential ones, the given ones, and all that these depend on."""
    shown = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={_QUERY}"], capture_output=True, text=True, check=True
    ).stdout
    needs: dict[str, list[str]] = {}
    provided: dict[str, str] = {}
    waiting = [*packages, *_EVERYWHERE]
    for line in shown.splitlines():
        name, essential, provides, depends = line.split("\t")
        needs[name] = re.findall(r"[a-z0-9][a-z0-9+.-]+(?=\s*(?:[(:,|]|$))", depends)
        provided |= dict.fromkeys(re.findall(r"[a-z0-9][a-z0-9+.-]+(?=\s*(?:[(,]|$))", provides), name)
        waiting += [name] if essential == "yes" else []
    chosen: set[str] = set()
    while waiting:
        name = waiting.pop()
        name = name if name in needs else provided.get(name, name)
        if name in needs and name not in chosen:
            chosen.add(name)
            waiting += needs[name]
    return sorted(chosen)
