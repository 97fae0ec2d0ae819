"""The filter of system calls, run as the kernel runs it, for both machines."""

from __future__ import annotations

import errno
import struct

import pytest

from gangline.domain.task import SystemCall
from gangline.sandbox.confinement.system_calls import enforced, filter_for

ABIS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028
NEW_USER = 0x10000000
# From the kernel's asm/unistd.h of each machine.
NUMBERS = {
    "x86_64": {
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "userfaultfd": 323,
        "perf_event_open": 298,
        "bpf": 321,
    }
    | {"socket": 41, "clone": 56, "unshare": 272, "setns": 308, "read": 0, "execve": 59},
    "aarch64": {
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "userfaultfd": 282,
        "perf_event_open": 241,
        "bpf": 280,
    }
    | {"socket": 198, "clone": 220, "unshare": 97, "setns": 268, "read": 63, "execve": 221},
}
SAME = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "clone3": 435}


def answer(program: bytes, number: int, abi: int, argument: int = 0) -> int:
    """Error of a call; 0 where it is let through."""
    data = struct.pack("=IIQ6Q", number, abi, 0, argument, 0, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, yes, no, value = lines[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value & 0xFFFF if value >> 16 == 0x0005 else 0
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += yes if holds else no


def program_of(machine: str, *allowed: SystemCall) -> bytes:
    program = filter_for(allowed, machine)
    assert program is not None
    return program


@pytest.mark.parametrize("machine", ABIS)
def test_what_reaches_over_the_walls_is_refused_and_the_rest_is_not(machine: str) -> None:
    program, abi, numbers = program_of(machine), ABIS[machine], NUMBERS[machine] | SAME
    for name in ("add_key", "request_key", "keyctl", "userfaultfd", "perf_event_open", "bpf", "setns"):
        assert answer(program, numbers[name], abi) == errno.EPERM, name
    for name in ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3"):
        assert answer(program, numbers[name], abi) == errno.ENOSYS, name
    assert answer(program, numbers["socket"], abi, 40) == errno.EAFNOSUPPORT
    for name in ("clone", "unshare"):
        assert answer(program, numbers[name], abi, NEW_USER | 17) == errno.EPERM
        assert answer(program, numbers[name], abi, 17) == 0
    for name, argument in (("socket", 2), ("socket", 1), ("read", 40), ("execve", NEW_USER)):
        assert answer(program, numbers[name], abi, argument) == 0


@pytest.mark.parametrize(("machine", "other"), [("x86_64", I386), ("aarch64", ARM), ("x86_64", ABIS["aarch64"])])
def test_another_abi_has_no_calls_at_all(machine: str, other: int) -> None:
    for number in (0, 1, 250, 288, 311):
        assert answer(program_of(machine), number, other) == errno.ENOSYS


def test_the_third_abi_of_x86_has_no_calls_at_all() -> None:
    program = program_of("x86_64")
    for number in NUMBERS["x86_64"].values():
        assert answer(program, 0x40000000 | number, ABIS["x86_64"]) == errno.ENOSYS


@pytest.mark.parametrize("machine", ABIS)
def test_a_task_gets_what_it_asks_for_and_no_more(machine: str) -> None:
    abi, numbers = ABIS[machine], NUMBERS[machine] | SAME
    program = program_of(machine, "user_namespaces")
    assert [answer(program, numbers[name], abi, NEW_USER) for name in ("clone", "clone3", "unshare", "setns")] == [
        0
    ] * 4
    assert answer(program, numbers["keyctl"], abi) == errno.EPERM
    assert answer(program, numbers["socket"], abi, 40) == errno.EAFNOSUPPORT
    assert answer(program_of(machine, "vsock"), numbers["socket"], abi, 40) == 0


def test_a_machine_that_is_not_known_has_no_filter() -> None:
    assert filter_for((), "riscv64") is None


def test_limits_name_what_is_open() -> None:
    assert enforced(()) == "seccomp filter"
    assert enforced(("vsock", "bpf")) == "seccomp filter, without bpf, vsock"
