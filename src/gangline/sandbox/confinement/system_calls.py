"""The filter of system calls for every command, in any sandbox.

Invariants:
- Kernel interfaces that reach outside a sandbox, or have often been used to escape from one, are rejected. Each has a
  name by which a task may request it (`SystemCall`).
- Only the machine's native ABI is allowed: calls by another ABI's numbers (i386, x32, 32-bit ARM) do not exist.
- `clone3`, whose flags are in memory that a filter cannot read, does not exist while user namespaces are refused; C
  libraries then use `clone`.

A filter is a program of the kernel's packet filter over `struct seccomp_data`: the call's number, ABI and arguments.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from gangline.domain.task import SystemCall

_NEW_USER = 0x10000000
_AF_VSOCK = 40
_NUMBER, _ABI, _FIRST_ARGUMENT = 0, 4, 16
_LOAD, _EQUALS, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
"""Set in system call numbers of the x32 ABI."""


class _Machine(msgspec.Struct, frozen=True):
    abi: int
    """`AUDIT_ARCH_*`."""
    numbers: Mapping[str, int]


_SAME = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "clone3": 435}
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        {
            "socket": 41,
            "clone": 56,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "unshare": 272,
            "perf_event_open": 298,
            "setns": 308,
            "bpf": 321,
            "userfaultfd": 323,
            **_SAME,
        },
    ),
    "aarch64": _Machine(
        0xC00000B7,
        {
            "unshare": 97,
            "socket": 198,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "clone": 220,
            "perf_event_open": 241,
            "setns": 268,
            "bpf": 280,
            "userfaultfd": 282,
            **_SAME,
        },
    ),
}

_WHOLE: Mapping[SystemCall, tuple[tuple[str, int], ...]] = {
    "keyring": (("keyctl", errno.EPERM), ("add_key", errno.EPERM), ("request_key", errno.EPERM)),
    "io_uring": tuple((name, errno.ENOSYS) for name in ("io_uring_setup", "io_uring_enter", "io_uring_register")),
    "userfaultfd": (("userfaultfd", errno.EPERM),),
    "perf_events": (("perf_event_open", errno.EPERM),),
    "bpf": (("bpf", errno.EPERM),),
    "user_namespaces": (("clone3", errno.ENOSYS), ("setns", errno.EPERM)),
}
"""Calls that are rejected whatever their arguments, and the error that they return."""

_IN_PART: Mapping[SystemCall, tuple[tuple[str, int, int, int], ...]] = {
    "vsock": (("socket", _EQUALS, _AF_VSOCK, errno.EAFNOSUPPORT),),
    "user_namespaces": (
        ("clone", _HAS_BIT, _NEW_USER, errno.EPERM),
        ("unshare", _HAS_BIT, _NEW_USER, errno.EPERM),
    ),
}
"""Calls that are rejected by the value, or the bits, of their first argument."""


def filter_for(allowed: Collection[SystemCall], machine: str | None = None) -> bytes | None:
    """The filter program that rejects all but `allowed`, in the kernel's format; None if this machine supports no
    filters.

    machine: as in `uname -m`; None is this machine.
    """
    known = _MACHINES.get(machine or os.uname().machine)
    if known is None or (machine is None and not _kernel_filters()):
        return None
    lines = [
        *(_instruction(_LOAD, _ABI), _instruction(_EQUALS, known.abi, yes=1), _refusal(errno.ENOSYS)),
        _instruction(_LOAD, _NUMBER),
        *(_instruction(_AT_LEAST, _X32, no=1), _refusal(errno.ENOSYS)),
    ]
    for kind, calls in _WHOLE.items():
        for name, error in () if kind in allowed else calls:
            lines += [_instruction(_EQUALS, known.numbers[name], no=1), _refusal(error)]
    for kind, partial in _IN_PART.items():
        for name, test, value, error in () if kind in allowed else partial:
            lines += [
                _instruction(_EQUALS, known.numbers[name], no=4),
                _instruction(_LOAD, _FIRST_ARGUMENT),
                *(_instruction(test, value, no=1), _refusal(error)),
                _instruction(_RETURN, _ALLOW),
            ]
    return b"".join([*lines, _instruction(_RETURN, _ALLOW)])


def _instruction(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """`yes`, `no`: instructions to skip when a test succeeds or fails. Lower halves of arguments come first: both
    machines are little-endian."""
    return struct.pack("=HBBI", code, yes, no, value)


def _refusal(error: int) -> bytes:
    return _instruction(_RETURN, _REFUSE | error)


def _kernel_filters() -> bool:
    return Path("/proc/sys/kernel/seccomp/actions_avail").exists()


def may_use_keys(allowed: Collection[SystemCall]) -> bool:
    """Whether programs may use the kernel's keyrings."""
    return "keyring" in allowed or filter_for(allowed) is None


def enforced(allowed: Collection[SystemCall]) -> str:
    """The value in `limits()` for the filter."""
    but = f", without {', '.join(sorted(allowed))}" if allowed else ""
    return f"seccomp filter{but}"
