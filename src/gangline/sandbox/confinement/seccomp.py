"""The system call filter that an engine gave to a container's first process, for commands that join the container.

`setns` puts a process into namespaces, but not under a filter. So the filter is read from the first process, which
requires a tracer with CAP_SYS_ADMIN, and installed again by each command's supervisor. Its content is not interpreted.
"""

from __future__ import annotations

import ctypes
import errno
import os

_SEIZE, _INTERRUPT, _DETACH, _GET_FILTER = 0x4206, 0x4207, 17, 0x420C
_WALL = 0x40000000
_INSTRUCTION_BYTES = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


def filters_of(pid: int) -> list[bytes]:
    """Packet filter programs in the order of their installation. Blocks for a moment.

    Raises: OSError without the privilege.
    """
    _traced(_SEIZE, pid)
    try:
        _traced(_INTERRUPT, pid)
        os.waitpid(pid, _WALL)
        return list(reversed(_programs(pid)))
    finally:
        _traced(_DETACH, pid)


def _programs(pid: int) -> list[bytes]:
    found: list[bytes] = []
    while True:
        try:
            length = _traced(_GET_FILTER, pid, len(found))
        except OSError as error:
            if error.errno == errno.ENOENT or (error.errno == errno.EINVAL and not found):  # no more, or none at all
                return found
            raise
        program = ctypes.create_string_buffer(length * _INSTRUCTION_BYTES)
        _traced(_GET_FILTER, pid, len(found), program)
        found.append(program.raw)


def _traced(request: int, pid: int, address: int | None = None, data: ctypes.Array[ctypes.c_char] | None = None) -> int:
    result = _libc.ptrace(request, pid, address, data)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace: {os.strerror(code)}")
    return result
