"""Tests once more as an ordinary user: made for this, with its own users, removed after."""

from __future__ import annotations

import fcntl
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support.requirements import TOOLS, need

__all__ = ["ordinary_user", "run_tests_as_a_user"]

USER = "gangline-test"
_GONE_S = 60.0
REPOSITORY = Path(__file__).parents[3]
_REACHED = (REPOSITORY, Path(sys.base_prefix), Path(sys.prefix), TOOLS.resolve())


@contextmanager
def ordinary_user() -> Generator[Path]:
    """Home of the user. There is one: another test that needs it waits."""
    need(os.geteuid() == 0, "only root can become an ordinary user")
    need(shutil.which("useradd"), "apt-get install -y passwd")
    folder = Path("/tmp") / USER
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(KeyError):  # of a run that was killed
            _end(pwd.getpwnam(USER).pw_uid)
        subprocess.run(["useradd", "--create-home", "--home-dir", folder, USER], check=True)
        try:
            yield folder
        finally:
            _end(pwd.getpwnam(USER).pw_uid)


def _end(uid: int) -> None:
    """Of the user nothing is left."""
    assert uid > 0
    _end_all(_ids(uid))
    subprocess.run(["userdel", "--remove", USER], check=True, capture_output=True)


def _ids(uid: int) -> tuple[range, ...]:
    """The user's id, and those of its containers' processes: `userdel` refuses while a process has one of them."""
    subordinate = Path("/etc/subuid")
    lines = [line.split(":") for line in (subordinate.read_text() if subordinate.exists() else "").splitlines()]
    return range(uid, uid + 1), *(range(int(a), int(a) + int(n)) for name, a, n in lines if name in (USER, str(uid)))


def _end_all(ids: tuple[range, ...]) -> None:
    """Kill until there is none: one that is being killed is still there for a moment, and can still start another."""
    deadline = time.monotonic() + _GONE_S
    while found := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_one_of(ids, pid)]:
        assert time.monotonic() < deadline, f"processes of {USER} do not end: {found}"
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _has_one_of(ids: tuple[range, ...], pid: int) -> bool:
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return False
    uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
    return any(int(uid) in some for uid in uids for some in ids)


def _opened(paths: tuple[Path, ...]) -> list[str]:
    """Lines of a shell, in a mount namespace of its own, by which everyone reaches folders that lie in closed ones."""
    closed = sorted(
        {
            next(p for p in reversed(path.parents) if not p.stat().st_mode & 1)
            for path in paths
            if any(not p.stat().st_mode & 1 for p in path.parents)
        }
    )
    lines: list[str] = []
    for folder in closed:
        inside = [path for path in dict.fromkeys(paths) if folder in path.parents and path.exists()]
        inside = [path for path in inside if not any(other in path.parents for other in inside)]
        held = [(f"/run/{USER}/{number}", str(path)) for number, path in enumerate(inside)]
        lines += [f"mkdir -p {one} && mount --bind {shlex.quote(path)} {one}" for one, path in held]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(folder))}"]
        lines += [f"mkdir -p {shlex.quote(path)} && mount --move {one} {shlex.quote(path)}" for one, path in held]
    return lines


def run_tests_as_a_user(home: Path, tests: Sequence[Path | str], **variables: str) -> None:
    """Raises: AssertionError, with the output, when one fails. Reads the repository, writes to the user's home."""
    env = {
        "HOME": home,
        "PATH": os.environ["PATH"],
        "GANGLINE_REQUIRE_ALL": os.environ.get("GANGLINE_REQUIRE_ALL", ""),
        "GANGLINE_TOOLS": TOOLS.resolve(),
        "PYTHONDONTWRITEBYTECODE": "1",
        **variables,
    }
    command = ["setpriv", "--reuid", USER, "--regid", USER, "--init-groups", "env", "--ignore-environment"]
    command += [f"{name}={value}" for name, value in env.items()]
    command += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={home}/pytest", "-q", *tests]
    lines = [
        f"mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/{USER}",
        *_opened(_REACHED),
        f"cd {shlex.quote(str(REPOSITORY))}",
        f"exec {shlex.join(map(str, command))}",
    ]
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
