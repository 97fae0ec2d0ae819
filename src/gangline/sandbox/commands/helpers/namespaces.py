"""Enter the namespaces of a running sandbox. Linux only; the caller must be single-threaded.

bubblewrap, started by an ordinary user, makes two user namespaces: an outer one, in which the user is root and which
owns the sandbox's mounts and network, and an inner one without privileges, in which its first process lives. We enter
the outer one first; only the command itself continues to the inner one (`enter_user`), and there into one of its own
(`make_user_namespace`): the sandbox's first process has the agent's user number, and no filter, and could be taken over
from its own namespace. Started by root it makes neither.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_NS_GET_USERNS = 0xB701
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1


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


def make_user_namespace() -> None:
    """A user namespace of this process's own, with the same numbers; `exec` ends a user's privileges in it.

    Others of the same user may trace it from here on, for only then may it write its own numbers: it must have nothing
    of ours open any more.
    """
    uid, gid = os.geteuid(), os.getegid()
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl dumpable")
    _checked(_libc.unshare(_CLONE_NEWUSER), "unshare user")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def resize_memory(mount_point: str, num_bytes: int) -> None:
    """Limit a file system in memory that is mounted already."""
    flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV
    _checked(_libc.mount(None, mount_point.encode(), None, flags, f"size={num_bytes}".encode()), "remount")


def leave_session_keyring() -> None:
    """Go on with an empty session keyring of this process's own, instead of that of whoever started the node.

    A kernel without keyrings has nothing to leave; a node's own filter that refuses them holds for all its commands.
    """
    if (number := _KEYCTL.get(os.uname().machine)) is None:
        return
    if _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None) >= 0:
        return
    if ctypes.get_errno() == errno.EDQUOT:
        raise OSError(errno.EDQUOT, "this user has too many kernel keyrings: raise the sysctl kernel.keys.maxkeys")
    if ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        raise OSError(ctypes.get_errno(), f"keyctl: {os.strerror(ctypes.get_errno())}")


def become_subreaper() -> None:
    """Orphans among our descendants become our children, however they daemonise."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl subreaper")


def become_user(uid: int) -> None:
    """The user of that number, and the group; without other groups."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def hide_from_tracers() -> None:
    """Let processes of our own user neither trace this one, nor read its memory or take its descriptors.

    It holds for forks too, until they become another program.
    """
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl dumpable")


def forbid_new_privileges() -> None:
    """Neither set-user-id programs nor file capabilities give privileges from here on."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl no_new_privs")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls(program: bytes) -> None:
    """For ever, and for all descendants. `program`: instructions of the kernel's packet filter, 8 bytes each.

    A process without privileges gives up gaining any: the kernel asks for that.
    """
    given = _Program(len(program) // _INSTRUCTION_BYTES, program)
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) == 0:
        return
    if ctypes.get_errno() == errno.EACCES:
        forbid_new_privileges()
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0), "prctl seccomp")
