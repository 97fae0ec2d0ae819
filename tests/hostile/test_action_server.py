"""An agent that kills, stops, floods or speaks for its own action server harms only itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from gangline.domain.contracts import RuntimeHandle
from gangline.domain.errors import ActionServerFailed, RuntimeUnavailable
from gangline.plugins import make_runtime
from gangline.testing.runtime_conformance.bench import Bench, proxies
from gangline.tools.action_server import ActionServer, ActionServerOptions
from support.requirements import need

T = 20.0
FORGE = """
import os, sys
channel = os.open(f"/proc/{sys.argv[1]}/fd/3", os.O_RDWR) if sys.argv[2] == "open" else None
if channel is None:
    import ctypes
    pidfd = os.pidfd_open(int(sys.argv[1]))
    channel = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, 3, 0)
    if channel < 0: raise OSError(ctypes.get_errno(), "pidfd_getfd")
while True: os.write(channel, sys.argv[3].encode() * 10_000)
"""


@pytest_asyncio.fixture(params=["sandbox", "process"])
async def two(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[tuple[RuntimeHandle, RuntimeHandle]]:
    runtime = make_runtime(request.param)
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        need(False, error.message)
    async with proxies() as proxy:
        bench = Bench(runtime, tmp_path, proxy, isolated=request.param == "sandbox", image=None)
        try:
            yield await bench.start(), await bench.start()
        finally:
            await bench.stop_all()


async def worst_while(victim: ActionServer, harm: asyncio.Task[str]) -> float:
    """Seconds of the slowest of the victim's actions until the harm is done."""
    worst_s = 0.0
    while not harm.done():
        began_at = time.monotonic()
        assert (await victim.shell.run("echo mine", timeout_s=T)).output.text == "mine\n"
        worst_s = max(worst_s, time.monotonic() - began_at)
        await asyncio.sleep(0.01)
    return worst_s


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("kill -9 $PPID", "ended by signal 9"),
        ("kill -STOP $PPID", "did not answer within"),
        (f"python3 -c '{FORGE}' $PPID open '{{}}'", ""),
        (f"python3 -c '{FORGE}' $PPID get '{{}}\n'", "a line that is no answer"),
        (f"python3 -c '{FORGE}' $PPID get x", "is of no use any more"),
    ],
    ids=["kills", "stops", "opens", "forges", "floods"],
)
async def test_harm_to_its_own_action_server_is_its_own(
    two: tuple[RuntimeHandle, RuntimeHandle], command: str, told: str
) -> None:
    options = ActionServerOptions(grace_s=3.0)
    async with (
        await ActionServer.start(two[0], options=options) as own,
        await ActionServer.start(two[1]) as victim,
    ):

        async def harm() -> str:
            try:
                return (await own.shell.run(command, timeout_s=2.0)).output.text
            except ActionServerFailed as error:
                return error.message

        doing = asyncio.create_task(harm())
        assert await worst_while(victim, doing) < 3.0
        said = doing.result()
        if "pidfd" in said or "No such device" in said:  # the machine refuses it even to the same user
            return
        assert told in said, said
        again = await ActionServer.start(two[0])
        assert (await again.shell.run("echo again", timeout_s=T)).output.text == "again\n"
        await again.close()


async def test_output_without_end_slows_nobody_else(two: tuple[RuntimeHandle, RuntimeHandle]) -> None:
    async with await ActionServer.start(two[0]) as own, await ActionServer.start(two[1]) as victim:
        doing = asyncio.create_task(_flood(own))
        assert await worst_while(victim, doing) < 2.0
        assert doing.result() == "running"


async def _flood(server: ActionServer) -> str:
    return (await server.shell.run("yes", timeout_s=2.0)).state
