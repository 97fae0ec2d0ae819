"""Limits of a sandbox: a limit that `limits()` reports as enforced is enforced."""

from __future__ import annotations

import asyncio
import shlex
import unittest

from gangline.domain.sandbox import Sandbox
from gangline.domain.task import LimitsSpec
from gangline.testing.runtime_conformance.bench import NOT_ENFORCED, Bench, Checks, is_let_go, promised, until_held

CHECKS = Checks()

_MEMORY_BYTES = 256 << 20
_HOLD = "open('lock.held', 'w').close(); import time; time.sleep(100000)"
_FORKS = "import os, time\nfor _ in range(200):\n  if os.fork() == 0: time.sleep(100000)"
_SPINS = (
    "import os, time; begun = time.monotonic(), time.process_time()\n"
    "while time.monotonic() - begun[0] < 1.5: pass\n"
    "print((time.process_time() - begun[1]) / (time.monotonic() - begun[0]))"
)
"""Prints the share of one processor that it got."""


def _take(size_bytes: int, then: str = "") -> list[str]:
    """A command that writes to this much memory, and reports it."""
    program = f"x = bytearray({size_bytes}); x[::4096] = b'1' * len(x[::4096]); print('taken', flush=True); {then}"
    return ["python3", "-c", program]


@CHECKS.add
async def every_limit_is_told(bench: Bench) -> None:
    limits = LimitsSpec(memory_bytes=_MEMORY_BYTES, max_pids=40, max_file_bytes=1 << 20, cpus=1.0, disk_bytes=1 << 30)
    reported = (await bench.start(limits=limits)).limits()
    assert {*LimitsSpec.model_fields, "network"} <= set(reported)
    assert all(reported.values())
    unlimited = (await bench.start(limits=LimitsSpec(**dict.fromkeys(LimitsSpec.model_fields)))).limits()
    assert {unlimited[name] for name in LimitsSpec.model_fields} == {"not set"}


@CHECKS.add
async def a_task_that_names_no_limits_has_some(bench: Bench) -> None:
    limits = (await bench.start()).limits()
    named = ("memory_bytes", "cpus", "max_pids", "disk_bytes", "max_files")
    assert "not set" not in {limits[name] for name in named}, limits


@CHECKS.add
async def memory_is_limited(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(memory_bytes=_MEMORY_BYTES))
    promised(sandbox, "memory_bytes")
    assert (await sandbox.exec(_take(_MEMORY_BYTES // 4))).ok
    greedy = await sandbox.exec(_take(_MEMORY_BYTES * 2))
    assert not greedy.ok
    assert greedy.stdout == b"", "memory was said to be limited"
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


@CHECKS.add
async def a_command_killed_for_memory_says_so_and_only_that_one(bench: Bench) -> None:
    """Its own process was killed, or the process whose exit a shell passes on. A shell that survives its child was not
    killed.
    """
    sandbox = await bench.start(limits=LimitsSpec(memory_bytes=_MEMORY_BYTES))
    if "per process" in (how := promised(sandbox, "memory_bytes")):
        refused = await sandbox.exec(_take(_MEMORY_BYTES * 2))
        assert (refused.exit_code, refused.memory_kill) == (1, ""), "the program was refused memory, and ended itself"
        raise unittest.SkipTest(f"does not apply: the runtime says that memory is limited by {how}")
    greedy = await sandbox.exec(_take(_MEMORY_BYTES * 2))
    assert (greedy.memory_limit_bytes, greedy.memory_kill) == (_MEMORY_BYTES, "killed: more than 256 MiB of memory")
    line = shlex.join(_take(_MEMORY_BYTES * 2))
    passed_on = await sandbox.exec(f"{line}; exit $?")
    assert (passed_on.exit_code, passed_on.memory_limit_bytes) == (137, _MEMORY_BYTES)
    survivor = await sandbox.exec(f"{line}; echo lives")
    assert (survivor.exit_code, survivor.stdout, survivor.memory_kill) == (0, b"lives\n", "")
    assert (await sandbox.exec(f"{line}; exit 3")).memory_kill == ""
    assert (await sandbox.exec("kill -9 $$")).memory_kill == "", "another's kill, after kills for memory"
    assert (await sandbox.exec("exit 137")).memory_kill == ""


@CHECKS.add
async def a_channels_command_killed_for_memory_says_so_and_only_that_one(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(memory_bytes=_MEMORY_BYTES))
    if "per process" in (how := promised(sandbox, "memory_bytes")):
        raise unittest.SkipTest(f"does not apply: the runtime says that memory is limited by {how}")
    greedy = await sandbox.channel(_take(_MEMORY_BYTES * 2))
    end = await greedy.ended()
    assert (end.signal, end.memory_limit_bytes) == (9, _MEMORY_BYTES)
    await greedy.close()
    survivor = await sandbox.channel(f"{shlex.join(_take(_MEMORY_BYTES * 2))}; echo lives >&3; exec sleep 100000")
    assert await survivor.read() == b"lives\n"
    await survivor.close()
    assert (await survivor.ended()).memory_kill == "", "closed, after its child was killed for memory"


@CHECKS.add
async def memory_is_limited_for_all_processes_together(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(memory_bytes=_MEMORY_BYTES))
    if "per process" in (how := promised(sandbox, "memory_bytes")):
        raise unittest.SkipTest(f"does not apply: the runtime says that memory is limited by {how}")
    first = asyncio.create_task(sandbox.exec(["flock", "lock", *_take(_MEMORY_BYTES * 2 // 3, then=_HOLD)]))
    await until_held(sandbox)
    second = await sandbox.exec(_take(_MEMORY_BYTES * 2 // 3))
    # If the second has its memory, the first was killed, and `flock` releases the lock once it has noticed that.
    assert not second.ok or await is_let_go(sandbox), "memory was said to be limited for the whole sandbox"
    await sandbox.kill()
    await first


@CHECKS.add
async def the_number_of_processes_is_limited(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(max_pids=40))
    promised(sandbox, "max_pids")
    many = await sandbox.exec(["python3", "-c", _FORKS], timeout_s=60)
    assert many.exit_code == 1, f"the number of processes was said to be limited: {many}"
    assert b"BlockingIOError" in many.stderr
    await sandbox.kill()
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


@CHECKS.add
async def the_number_of_processes_is_each_sandboxes_own(bench: Bench) -> None:
    limits = LimitsSpec(max_pids=40)
    full, other = await asyncio.gather(bench.start(limits=limits), bench.start(limits=limits))
    promised(full, "max_pids")
    await full.exec(["python3", "-c", _FORKS], timeout_s=60)
    assert (await other.exec("true & true & true & wait; echo free")).stdout == b"free\n"


@CHECKS.add
async def a_files_size_is_limited(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(max_file_bytes=1 << 20))
    promised(sandbox, "max_file_bytes")
    result = await sandbox.exec("head -c 1000000 /dev/zero > small && head -c 3000000 /dev/zero > big")
    assert not result.ok
    assert await _size(sandbox, "small") == 1_000_000
    assert await _size(sandbox, "big") <= 1 << 20, "the size of files was said to be limited"


@CHECKS.add
async def what_a_sandbox_takes_of_the_disk_is_limited(bench: Bench) -> None:
    """Its processes end, and their files are kept. Files in a folder that is closed to everyone also count."""
    sandbox = await bench.start(limits=LimitsSpec(disk_bytes=24 << 20))
    promised(sandbox, "disk_bytes")
    write = "for n in $(seq 16); do head -c 1M /dev/urandom > $n || exit 3; done"
    assert (await sandbox.exec(f"mkdir shut; cd shut; {write}; chmod 0 .")).ok
    result = await sandbox.exec(f"{write}; sleep 100000")
    assert result.exit_code is None, f"the disk was said to be limited: {result}"
    assert (await sandbox.usage()).exceeded == "disk_bytes"
    assert (await sandbox.exec("ls 1 && chmod 700 shut && ls shut/16")).ok, "what was written is gone"
    assert (await sandbox.exec("sleep 5; echo graded")).ok, "what was there already ended a later command"


@CHECKS.add
async def the_number_of_files_is_limited(bench: Bench) -> None:
    """Including empty files, which take no space: its processes end, and the files are kept."""
    sandbox = await bench.start(limits=LimitsSpec(max_files=500))
    promised(sandbox, "max_files")
    assert (await sandbox.exec("seq 300 | xargs touch; sleep 5; echo alive")).stdout == b"alive\n"
    result = await sandbox.exec("seq 301 600 | xargs touch; sleep 100000")
    assert result.exit_code is None, f"the number of files was said to be limited: {result}"
    assert (await sandbox.usage()).exceeded == "max_files"
    assert (await sandbox.exec("ls 1 600; sleep 5; echo graded")).ok, "what was there already ended a later command"


@CHECKS.add
async def no_file_outgrows_the_disks_limit_before_it_is_measured(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(disk_bytes=8 << 20))
    promised(sandbox, "disk_bytes")
    result = await sandbox.exec("head -c 64M /dev/zero > big")
    assert not result.ok
    assert await _size(sandbox, "big") <= 8 << 20, "the disk was said to be limited"


@CHECKS.add
async def a_sandbox_within_its_limits_is_left_alone(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(disk_bytes=64 << 20))
    assert (await sandbox.exec("head -c 4M /dev/urandom > small; sleep 5; echo alive")).stdout == b"alive\n"
    assert (await sandbox.usage()).exceeded is None


@CHECKS.isolation
async def file_systems_in_memory_have_a_size(bench: Bench) -> None:
    """All of them that an agent can write to; their content counts as memory, if memory is limited."""
    sandbox = await bench.start()
    seen = await sandbox.exec(
        "awk '$3 == \"tmpfs\" {print $2}' /proc/mounts | while read -r at; do"
        ' if touch "$at/probe" 2>/dev/null; then rm "$at/probe"; stat -f -c \'%n %b %S\' "$at"; fi; done'
    )
    sizes = {line.split()[0]: int(line.split()[1]) * int(line.split()[2]) for line in seen.stdout.decode().splitlines()}
    assert all(0 < size <= 1 << 30 for size in sizes.values()), f"file systems in memory without a small size: {sizes}"


async def _size(sandbox: Sandbox, path: str) -> int:
    return int((await sandbox.exec(["stat", "-c", "%s", path])).stdout)


@CHECKS.add
async def processor_time_is_limited(bench: Bench) -> None:
    """Other work on the machine can only reduce the share, so this bound does not depend on its speed."""
    sandbox = await bench.start(limits=LimitsSpec(cpus=0.2))
    promised(sandbox, "cpus")
    share = float((await sandbox.exec(["python3", "-c", _SPINS])).stdout)
    assert share < 0.5, f"of a processor, 0.2 was said to be the limit: {share}"


@CHECKS.isolation
async def an_agent_cannot_lift_its_limits(bench: Bench) -> None:
    sandbox = await bench.start(limits=LimitsSpec(max_pids=40, memory_bytes=_MEMORY_BYTES))
    found = await sandbox.exec("find /sys/fs/cgroup -writable ! -type l 2>/dev/null | head -n 3")
    assert found.stdout == b"", "control groups can be written"
    if sandbox.limits()["max_pids"] != NOT_ENFORCED:
        await sandbox.exec("ulimit -u unlimited; ulimit -u 100000")
        assert (await sandbox.exec(["python3", "-c", _FORKS], timeout_s=60)).exit_code == 1
