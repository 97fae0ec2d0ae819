"""A sandbox's start and end: concurrently, cancelled, lost, and without leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import os

from gangline.domain.errors import RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.testing.runtime_conformance.bench import (
    Bench,
    Checks,
    daemon,
    is_held,
    raises,
    refused,
    until_held,
    until_present,
)

CHECKS = Checks()

_NUM_MOMENTS = 8
"""Number of moments of its duration at which something is cancelled."""


@CHECKS.add
async def sandboxes_start_and_stop_at_the_same_time(bench: Bench) -> None:
    sandboxes = await asyncio.gather(*(bench.start() for _number in range(6)))
    results = await asyncio.gather(
        *(sandbox.exec(f"echo {number} > mine; cat mine") for number, sandbox in enumerate(sandboxes))
    )
    assert [result.stdout for result in results] == [b"%d\n" % number for number in range(6)]
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))


@CHECKS.add
async def odd_names_of_a_sandbox_are_refused(bench: Bench) -> None:
    for name in ("../outside", "a/b", ""):
        with refused():
            await bench.start_of(name, RuntimeSpec(backend=bench.runtime.name, image=bench.image))


@CHECKS.add
async def stop_is_idempotent_and_final(bench: Bench) -> None:
    sandbox = await bench.start()
    running = asyncio.create_task(sandbox.exec("touch ready; sleep 100000"))
    await until_present(sandbox, "ready")
    await asyncio.gather(sandbox.stop(), sandbox.stop())
    await sandbox.stop()
    assert (await running).exit_code is None
    with raises(RuntimeFailed):
        await sandbox.exec("true")
    with raises(RuntimeFailed):
        await sandbox.download("ready")
    with raises(RuntimeFailed):
        await sandbox.upload("late", b"")


@CHECKS.add
async def stop_ends_every_process(bench: Bench) -> None:
    sandbox = await bench.start()
    await _hold(bench, sandbox, "held")
    await sandbox.stop()
    await bench.proxy.ended("held")


async def _hold(bench: Bench, sandbox: Sandbox, name: str) -> None:
    """Leave a daemon in the sandbox whose connection to the proxy ends with it."""
    assert sandbox.proxy_url is not None
    host, _, port = sandbox.proxy_url.removeprefix("http://").rpartition(":")
    hold = f"import socket; s = socket.create_connection(({host!r}, {port})); s.sendall(b'hold {name}\\n')"
    await sandbox.upload("hold.py", f"{hold}; s.recv(64); s.recv(64)".encode())
    await sandbox.exec("setsid python3 hold.py > /dev/null 2>&1 < /dev/null &")
    await bench.proxy.held(name)


@CHECKS.add
async def stop_removes_what_the_agent_made_hard_to_remove(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.exec("mkdir -p shut/inner && touch shut/inner/f && chmod 000 shut/inner shut; ln -s / root")
    deep = "import os\nfor _ in range(1500): os.mkdir('deep'); os.chdir('deep')"
    await sandbox.exec(["python3", "-c", deep])
    await sandbox.stop()


@CHECKS.add
async def a_start_that_is_cancelled_leaves_nothing(bench: Bench) -> None:
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    await (await bench.start()).stop()
    usual_s = loop.time() - begun_at
    for moment in range(_NUM_MOMENTS):
        task = asyncio.create_task(bench.start())
        await asyncio.wait({task}, timeout=usual_s * moment / _NUM_MOMENTS)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            await task.result().stop()
        assert os.listdir(bench.root) == [], f"a start cancelled in part {moment} of its time left its folder"
    assert await bench.runtime.reap(bench.owner, bench.root) == 0, "a start that was cancelled left something to reap"


@CHECKS.add
async def a_command_that_is_cancelled_leaves_nothing(bench: Bench) -> None:
    sandbox = await bench.start()
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    running = asyncio.create_task(sandbox.exec(daemon() + "; sleep 100000"))
    await until_held(sandbox)
    usual_s = loop.time() - begun_at
    running.cancel()
    for moment in range(_NUM_MOMENTS):
        await asyncio.wait({running})
        assert running.cancelled()
        assert not await is_held(sandbox), "a command that was cancelled left a process"
        running = asyncio.create_task(sandbox.exec(daemon() + "; sleep 100000"))
        await asyncio.wait({running}, timeout=usual_s * moment / _NUM_MOMENTS)
        running.cancel()
    await asyncio.wait({running})


@CHECKS.add
async def a_stop_that_is_cancelled_can_be_done_again(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.exec(daemon())
    stopping = asyncio.create_task(sandbox.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait({stopping})
    await sandbox.stop()
    assert os.listdir(bench.root) == []


@CHECKS.add
async def descriptors_are_given_back(bench: Bench) -> None:
    await _one_life(bench)
    before = sorted(os.listdir("/proc/self/fd"))
    for _life in range(3):
        await _one_life(bench)
    while (after := sorted(os.listdir("/proc/self/fd"))) != before:
        assert len(after) >= len(before), "fewer descriptors than before: whose were they?"
        await asyncio.sleep(0.02)  # connections that are ending; patience is `run_check`'s


async def _one_life(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.exec("cat; sleep 100000 &", stdin=b"x")
    await sandbox.exec("sleep 100000", timeout_s=0.05)
    await sandbox.upload("file", b"x")
    await sandbox.download("file")
    await sandbox.kill()
    await sandbox.exec("true")
    await sandbox.stop()


@CHECKS.add
async def reap_removes_a_lost_sandbox_and_keeps_the_others(bench: Bench) -> None:
    lost, kept = await asyncio.gather(bench.start(), bench.start())
    await _hold(bench, lost, "lost")
    await kept.exec(daemon())
    await until_held(kept)
    assert await bench.runtime.reap("someone-else", bench.root) == 0
    assert await bench.runtime.reap(bench.owner, bench.root, frozenset({kept.runtime_id})) == 1
    assert not (bench.root / lost.runtime_id).exists()
    await bench.proxy.ended("lost")
    assert await is_held(kept), "reap ended a sandbox that it was told to keep"
    assert await bench.runtime.reap(bench.owner, bench.root, frozenset({kept.runtime_id})) == 0


@CHECKS.add
async def reap_finds_nothing_of_what_was_stopped(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.exec(daemon())
    await sandbox.stop()
    assert await bench.runtime.reap(bench.owner, bench.root) == 0
    assert await bench.runtime.reap(new_id("nobody"), bench.root / "absent") == 0


@CHECKS.add
async def what_is_asked_of_a_reaped_sandbox_is_answered(bench: Bench) -> None:
    """Its node believes that it lives: an error, or an end without an exit code, but never an endless wait."""
    sandbox = await bench.start()
    running = asyncio.create_task(sandbox.exec("touch ready; sleep 100000"))
    await until_present(sandbox, "ready")
    assert await bench.runtime.reap(bench.owner, bench.root) == 1
    with contextlib.suppress(RuntimeFailed):
        assert (await running).exit_code is None
    await sandbox.stop()
