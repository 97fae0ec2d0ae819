"""Programs that run for a moment: whole groups of processes end with the block, and so do their pipes."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest

from gangline.machine.programs import program


def _shell(told: Path, then: str) -> tuple[str, ...]:
    """A shell with a child that holds its output; the child's number is in `told`."""
    return "sh", "-c", f"sleep 100000 & echo $! > {told}.new; mv {told}.new {told}; {then}"


async def _until_there(path: Path) -> None:
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.01)


async def _is_alive(told: Path) -> bool:
    """A killed orphan is somebody else's to wait for."""
    stat = Path("/proc", told.read_text().strip(), "stat")
    for _ in range(500):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        await asyncio.sleep(0.01)
    return True


async def test_a_cancelled_program_takes_its_children_along(tmp_path: Path) -> None:
    told = tmp_path / "pid"

    async def ask() -> None:
        async with program(*_shell(told, "wait")) as process:
            await process.communicate()

    asking = asyncio.create_task(ask())
    await _until_there(told)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    assert not await _is_alive(told)


async def test_what_left_the_group_cannot_hold_our_pipes(tmp_path: Path) -> None:
    """Python complains of a pipe that nobody closed once it is forgotten: an error in these tests."""
    told = tmp_path / "pid"
    argv = "sh", "-c", f"setsid sleep 100000 & echo $! > {told}.new; mv {told}.new {told}; sleep 100000"
    async with program(*argv, stderr=asyncio.subprocess.PIPE) as process:
        await _until_there(told)
    try:
        assert process.returncode == -9
        assert process.stdout is not None
        async with asyncio.timeout(20):
            await process.stdout.read()
        del process
        gc.collect()
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(told.read_text()), 9)


async def test_a_program_ends_by_itself(tmp_path: Path) -> None:
    async with program("sh", "-c", 'pwd; printf %s "$NAME"', env={"NAME": "x"}, folder=tmp_path) as process:
        said, _ = await process.communicate()
    assert (process.returncode, said) == (0, f"{tmp_path}\nx".encode())


async def test_a_program_that_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        async with program(str(tmp_path / "none")):
            pass
