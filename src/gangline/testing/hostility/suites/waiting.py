"""Processes of ours that wait beside a command to become the next one, and will get its descriptors."""

from __future__ import annotations

import contextlib

from gangline.testing.hostility.attack import Attacks
from gangline.testing.hostility.kit import Given, contents, syscall, waiting

ATTACKS = Attacks("processes outside the sandbox")


@ATTACKS.inside
def traces_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        with contextlib.suppress(OSError):
            syscall("ptrace", 0x4206, pid, 0, 0)
            return f"process {pid} is traced"
    return None


@ATTACKS.inside
def reads_the_memory_of_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
            memory.seek(int(next(line for line in maps if "[heap]" in line or "[stack]" in line).split("-")[0], 16))
            if memory.read(4096):
                return f"the memory of process {pid} was read"
    return None


@ATTACKS.inside
def takes_the_order_of_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        with contextlib.suppress(OSError):
            pidfd = syscall("pidfd_open", pid, 0)
            for number in range(64):
                with contextlib.suppress(OSError):
                    return f"descriptor {syscall('pidfd_getfd', pidfd, number, 0)} is descriptor {number} of {pid}"
    return None


@ATTACKS.inside
def reads_the_environment_of_a_fork_that_waits(given: Given) -> str | None:
    for pid in waiting(given):
        if contents(f"/proc/{pid}/environ"):
            return f"the environment of process {pid} was read"
    return None
