"""All processes that a command starts: which of them end with it, on a timeout, on a cancel, on a kill."""

from __future__ import annotations

import asyncio

from gangline.domain.sandbox import Sandbox
from gangline.testing.runtime_conformance.bench import (
    Bench,
    Checks,
    daemon,
    dial,
    is_held,
    raises,
    timed_out_beside,
    until_held,
    until_present,
)

CHECKS = Checks()

_HOPPER = (
    "import fcntl, os, time\n"
    "lock = open('lock', 'w'); os.set_inheritable(lock.fileno(), True); fcntl.flock(lock, fcntl.LOCK_EX)\n"
    "if os.fork(): time.sleep(100000)\n"
    "open('lock.held', 'w').close()\n"
    "end = time.monotonic() + 120\n"
    "while time.monotonic() < end:\n"
    "    if os.fork(): os._exit(0)\n"
    "    os.setsid(); time.sleep(0.001)\n"
)
"""A process that keeps changing its id: each one forks a child and ends. One that nothing ends takes half a processor,
so it gives up by itself."""


_LEADERLESS = (
    "import ctypes, fcntl, os, threading, time\n"
    "lock = open('lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
    "threading.Thread(target=time.sleep, args=(100000,)).start(); open('lock.held', 'w').close()\n"
    "ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)\n"
)
"""A process whose first thread has ended and whose second sleeps. 60 and 93 are `exit`, of one thread."""


async def _is_gone_after_timeout(sandbox: Sandbox, command: str, what: str) -> None:
    result = await timed_out_beside(sandbox, command)
    assert (result.exit_code, result.signal, result.timed_out) == (None, None, True)
    assert not await is_held(sandbox), f"{what} outlived the timeout"


@CHECKS.add
async def timeout_kills_the_whole_tree(bench: Bench) -> None:
    await _is_gone_after_timeout(
        await bench.start(), daemon() + "; (sleep 100000 &); sleep 100000", "a daemonised grandchild"
    )


@CHECKS.add
async def timeout_kills_who_ignores_signals(bench: Bench) -> None:
    deaf = 'trap "" TERM HUP INT QUIT; '
    await _is_gone_after_timeout(
        await bench.start(), f"{deaf}{daemon(prelude=deaf)}; sleep 100000", "a process that ignores signals"
    )


@CHECKS.add
async def timeout_kills_who_is_stopped(bench: Bench) -> None:
    stopped = "flock lock sh -c 'touch lock.held; kill -STOP $$' & sleep 100000"
    await _is_gone_after_timeout(await bench.start(), stopped, "a stopped process")


@CHECKS.add
async def timeout_kills_who_is_never_the_same_process(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.upload("hopper.py", _HOPPER.encode())
    await _is_gone_after_timeout(sandbox, "exec python3 hopper.py", "a process that moves on by forking")


@CHECKS.add
async def timeout_kills_who_has_ended_its_first_thread(bench: Bench) -> None:
    """The kernel shows such a process as a zombie, although its other threads run."""
    sandbox = await bench.start()
    await sandbox.upload("leaderless.py", _LEADERLESS.encode())
    await _is_gone_after_timeout(sandbox, "python3 leaderless.py & sleep 100000", "a process without its first thread")


@CHECKS.add
async def cancel_kills_the_whole_tree(bench: Bench) -> None:
    sandbox = await bench.start()
    running = asyncio.create_task(sandbox.exec(daemon() + "; sleep 100000"))
    await until_held(sandbox)
    running.cancel()
    with raises(asyncio.CancelledError):
        await running
    assert not await is_held(sandbox), "a daemonised grandchild outlived the cancel"
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


@CHECKS.add
async def timeout_of_one_command_spares_another(bench: Bench) -> None:
    sandbox = await bench.start()
    other = asyncio.create_task(sandbox.exec("touch ready; while [ ! -e go ]; do sleep 0.02; done; echo spared"))
    await until_present(sandbox, "ready")
    assert (await sandbox.exec("sleep 100000", timeout_s=0.2)).timed_out
    await sandbox.upload("go", b"")
    assert (await other).stdout == b"spared\n"


@CHECKS.add
async def background_children_outlive_their_command_but_not_kill(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec(daemon())).ok
    await until_held(sandbox)
    assert await is_held(sandbox), "a background child died with its command"
    await sandbox.kill()
    assert not await is_held(sandbox), "a background child outlived kill"


@CHECKS.add
async def a_background_child_does_not_hold_its_command_up(bench: Bench) -> None:
    sandbox = await bench.start()
    result = await sandbox.exec("sleep 100000 & echo started", timeout_s=60)
    assert (result.exit_code, result.stdout) == (0, b"started\n")


@CHECKS.add
async def kill_keeps_files_and_exec_works_again(bench: Bench) -> None:
    sandbox = await bench.start()
    running = asyncio.create_task(sandbox.exec("echo x > here; echo y > /tmp/there; touch ready; sleep 100000"))
    await until_present(sandbox, "ready")
    await sandbox.kill()
    ended = await running
    assert ended.exit_code is None
    assert not ended.timed_out
    assert (await sandbox.exec("cat here")).stdout == b"x\n"
    if bench.isolated:
        assert (await sandbox.exec("cat /tmp/there")).stdout == b"y\n"
    assert (await sandbox.exec(dial(sandbox.proxy_url))).stdout == b"proxy:hello\n"


@CHECKS.add
async def kill_is_idempotent_and_needs_nothing_to_kill(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.kill()
    await asyncio.gather(sandbox.kill(), sandbox.kill())
    assert (await sandbox.exec("echo again")).stdout == b"again\n"


@CHECKS.add
async def commands_run_at_the_same_time(bench: Bench) -> None:
    sandbox = await bench.start()
    names = [f"meet{number}" for number in range(8)]
    wait = " && ".join(f"[ -e {name} ]" for name in names)
    results = await asyncio.gather(
        *(sandbox.exec(f"touch {name}; until {wait}; do sleep 0.02; done; echo {name}") for name in names)
    )
    assert [result.stdout.decode().strip() for result in results] == names


@CHECKS.isolation
async def orphans_are_reaped(bench: Bench) -> None:
    """Process 1 inside, in any implementation, must wait for the children of processes that ended."""
    sandbox = await bench.start()
    for _command in range(3):
        assert (await sandbox.exec("for n in 1 2 3 4 5; do (setsid sh -c 'exit 0' &); done")).ok
    zombies = "until ! grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | grep -q .; do sleep 0.02; done"
    assert not (await sandbox.exec(zombies, timeout_s=30)).timed_out, "processes that ended are still there, as zombies"


@CHECKS.isolation
async def an_agent_that_kills_all_it_can_ends_only_itself(bench: Bench) -> None:
    sandbox, neighbour = await asyncio.gather(bench.start(), bench.start())
    spared = asyncio.create_task(neighbour.exec("touch ready; while [ ! -e go ]; do sleep 0.02; done; echo spared"))
    await until_present(neighbour, "ready")
    assert not (await sandbox.exec("kill -9 -1; exit 3")).ok
    assert (await sandbox.exec("echo again")).stdout == b"again\n"
    await neighbour.upload("go", b"")
    assert (await spared).stdout == b"spared\n"
