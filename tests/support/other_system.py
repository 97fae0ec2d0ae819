"""Run commands of Gangline as on macOS or Windows, as far as imports go: `python other_system.py win32 < COMMANDS`.

Modules of Gangline see neither what the other system's Python lacks (by typeshed's conditions on `sys.platform`) nor
/proc; on Windows no `dir_fd`, no descriptors of folders, fewer names of files, and pipes in a code page. The standard
library and other packages stay those of Linux, so this proves nothing about a real macOS or Windows.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_ONLY_LINUX = {
    "os": (
        "O_DIRECT O_NOATIME O_PATH O_TMPFILE copy_file_range eventfd fdatasync getrandom getxattr listxattr "
        "memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity "
        "sched_setaffinity setresgid setresuid setxattr splice waitid P_PIDFD"
    ),
    "signal": "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo",
    "socket": (
        "AF_NETLINK AF_VSOCK MSG_CMSG_CLOEXEC MSG_MORE SOCK_CLOEXEC SOCK_NONBLOCK SO_PASSCRED SO_PEERCRED "
        "TCP_USER_TIMEOUT"
    ),
    "select": "epoll EPOLLIN EPOLLHUP POLLRDHUP",
    "resource": "RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING RUSAGE_THREAD prlimit",
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_GETPIPE_SZ",
    "mmap": "MAP_POPULATE MADV_HUGEPAGE MADV_DONTFORK",
    "time": "CLOCK_BOOTTIME",
}
_ONLY_POSIX = {
    "os": (
        "O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC O_DSYNC WNOHANG WIFEXITED WEXITSTATUS "
        "chown chroot confstr environb fchdir fchmod fchown fork forkpty fstatvfs fwalk get_blocking getegid "
        "geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getsid getuid initgroups killpg "
        "lchown lockf login_tty major makedev minor mkfifo mknod nice openpty posix_spawn pread preadv pwrite "
        "pwritev readv register_at_fork sched_yield sendfile set_blocking setegid seteuid setgid setgroups "
        "setpgid setpriority setsid setuid statvfs sync sysconf tcgetpgrp ttyname uname wait wait3 wait4 "
        "waitid writev"
    ),
    "signal": (
        "SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTSTP "
        "SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK "
        "alarm pause pthread_kill pthread_sigmask setitimer sigpending sigwait"
    ),
    "socket": "AF_UNIX CMSG_LEN SCM_RIGHTS SO_REUSEPORT MSG_DONTWAIT MSG_NOSIGNAL send_fds recv_fds",
    "select": "poll PIPE_BUF POLLIN POLLHUP",
    "mmap": "MADV_DONTNEED MADV_WILLNEED MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "time": "CLOCK_MONOTONIC CLOCK_PROCESS_CPUTIME_ID clock_gettime clock_gettime_ns tzset",
}
_NO_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
_NOT_IN_NAMES = frozenset('<>:"|?*')
"""Windows takes none of them in the name of a file."""


class Elsewhere(ModuleType):
    """A module without some of its names, and with others changed."""

    def __init__(self, real: ModuleType, missing: Sequence[str], **changed: Any) -> None:
        super().__init__(real.__name__)
        self._real, self._missing = real, frozenset(missing)
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this system")
        return getattr(self._real, name)


def pretend(platform: str) -> None:
    """Let modules of Gangline that are imported from now on see another system."""
    is_windows = platform == "win32"
    missing = {name: names.split() for name, names in _ONLY_LINUX.items()}
    if is_windows:
        for name, names in _ONLY_POSIX.items():
            missing[name] += names.split()
    changed: dict[str, dict[str, Any]] = {"sys": {"platform": platform}}
    if is_windows:
        changed["os"] = {"name": "nt", "open": _open, "stat": _stat, "scandir": _scandir, "supports_dir_fd": set()}
        asyncio.SelectorEventLoop.add_signal_handler = _no_signal_handler  # pyright: ignore[reportAttributeAccessIssue]
    seen = {
        name: Elsewhere(importlib.import_module(name), missing.get(name, ()), **changed.get(name, {}))
        for name in {*missing, *changed}
    }
    absent = _NO_MODULES if is_windows else set[str]()
    real_import = builtins.__import__

    def import_elsewhere(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and str((globals or {}).get("__name__", "")).startswith("gangline"):
            if name in absent:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in seen:
                return seen[name]
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = import_elsewhere
    sys.addaudithook(lambda event, arguments: _audit(event, arguments, is_windows))


def _audit(event: str, arguments: Any, is_windows: bool) -> None:
    """Raises: FileNotFoundError for /proc; OSError for a name that Windows does not take."""
    if event not in ("open", "os.mkdir", "os.rename") or not isinstance(arguments[0], str):
        return
    paths = [path for path in arguments[: 2 if event == "os.rename" else 1] if isinstance(path, str)]
    for path in paths:
        if path.startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", path)
        if is_windows and _NOT_IN_NAMES & set(path):
            raise OSError(22, "Invalid argument", path)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os.open(path, flags, mode)


def _stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    return os.stat(path, follow_symlinks=follow_symlinks)


def _scandir(path: Any = ".") -> Any:
    if isinstance(path, int):
        raise TypeError("scandir: path should be string, bytes, os.PathLike or None, not int")
    return os.scandir(path)


def _no_signal_handler(*_: object) -> None:
    raise NotImplementedError


def _one(arguments: list[str], encoding: str) -> tuple[Any, str, str]:
    """(exit code, stdout, stderr) of a command, or of `python CODE`, over pipes."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    sys.stdout, sys.stderr = out, errors
    code: Any = 0
    try:
        if arguments[:1] == ["python"]:
            exec(arguments[1], {"__name__": "gangline_user"})
        else:
            importlib.import_module("gangline.cli.main").load(arguments)()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for stream in (out, errors):
        stream.flush()
    return (code, *(stream.buffer.getvalue().decode("utf-8") for stream in (out, errors)))  # pyright: ignore


def main() -> None:
    """Read a JSON list of commands from standard input, and write what they did to standard output as JSON."""
    platform = sys.argv[1]
    warnings.simplefilter("ignore", EncodingWarning)
    if platform != "linux":
        warnings.filterwarnings("error", category=EncodingWarning, module=r"gangline(\.|$)")
        pretend(platform)
    encoding = "cp1252" if platform == "win32" else "utf-8"
    done = [_one(arguments, encoding) for arguments in json.load(sys.stdin)]
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
