"""Keyrings that the kernel keeps for a user. They outlive its processes, and the next holder of the id would get them.

An agent that may use keyrings can make one impossible to clear, even for itself. Its user id is then unusable for
others that may use keyrings.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_KEYCTL = 219 if platform.machine() == "aarch64" else 250
_CLEAR, _GET_PERSISTENT = 7, 22
_PROCESS, _USER, _USER_SESSION = -2, -4, -5
_NO_KEYRINGS = (errno.ENOSYS, errno.EOPNOTSUPP)


def clear_keyrings(uids: Iterable[int]) -> bool:
    """As root, clear the keyrings of users without processes. Returns False if they could not be cleared. Blocking."""
    program = [sys.executable, "-I", "-S", str(Path(__file__)), *map(str, uids)]
    return subprocess.run(program, check=False, capture_output=True, cwd="/").returncode == 0


def _main(uids: list[int]) -> int:
    """A child becomes each user in turn: the kernel uses the keyrings of the calling user."""
    statuses: list[int] = []
    for uid in uids:
        if (pid := os.fork()) == 0:
            code = 1
            with suppress(OSError):
                _clear_own(uid)
                code = 0
            os._exit(code)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return int(any(statuses))


def _clear_own(uid: int) -> None:
    """Raises: OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    for keyring in (_USER, _USER_SESSION):
        _keyctl(_CLEAR, keyring)
    if (persistent := _keyctl(_GET_PERSISTENT, uid, _PROCESS)) > 0:
        _keyctl(_CLEAR, persistent)


def _keyctl(operation: int, *arguments: int) -> int:
    """Returns 0 if the kernel has no such keyrings. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(*map(ctypes.c_long, (_KEYCTL, operation, *arguments)))
    if result < 0:
        code = ctypes.get_errno()
        if code not in _NO_KEYRINGS:
            raise OSError(code, f"keyctl: {os.strerror(code)}")
    return max(0, result)


if __name__ == "__main__":
    sys.exit(_main([int(uid) for uid in sys.argv[1:]]))
