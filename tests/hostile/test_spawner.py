"""An agent that signals the spawner of its sandbox, or the supervisor of its command, harms only itself."""

from __future__ import annotations

import asyncio
import os

import pytest

from gangline.domain.sandbox import Sandbox
from support.node.pair import Pair, pair, worst_while

__all__ = ["pair"]

FIND = "S=$PPID; F=$(cut -d' ' -f4 /proc/$S/stat); "
ENOUGH_S = 2.0


async def works(victim: Sandbox) -> None:
    assert (await victim.exec("echo mine")).stdout == b"mine\n"


@pytest.mark.parametrize("target", ["$F", "$S", "$F $S"], ids=["spawner", "supervisor", "both"])
@pytest.mark.parametrize(
    "harm",
    [
        "kill -KILL {}",
        "kill -STOP {}",
        "kill -TERM {}; kill -INT {}; kill -HUP {}",
        "while :; do kill -CHLD {}; kill -USR1 {}; kill -CONT {}; done",
        "for i in 1 2 3 4 5 6 7 8; do (while :; do kill -CHLD {}; done) & done; wait",
    ],
    ids=["kills", "stops", "ends", "signals without end", "floods"],
)
async def test_signals_to_its_own_keepers_harm_only_itself(pair: Pair, harm: str, target: str) -> None:
    command = FIND + f"kill -0 {target} && echo reached; " + harm.replace("{}", target)

    async def do_harm() -> bytes:
        return (await pair.own.exec(command, timeout_s=ENOUGH_S)).stdout

    doing = asyncio.create_task(do_harm())
    assert await worst_while(doing, lambda: works(pair.victim)) < 3.0
    has_wall = pair.bench.runtime.name == "sandbox" and os.geteuid() == 0  # else it is the same user's
    assert doing.result() == (b"" if has_wall else b"reached\n")
    assert (await pair.own.exec("echo next", timeout_s=20)).stdout == b"next\n"
    await pair.own.kill()
    assert (await pair.own.exec("echo again", timeout_s=20)).stdout == b"again\n"
    await pair.own.stop()
    assert await pair.bench.runtime.reap(pair.bench.owner, pair.bench.root, frozenset({pair.victim.runtime_id})) == 0
