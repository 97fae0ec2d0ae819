"""Limits on a sandbox's use of the machine: an agent that takes more takes it from everyone.

Each attack has its own sandbox, with limits that it must not pass; a limit that the runtime reports as not
enforced is not attacked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import threading
import time
import unittest
from collections.abc import Mapping
from typing import Any

from gangline.domain.task import LimitsSpec
from support.hostility.attack import Assault, Attacks, Program
from support.hostility.grounds import Grounds
from support.hostility.kit import Given, contents, is_open, removed_file

ATTACKS = Attacks("what one sandbox may use")

_MANY = 200
_MAX_PIDS = 64
_MEMORY_BYTES = 256 << 20
_FLOOD_BYTES = 96 << 20
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_GROWTH_BYTES = 64 << 20


def _limited(program: Program, limit: str, **limits: Any) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        async with grounds.sandbox(limits=LimitsSpec(**limits)) as handle:
            how = grounds.promised(handle, limit)
            if "per process" in how and program in _TAKEN_TOGETHER:
                raise unittest.SkipTest(f"does not apply: the runtime says that {limit} is limited by {how}")
            return await grounds.run_inside(program, handle, timeout_s=40, **limits)

    return run


def starts_processes_without_end(given: Given) -> str | None:
    children: list[int] = []
    try:
        while len(children) < 200:
            if (pid := os.fork()) == 0:
                time.sleep(1000)
            children.append(pid)
    except OSError:
        pass
    for pid in children:
        os.kill(pid, 9)
    return f"{len(children)} processes at once" if len(children) > given["max_pids"] else None


def starts_threads_without_end(given: Given) -> str | None:

    ended = threading.Event()
    begun = 0
    try:
        while begun < 200:
            threading.Thread(target=ended.wait, daemon=True).start()
            begun += 1
    except (RuntimeError, MemoryError):
        pass
    ended.set()
    return f"{begun} threads at once" if begun > given["max_pids"] else None


def takes_memory_without_end(given: Given) -> str | None:
    taken = bytearray(given["memory_bytes"] * 2)
    taken[::4096] = b"1" * len(taken[::4096])
    return f"{len(taken)} bytes were taken"


def takes_memory_as_a_file_without_a_name(given: Given) -> str | None:
    """At the limit the kernel kills, refuses, or drops the pages of programs over and over while the write waits. Then
    nothing else runs well in the sandbox: the writer's own alarm ends it, and its file with it."""
    told, tell = os.pipe()
    fd = os.memfd_create("taken")
    if (pid := os.fork()) == 0:
        try:
            signal.alarm(10)
            block = b"1" * (1 << 20)
            for _ in range(given["memory_bytes"] * 2 >> 20):
                os.write(fd, block)
                os.write(tell, b"x")
        finally:
            os._exit(0)
    os.close(fd)
    os.close(tell)
    os.waitpid(pid, 0)
    taken = len(os.read(told, 65536)) << 20
    return f"{taken} bytes were taken" if taken > given["memory_bytes"] else None


def takes_memory_with_many_processes(given: Given) -> str | None:
    """Each within any limit of a single process. A pipe keeps all of them until the last has its share."""
    share = given["memory_bytes"] // 2
    told, tell = os.pipe()
    children: list[int] = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            taken = bytearray(share)
            taken[::4096] = b"1" * len(taken[::4096])
            os.write(tell, b"x")
            time.sleep(1000)
        children.append(pid)
    os.close(tell)
    having = 0
    deadline = time.monotonic() + 10
    os.set_blocking(told, False)
    while having < 4 and time.monotonic() < deadline and len(children) == 4:
        try:
            having += len(os.read(told, 4))
        except BlockingIOError:
            time.sleep(0.02)
        if os.waitpid(-1, os.WNOHANG)[0]:
            break  # one was killed for it
    alive = [pid for pid in children if contents(f"/proc/{pid}/statm").split()[1:2] not in ([], [b"0"])]
    for pid in children:
        os.kill(pid, 9)
    return f"{having} processes had {share} bytes each" if having == 4 and len(alive) == 4 else None


def writes_a_file_without_end(given: Given) -> str | None:
    path = f"{given['workdir']}/endless"
    block = b"1" * (1 << 20)
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(given["max_file_bytes"] * 4 >> 20):
                file.write(block)
        return f"{os.stat(path).st_size} bytes were written"
    finally:
        os.unlink(path)


def raises_its_own_limits(given: Given) -> str | None:
    """The hard ones, by which a file's size is bounded."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard == resource.RLIM_INFINITY:
        return "files have no limit"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard + 1))
    except ValueError:  # Python's word for a missing permission
        return None
    return "the limit was raised"


def makes_empty_files_without_end(given: Given) -> str | None:
    """They have no bytes, but each takes one of the file system's inodes from everyone."""
    for number in range(given["max_files"] * 4):
        open(f"{given['workdir']}/empty-{number}", "w").close()
    time.sleep(10)  # a limit that is measured may take a while
    return f"{len(os.listdir(str(given['workdir'])))} files stayed"


def makes_empty_files_in_memory_without_end(given: Given) -> str | None:
    """Each takes memory of the kernel, which no size of the file system counts."""
    paths = [f"/dev/shm/{given['mark']}-{number}" for number in range(given["max_files"] * 4)]
    try:
        for path in paths:
            open(path, "w").close()
        time.sleep(10)
        return f"{len(paths)} files stayed"
    finally:
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


def keeps_removed_files_open(given: Given) -> str | None:
    """Their space is taken until they are closed, and no folder shows them."""
    files = [removed_file(given["workdir"], given["disk_bytes"] // 2) for _ in range(4)]
    time.sleep(10)
    return f"{sum(os.fstat(file).st_blocks for file in files) * 512} bytes stayed"


def keeps_removed_files_mapped(given: Given) -> str | None:
    """The same without open files: the mapping of one page keeps all of a file."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    for _ in range(4):
        file = removed_file(given["workdir"], given["disk_bytes"] // 2)
        assert libc.mmap(None, 4096, 1, 1, file, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
        os.close(file)
    time.sleep(10)
    return "4 removed files stayed"


_LIMITED: Mapping[Program, tuple[str, dict[str, Any]]] = {
    starts_processes_without_end: ("max_pids", {"max_pids": _MAX_PIDS}),
    starts_threads_without_end: ("max_pids", {"max_pids": _MAX_PIDS}),
    takes_memory_without_end: ("memory_bytes", {"memory_bytes": _MEMORY_BYTES}),
    takes_memory_as_a_file_without_a_name: ("memory_bytes", {"memory_bytes": _MEMORY_BYTES}),
    takes_memory_with_many_processes: ("memory_bytes", {"memory_bytes": _MEMORY_BYTES}),
    writes_a_file_without_end: ("max_file_bytes", {"max_file_bytes": 4 << 20}),
    raises_its_own_limits: ("max_file_bytes", {"max_file_bytes": 4 << 20}),
    makes_empty_files_without_end: ("max_files", {"max_files": 2000}),
    makes_empty_files_in_memory_without_end: ("max_files", {"max_files": 2000}),
    keeps_removed_files_open: ("disk_bytes", {"disk_bytes": 8 << 20}),
    keeps_removed_files_mapped: ("disk_bytes", {"disk_bytes": 8 << 20}),
}
_SEEN_BY_NAMESPACES = (
    makes_empty_files_in_memory_without_end,
    keeps_removed_files_open,
    keeps_removed_files_mapped,
)
"""Their use can be attributed to one sandbox only where it has file systems and its own processes."""
_TAKEN_TOGETHER = (takes_memory_as_a_file_without_a_name, takes_memory_with_many_processes)
for _program, (_limit, _limits) in _LIMITED.items():
    ATTACKS.add(
        _program.__name__, _limited(_program, _limit, **_limits), needs_isolation=_program in _SEEN_BY_NAMESPACES
    )


@ATTACKS.inside
def takes_connections_to_the_proxy_without_end(given: Given) -> str | None:
    """Each takes open files of the node, which everyone's calls need; those that are turned away are closed."""
    host, _, port = str(given["proxy_url"]).rpartition("/")[2].partition(":")
    talks: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while len(talks) < 600:
            talks.append(socket.create_connection((host, int(port)), 5))
    ends_at = time.monotonic() + 10  # a busy machine is slow to turn them away
    while len(talks) > 300 and time.monotonic() < ends_at:
        time.sleep(0.5)
        talks = [talk for talk in talks if is_open(talk)]
    return f"{len(talks)} connections at once" if len(talks) > 300 else None


@ATTACKS.inside
def fills_file_systems_in_memory(given: Given) -> str | None:
    """Every one that it may write: their content is in the machine's memory."""
    block = b"1" * (1 << 20)
    mounts = [line.split() for line in contents("/proc/self/mounts").decode(errors="replace").splitlines()]
    root = [f"/{name}" for name in ("run", "var/tmp", "var", "home", "mnt", "srv", "")] if "tmpfs" in mounts[0] else []
    for place in [place for _, place, kind, *_ in mounts if kind == "tmpfs" and place[:5] != "/proc"] + root:
        path = f"{place}/gangline-filled"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            continue
        try:
            for _ in range(300):
                if os.write(fd, block) < len(block):
                    break
            else:
                return f"300 MiB were written to {place}"
        except OSError:
            continue
        finally:
            os.close(fd)
            os.unlink(path)
    return None


def _floods(stream: int) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        line = f"for _ in range({_FLOOD_BYTES >> 20}): os.write({stream}, b'x' * (1 << 20))"
        program = f"import os\nos.set_blocking({stream}, True)\n{line}"
        before = _resident_bytes()
        argv = ["python3", "-I", "-B", "-c", program]
        result = await grounds.handle.exec(argv, timeout_s=60, max_output_bytes=_MAX_OUTPUT_BYTES)
        grown = _resident_bytes() - before
        kept = max(len(result.stdout), len(result.stderr))
        if kept > _MAX_OUTPUT_BYTES:
            return f"{kept} bytes were kept"
        return f"the node grew by {grown} bytes" if grown > _MAX_GROWTH_BYTES else None

    return run


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


ATTACKS.add("floods_its_output", _floods(1), needs_isolation=False)
ATTACKS.add("floods_its_errors", _floods(2), needs_isolation=False)


@ATTACKS.around(needs_isolation=False)
async def never_reads_its_input(grounds: Grounds) -> str | None:
    """The node must not wait for it when the command has ended."""
    begun = time.monotonic()
    result = await grounds.handle.exec("sleep 100000 & exit 0", stdin=b"x" * (8 << 20), timeout_s=10)
    await grounds.handle.kill()
    took_s = time.monotonic() - begun
    return f"the node waited for {took_s:.0f} s" if result.timed_out or took_s > 10 else None
