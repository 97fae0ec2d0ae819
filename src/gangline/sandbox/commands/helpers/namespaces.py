"""Enter the namespaces of a running sandbox. Linux only; the caller must be single-threaded.

bubblewrap, started by an ordinary user, makes two user namespaces: an outer one, in which the user is root and which
owns the sandbox's mounts and network, and an inner one without privileges, in which its first process lives. We enter
the outer one first. Only the command itself enters the inner one (`enter_user`), and then makes another
(`make_user_namespace`): the sandbox's first process has the agent's user id and no filter, so a process in its own
namespace could take it over. Started by root, bubblewrap makes neither.
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
_MNT_DETACH = 2
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

    `proc_fd` is an open `/proc/<pid>` folder, which cannot come to refer to another process. `kinds` are names in
    `/proc/<pid>/ns`; a pid namespace applies only to children.
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
    """Enter the innermost user namespace, where the agent runs."""
    _setns(user_fd, "user")


def make_user_namespace() -> None:
    """Make a user namespace for this process, with the same ids; `exec` then drops a user's privileges in it.

    Other processes of the same user may trace this one from here on, since only then may it write its id maps. So it
    must not have any of our descriptors open.
    """
    uid, gid = os.geteuid(), os.getegid()
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl dumpable")
    _checked(_libc.unshare(_CLONE_NEWUSER), "unshare user")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def change_root(mount_point: str) -> None:
    """Make a mount point the root of this process's mount namespace, and unmount the old root."""
    os.chdir(mount_point)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount")  # the old root, which now covers the new one
    os.chdir("/")


def resize_memory(mount_point: str, num_bytes: int) -> None:
    """Change the size limit of a mounted in-memory file system."""
    flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV
    _checked(_libc.mount(None, mount_point.encode(), None, flags, f"size={num_bytes}".encode()), "remount")


def leave_session_keyring() -> None:
    """Join an empty session keyring in place of the inherited one.

    Does nothing on a kernel without keyrings. A filter of the node that forbids them also applies to all its commands.
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
    """Adopt orphaned descendants, including daemonised ones."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl subreaper")


def become_user(uid: int) -> None:
    """Set user and group to this id, and drop all other groups."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def hide_from_tracers() -> None:
    """Keep processes of the same user from tracing this one, reading its memory or taking its descriptors.

    Also applies to forks, until they execute another program.
    """
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl dumpable")


def forbid_new_privileges() -> None:
    """Keep set-user-id programs and file capabilities from giving privileges."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl no_new_privs")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls(program: bytes) -> None:
    """Install a filter, permanently and for all descendants. `program`: packet filter instructions, 8 bytes each.

    A process without privileges also gives up gaining any, as the kernel requires.
    """
    given = _Program(len(program) // _INSTRUCTION_BYTES, program)
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) == 0:
        return
    if ctypes.get_errno() == errno.EACCES:
        forbid_new_privileges()
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0), "prctl seccomp")
