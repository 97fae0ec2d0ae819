"""Enter the namespaces of a running sandbox. Linux only; the caller must be single-threaded.

bubblewrap, started by an ordinary user, makes two user namespaces: an outer one, in which the user is root and which
owns the sandbox's mounts and network, and an inner one without privileges, in which the agent lives. We enter the outer
one first; only the command itself goes on to the inner one (`enter_user`). Started by root it makes neither.
"""

from __future__ import annotations

import ctypes
import fcntl
import os

TYPE_CHECKING = False  # see `supervisor`
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["become_subreaper", "enter", "enter_user", "filter_system_calls", "forbid_new_privileges"]

_libc = ctypes.CDLL(None, use_errno=True)
_NS_GET_USERNS = 0xB701
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _is_ours(fd: int, kind: str) -> bool:
    ours, theirs = os.stat(f"/proc/self/ns/{kind}"), os.fstat(fd)
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


def _setns(fd: int, kind: str) -> None:
    if not _is_ours(fd, kind):
        _checked(_libc.setns(fd, 0), f"setns {kind}")


def enter(proc_fd: int, kinds: Sequence[str]) -> None:
    """Enter namespaces, each after the user namespace that owns it, the process's own user namespace last.

    `proc_fd` is an open `/proc/<pid>` folder: it cannot come to mean another process. `kinds` are names of
    `/proc/<pid>/ns`; a pid namespace holds for children only.
    """
    fds = {kind: os.open(f"ns/{kind}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd) for kind in kinds}
    theirs = {kind: fd for kind, fd in fds.items() if not _is_ours(fd, kind)}
    owners = {kind: fcntl.ioctl(fd, _NS_GET_USERNS) for kind, fd in theirs.items()}
    inner = os.stat("ns/user", dir_fd=proc_fd).st_ino
    for kind in sorted(theirs, key=lambda kind: os.fstat(owners[kind]).st_ino == inner):
        _setns(owners[kind], "user")
        _setns(theirs[kind], kind)
    for fd in (*owners.values(), *fds.values()):
        os.close(fd)


def enter_user(user_fd: int) -> None:
    """Enter the innermost user namespace, where the agent lives."""
    _setns(user_fd, "user")


def become_subreaper() -> None:
    """Orphans among our descendants become our children, however they daemonise."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl subreaper")


def forbid_new_privileges() -> None:
    """Neither set-user-id programs nor file capabilities give privileges from here on."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl no_new_privs")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls(program: bytes) -> None:
    """For ever, and for all descendants. `program`: instructions of the kernel's packet filter, 8 bytes each."""
    given = _Program(len(program) // _INSTRUCTION_BYTES, program)
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0), "prctl seccomp")
