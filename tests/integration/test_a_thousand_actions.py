"""A thousand actions in one session: none of the processes that serve it grows, and none is added."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from gangline.agents.tools.action_server import ActionServer
from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.testing.adoption_conformance import in_keeper
from support.requirements import need

NUM_ROUNDS = 200
"""Of five actions: a command in the sandbox, and four with the tools."""
NUM_ROUNDS_BEFORE = 40
"""After them caches and bounded histories are filled."""
MAX_GROWTH_BYTES = 1 << 20
TIMEOUT_S = 60.0


class Process(NamedTuple):
    """What one of those that serve the session holds."""

    name: str
    num_files: int
    private_bytes: int


async def act(handle: Sandbox, server: ActionServer, num_rounds: int) -> None:
    for number in range(num_rounds):
        assert (await handle.exec("(exit 0) & echo acted")).stdout == b"acted\n"
        shown = await server.shell.run(f"X={number}; /bin/echo $X", timeout_s=TIMEOUT_S)
        assert (shown.output.text, shown.exit_code) == (f"{number}\n", 0)
        assert (await server.python.run(f"x = {number}\nx", timeout_s=TIMEOUT_S)).result == str(number)
        await server.files.write("file", f"line {number}\n")
        assert (await server.files.view("file")).lines == [f"line {number}"]
    assert (await handle.exec("true")).ok  # it leaves nothing behind, so that its supervisor rests


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def serving(others: set[int]) -> dict[int, Process]:
    """Our keeper with its helpers, and all that runs in the sandbox; not `others`. Raises: OSError where one has just
    ended."""
    return {pid: process(Path(f"/proc/{pid}")) for pid in descendants(os.getpid()) if pid not in others}


def process(folder: Path) -> Process:
    argv = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    lines = (folder / "smaps_rollup").read_text().splitlines()
    private_bytes = sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return Process(argv[:200], len(os.listdir(folder / "fd")), private_bytes)


async def settled(others: set[int], number: int | None = None) -> dict[int, Process]:
    """Once the same processes with the same descriptors are seen twice; `number` of them where it is given."""
    seen: dict[int, Process] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            await asyncio.sleep(0.1)
            with suppress(FileNotFoundError, ProcessLookupError):
                before, seen = seen, serving(others)
                if number in (None, len(seen)) and files(before) == files(seen):
                    return seen


def files(processes: dict[int, Process]) -> dict[int, int]:
    return {pid: one.num_files for pid, one in processes.items()}


@pytest.mark.timeout(300)
async def test_a_thousand_actions_of_all_kinds_grow_nothing(tmp_path: Path) -> None:
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        need(False, error.message)
    start = RuntimeStart(
        runtime_id=new_id("thousand"), owner="tests", spec=RuntimeSpec(network="none"), folder=tmp_path / "sandbox"
    )
    others = set(descendants(os.getpid()))  # of earlier tests
    async with in_keeper("sandbox", tmp_path / "keeper") as runtime:
        handle = await runtime.start(start)
        try:
            async with await ActionServer.start(handle) as server:
                await act(handle, server, NUM_ROUNDS_BEFORE)
                before, ours = await settled(others), len(os.listdir("/proc/self/fd"))
                await act(handle, server, NUM_ROUNDS)
                after = await settled(others, len(before))
                assert len(os.listdir("/proc/self/fd")) == ours
        finally:
            await handle.stop()
    lasting = before.keys() & after.keys()
    assert len(lasting) >= len(before) - 2, "all but a resting supervisor and its fork, which commands replace"
    grown = {after[pid]: after[pid].private_bytes - before[pid].private_bytes for pid in lasting}
    assert all(one.num_files == before[pid].num_files for pid, one in after.items() if pid in lasting), after
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown
