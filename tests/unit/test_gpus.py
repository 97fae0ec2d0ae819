"""GPUs are held by one process, for sandboxes of one name, and by none that is dead."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator

import pytest

from gangline.domain.errors import RuntimeFailed
from gangline.domain.ids import new_id
from gangline.sandbox.containers import gpus

HOLDS = """
import asyncio, sys, time
from gangline.sandbox.containers.gpus import hold
print(asyncio.run(hold(sys.argv[1:], 1, sharing="other", runtime_id="r")), flush=True)
time.sleep(600)
"""


@pytest.fixture
async def machine(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[list[str]]:
    """Names of three GPUs that no other test has."""
    monkeypatch.setattr(gpus, "_PATIENCE_S", 0.3)
    yield [f"/dev/{'long/' * 30}{new_id('gpu')}" for _ in range(3)]
    for sharing, user in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        gpus.release(sharing=sharing, runtime_id=user)


async def test_those_of_one_name_share_and_the_last_one_frees(
    machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = machine
    assert await gpus.hold(machine, 1, sharing="a", runtime_id="a1") == (first,)
    assert await gpus.hold(machine, 2, sharing="a", runtime_id="a2") == (first, second)
    assert await gpus.hold(machine, 1, sharing="b", runtime_id="b1") == (third,)
    gpus.release(sharing="a", runtime_id="a1")
    gpus.release(sharing="a", runtime_id="a1")
    with pytest.raises(RuntimeFailed, match="2 GPUs were asked for, and 2 of this machine's 3 are still taken"):
        await gpus.hold(machine, 2, sharing="b", runtime_id="b1")
    monkeypatch.setattr(gpus, "_PATIENCE_S", 60.0)
    waiting = asyncio.create_task(gpus.hold(machine, 3, sharing="b", runtime_id="b1"))
    await asyncio.sleep(0.15)
    gpus.release(sharing="a", runtime_id="a2")
    assert await waiting == (third, first, second)


async def test_another_process_holds_until_it_is_dead(machine: list[str]) -> None:
    only = machine[:1]
    with subprocess.Popen([sys.executable, "-c", HOLDS, *only], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert only[0] in other.stdout.readline()
        with pytest.raises(RuntimeFailed, match="are still taken by other sandboxes"):
            await gpus.hold(only, 1, sharing="a", runtime_id="a1")
        other.kill()
        other.wait()
    assert await gpus.hold(only, 1, sharing="a", runtime_id="a1") == tuple(only)
