"""An agent that kills, stops, floods or speaks for its own action server harms only itself."""

from __future__ import annotations

import asyncio

import pytest

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions
from gangline.domain.errors import ActionServerFailed
from support.node.pair import Pair, pair, worst_while
from support.requirements import need

__all__ = ["pair"]

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


async def works(victim: ActionServer) -> None:
    assert (await victim.shell.run("echo mine", timeout_s=T)).output.text == "mine\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("kill -9 $PPID", "ended by signal 9"),
        ("kill -STOP $PPID", "did not answer within"),
        (f"python3 -c '{FORGE}' $PPID open '{{}}'", "No such device or address"),  # a socket is not opened again
        (f"python3 -c '{FORGE}' $PPID get '{{}}\n'", "a line that is not an answer"),
        (f"python3 -c '{FORGE}' $PPID get x", "is of no use any more"),
    ],
    ids=["kills", "stops", "opens", "forges", "floods"],
)
async def test_harm_to_its_own_action_server_is_its_own(pair: Pair, command: str, told: str) -> None:
    options = ActionServerOptions(grace_s=3.0)
    async with (
        await ActionServer.start(pair.own, options=options) as own,
        await ActionServer.start(pair.victim) as victim,
    ):

        async def harm() -> str:
            try:
                return (await own.shell.run(command, timeout_s=2.0)).output.text
            except ActionServerFailed as error:
                return error.message

        doing = asyncio.create_task(harm())
        assert await worst_while(doing, lambda: works(victim)) < 3.0
        said = doing.result()
        need("pidfd_getfd" not in said, "this machine lets no program take another's descriptors: kernel.yama")
        assert told in said, said
        again = await ActionServer.start(pair.own)
        assert (await again.shell.run("echo again", timeout_s=T)).output.text == "again\n"
        await again.close()


async def test_output_without_end_slows_nobody_else(pair: Pair) -> None:
    async with await ActionServer.start(pair.own) as own, await ActionServer.start(pair.victim) as victim:
        doing = asyncio.create_task(_flood(own))
        assert await worst_while(doing, lambda: works(victim)) < 2.0
        assert doing.result() == "running"


async def _flood(server: ActionServer) -> str:
    return (await server.shell.run("yes", timeout_s=2.0)).state
