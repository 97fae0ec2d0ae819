"""What an agent leaves for the next one: in its sandbox after a reset, and for a later sandbox of the same user.

A later sandbox with the name of an earlier one gets its user where it is free. What the kernel keeps for that user
(keyrings) would be there again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Generator

from gangline.domain.ids import new_id
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import RuntimeSpec
from support.hostility.attack import Assault, Attacks, Program
from support.hostility.grounds import Grounds
from support.hostility.kit import Given, contents, found, key_found, planted_keys, syscall

ATTACKS = Attacks("a sandbox that is used again")

_ODD_BYTES = 424_249


def leaves_files_in_folders_for_everyone(given: Given) -> str | None:
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock", "/dev", "/"):
        with contextlib.suppress(OSError), open(f"{folder}/{given['left']}", "w") as file:
            file.write(given["left"])
    return None


def finds_files_in_folders_for_everyone(given: Given) -> str | None:
    folders = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock", "/dev", "/")
    return found(given["left"], [f"{folder}/{given['left']}" for folder in folders])


def leaves_files_in_its_folders(given: Given) -> str | None:
    for folder in (given["workdir"], given["home"]):
        os.makedirs(f"{folder}/.left/closed")
        with open(f"{folder}/.left/closed/{given['left']}", "w") as file:
            file.write(given["left"])
        os.chmod(f"{folder}/.left/closed", 0)
    return None


def finds_files_in_its_folders(given: Given) -> str | None:
    for folder in (given["workdir"], given["home"]):
        with contextlib.suppress(OSError):
            os.chmod(f"{folder}/.left/closed", 0o700)
    return found(
        given["left"], [f"{folder}/.left/closed/{given['left']}" for folder in (given["workdir"], given["home"])]
    )


def leaves_shared_memory_and_queues(given: Given) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    secret, number = given["left"].encode(), given["number"]
    memory = libc.shmget(number, 4096, 0o1666)
    if memory >= 0 and (at := libc.shmat(memory, None, 0)) not in (None, ctypes.c_void_p(-1).value):
        ctypes.memmove(at, secret, len(secret))
    queue = libc.msgget(number, 0o1666)
    if queue >= 0:
        libc.msgsnd(queue, (1).to_bytes(8, sys.byteorder) + secret, len(secret), 0o4000)
    libc.semget(number, 1, 0o1666)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("librt.so.1").mq_open(f"/{given['left']}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    return None


def finds_shared_memory_and_queues(given: Given) -> str | None:
    for name, flags in (("shmget", (4096, 0)), ("msgget", (0,)), ("semget", (1, 0))):
        with contextlib.suppress(OSError):
            return f"{name} gives {syscall(name, given['number'], *flags)}"
    with contextlib.suppress(OSError):
        queue = syscall("mq_open", given["left"].encode(), os.O_RDONLY | os.O_NONBLOCK, 0, 0)
        return f"the message queue is descriptor {queue}"
    return None


def leaves_keys(given: Given) -> str | None:
    planted_keys(given["left"], given["left"], for_everyone=True)
    return None


def finds_keys(given: Given) -> str | None:
    for keyring in ("session", "user", "user_session"):
        with contextlib.suppress(OSError):
            victim = {"keys": {keyring: 0}, "name": given["left"], "secret": given["left"]}
            if evidence := key_found({"victim": victim}, keyring):
                return f"{keyring}: {evidence}"
    return "the kernel lists it" if given["left"].encode() in contents("/proc/keys") else None


def leaves_limits(given: Given) -> str | None:
    for pid in (given["supervisor"], given["spawner"]):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.prlimit(pid, resource.RLIMIT_MSGQUEUE)[1]
            resource.prlimit(pid, resource.RLIMIT_MSGQUEUE, (given["odd"], hard))
    return None


def finds_limits(given: Given) -> str | None:
    is_odd = resource.getrlimit(resource.RLIMIT_MSGQUEUE)[0] == given["odd"]
    return "the limit is still there" if is_odd else None


_PLANTS: dict[str, tuple[Program, Program]] = {
    "files_in_folders_for_everyone": (leaves_files_in_folders_for_everyone, finds_files_in_folders_for_everyone),
    "files_in_its_folders": (leaves_files_in_its_folders, finds_files_in_its_folders),
    "shared_memory_and_queues": (leaves_shared_memory_and_queues, finds_shared_memory_and_queues),
    "keys": (leaves_keys, finds_keys),
    "limits": (leaves_limits, finds_limits),
}


async def _tried(grounds: Grounds, program: Program, handle: Sandbox, left: str) -> str | None:
    number = int(left[-6:], 16)
    return await grounds.run_inside(program, handle, left=left, number=number, odd=_ODD_BYTES)


@contextlib.contextmanager
def _own_limit() -> Generator[None]:
    """The runtime without walls lets an agent change this process."""
    before = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, before)


def _is_there_after_a_reset(plant: Program, look: Program) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        left = new_id("left")
        async with grounds.sandbox(system_calls=("keyring",)) as handle:
            grounds.promised(handle, "checkpoints")
            with _own_limit():
                await _tried(grounds, plant, handle, left)
                await handle.reset()
                return await _tried(grounds, look, handle, left)

    return run


def _is_there_for_the_next(plant: Program, look: Program) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        left, runtime_id = new_id("left"), new_id("again")
        bench = grounds.bench
        spec = RuntimeSpec(backend=bench.runtime.name, image=bench.image, system_calls_allow=("keyring",))
        with _own_limit():
            for program in (plant, look):
                handle = await bench.start_of(runtime_id, spec)
                try:
                    evidence = await _tried(grounds, program, handle, left)
                finally:
                    await handle.stop()
        return evidence

    return run


for _kind, (_plant, _look) in _PLANTS.items():
    _is_own = _kind == "files_in_its_folders"
    ATTACKS.add(f"{_kind}_are_there_after_a_reset", _is_there_after_a_reset(_plant, _look), needs_isolation=not _is_own)
    ATTACKS.add(f"{_kind}_are_there_for_the_next", _is_there_for_the_next(_plant, _look), needs_isolation=not _is_own)
