"""Processes that try to outlive their command, and their sandbox's `kill`, `reset` and `stop`.

Each carries a mark in its arguments, by which it is looked for from outside among all processes of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Awaitable, Callable

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import Sandbox
from gangline.testing.runtime_conformance.bench import until_present
from support.hostility.attack import Assault, Attacks
from support.hostility.grounds import Grounds

ATTACKS = Attacks("the end of a session")

_numbers = itertools.count()
_HEAD = """
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
def ready(): open(sys.argv[1], 'w').close()
def wait():
    while True: time.sleep(1000)
"""
_KINDS = {
    "a_daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: ready()
    else: os._exit(0)
wait()
""",
    "a_daemon_that_ignores_signals": """
for number in range(1, 32):
    if number not in (9, 17, 19): signal.signal(number, signal.SIG_IGN)
if os.fork() == 0: os.setsid(); ready()
wait()
""",
    "a_stopped_process": """
if os.fork() == 0:
    os.setsid(); ready(); os.kill(os.getpid(), signal.SIGSTOP)
wait()
""",
    "a_traced_process": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: libc.ptrace(0, 0, 0, 0); ready(); os.kill(os.getpid(), signal.SIGSTOP)
wait()
""",
    "a_process_that_moves_on_by_forking": """
if os.fork() == 0:
    ready()
    while True:
        if os.fork(): os._exit(0)
        os.setsid(); time.sleep(0.05)
wait()
""",
    "a_process_that_adopts_orphans": """
if os.fork() == 0:
    os.setsid(); libc.prctl(36, 1, 0, 0, 0)
    for _ in range(4):
        if os.fork() == 0: os.setsid(); os.fork() and os._exit(0); wait()
    ready()
wait()
""",
    "a_process_whose_first_thread_has_ended": """
if os.fork() == 0:
    os.setsid(); threading.Thread(target=wait).start(); ready()
    libc.syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)
wait()
""",
    "a_crowd_of_processes": """
for _ in range(20):
    if os.fork() == 0: os.setsid(); wait()
ready(); wait()
""",
    "a_process_in_namespaces_of_its_own": """
libc.unshare(0x10000000 | 0x20000000 | 0x00020000)
if os.fork() == 0: os.setsid(); ready()
wait()
""",
    "a_process_that_holds_its_output": """
if os.fork() == 0: os.setsid(); os.write(1, b'x'); ready()
wait()
""",
    "a_process_without_an_environment": """
if os.fork() == 0:
    os.setsid(); ready()
    os.execve(sys.executable, [sys.executable, '-I', '-c', 'import time; time.sleep(100000)', sys.argv[2]], {})
wait()
""",
    "a_process_that_ignores_its_parents_end": """
if os.fork() == 0:
    libc.prctl(1, 0, 0, 0, 0); os.setsid()
    if os.fork() == 0: libc.prctl(1, 0, 0, 0, 0); ready()
    else: os._exit(0)
wait()
""",
    "a_process_that_stops_its_supervisor": """
above = os.getppid()
if os.fork() == 0: os.setsid(); ready()
else:
    try: above not in (1, int(sys.argv[3])) and os.kill(above, signal.SIGSTOP)
    except OSError: pass
wait()
""",
    "a_process_that_ends_its_supervisor": """
above = os.getppid()
if os.fork() == 0: os.setsid(); ready()
else:
    try: above not in (1, int(sys.argv[3])) and os.kill(above, signal.SIGKILL)
    except OSError: pass
wait()
""",
}
_NEEDS_ISOLATION = {
    "a_process_without_an_environment",
    "a_process_in_namespaces_of_its_own",
    "a_process_that_stops_its_supervisor",
    "a_process_that_ends_its_supervisor",
}
"""A runtime without isolation finds processes by their environment, and its supervisors belong to the agent's user."""


async def _left(grounds: Grounds, handle: Sandbox, kind: str, end: Callable[[], Awaitable[None]]) -> str | None:
    number = next(_numbers)
    mark = f"{grounds.mark}-{number}"
    argv = ["python3", "-I", "-B", "-c", _HEAD + _KINDS[kind], f"ready-{number}", mark, str(os.getpid())]
    running = asyncio.create_task(handle.exec(argv))
    ready = asyncio.create_task(until_present(handle, f"ready-{number}"))
    try:
        # A supervisor that was killed may take its command along before that is ready.
        await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
        running.cancel()
        if end is not handle.stop:
            with contextlib.suppress(asyncio.CancelledError, RuntimeFailed):
                await running
        await end()
        return await grounds.outlived(mark)
    finally:
        running.cancel()
        ready.cancel()
        await asyncio.wait({running, ready})


async def _nothing() -> None:
    """The cancelled command alone must have ended them."""


def _against_cancel(kind: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        return await _left(grounds, grounds.handle, kind, _nothing)

    return run


def _against_reset(kind: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        async with grounds.sandbox() as handle:
            grounds.promised(handle, "checkpoints")
            return await _left(grounds, handle, kind, handle.reset)

    return run


def _against_stop(kind: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        async with grounds.sandbox() as handle:
            return await _left(grounds, handle, kind, handle.stop)

    return run


for _kind in _KINDS:
    ATTACKS.add(f"{_kind}_outlives_its_command", _against_cancel(_kind), needs_isolation=_kind in _NEEDS_ISOLATION)
    ATTACKS.add(f"{_kind}_outlives_reset", _against_reset(_kind), needs_isolation=_kind in _NEEDS_ISOLATION)
    ATTACKS.add(f"{_kind}_outlives_stop", _against_stop(_kind), needs_isolation=_kind in _NEEDS_ISOLATION)


@ATTACKS.around(needs_isolation=False)
async def a_daemon_outlives_a_timeout(grounds: Grounds) -> str | None:
    mark = f"{grounds.mark}-{next(_numbers)}"
    code = _HEAD + _KINDS["a_daemon"]
    await grounds.handle.exec(["python3", "-I", "-B", "-c", code, "ready-late", mark], timeout_s=1.0)
    return await grounds.outlived(mark)


@ATTACKS.around(needs_isolation=False)
async def a_daemon_outlives_kill(grounds: Grounds) -> str | None:
    """Left behind by a command that has long ended by itself."""
    number = next(_numbers)
    mark = f"{grounds.mark}-{number}"
    await grounds.handle.upload("left.py", f"{_HEAD}ready(); wait()".encode())
    command = f"setsid python3 -I -B left.py ready-{number} {mark} > /dev/null 2>&1 < /dev/null &"
    assert (await grounds.handle.exec(command)).ok
    await until_present(grounds.handle, f"ready-{number}")
    await grounds.handle.kill()
    return await grounds.outlived(mark)


@ATTACKS.around(needs_isolation=False)
async def a_daemon_holds_its_command_up(grounds: Grounds) -> str | None:
    result = await grounds.handle.exec(f"sh -c 'sleep 100000; : {grounds.mark}' & echo done", timeout_s=10)
    await grounds.handle.kill()
    await asyncio.to_thread(grounds.end_survivors)
    return "the command did not end with its shell" if result.timed_out else None
