"""A node's reserve of disk: when it leases no more, and whom it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeFailed
from gangline.domain.usage import Usage
from gangline.node.health.disk_guard import LITTLE_BYTES, RESERVE_FILES, DiskGuard, Room
from gangline.store.journal.log import AttemptKey

GIB = 1 << 30


class Agent:
    def __init__(
        self, name: str, used: int | None, *, files: int = 0, exceeded: str | None = None, runs: bool = True
    ) -> None:
        self.key = AttemptKey(name, 1)
        self._usage = Usage(disk_bytes=used, files=files, exceeded=exceeded)
        self._runs = runs
        self.evicted: str | None = None

    async def usage(self) -> Usage:
        return self._usage

    def exceeds(self, usage: Usage) -> str | None:
        return usage.exceeded

    async def evict(self, why: str) -> bool:
        if self._runs:
            self.evicted = why
        return self._runs


class GoneAgent(Agent):
    async def usage(self) -> Usage:
        raise RuntimeFailed("the sandbox is gone")


class Disk:
    def __init__(self, free: int, size: int = 500 * GIB) -> None:
        self.free = free
        self.size = size
        self.free_files = 30_000_000

    def __call__(self, _folder: Path) -> Room:
        return Room(self.free, self.size, self.free_files, 30_000_000)


async def test_no_session_is_leased_below_the_reserve_until_there_is_room_again(tmp_path: Path) -> None:
    disk, told = Disk(3 * GIB), list[bool]()
    guard = DiskGuard(tmp_path, room=disk)
    guard.on_change = lambda: told.append(guard.is_low)
    await guard.look([])
    assert not guard.is_low
    for free in (2 * GIB - 1, GIB + 1, 5 * GIB):
        disk.free = free
        await guard.look([])
    assert told == [True, False]


async def test_a_disk_that_is_low_from_the_start_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = DiskGuard(tmp_path, room=Disk(GIB))
    watching = asyncio.create_task(guard.watch(list))
    await asyncio.sleep(0)
    watching.cancel()
    assert "disk.low" in caplog.text


async def test_the_largest_is_ended_below_half_of_the_reserve_and_one_at_a_time(tmp_path: Path) -> None:
    disk = Disk(GIB + 1)
    guard = DiskGuard(tmp_path, room=disk)
    agents = [Agent("small", GIB), GoneAgent("gone", 0), Agent("large", 9 * GIB), Agent("ended", 50 * GIB, runs=False)]
    await guard.look(agents)
    assert [agent.evicted for agent in agents] == [None] * 4
    disk.free = GIB - 1
    await guard.look(agents)
    assert [agent.key.session_id for agent in agents if agent.evicted] == ["large"]


async def test_nobody_is_ended_for_what_others_than_agents_wrote(tmp_path: Path) -> None:
    guard = DiskGuard(tmp_path, room=Disk(0))
    agents = [Agent("one", LITTLE_BYTES - 1), Agent("two", None)]
    await guard.look(agents)
    assert guard.is_low
    assert [agent.evicted for agent in agents] == [None, None]


async def test_files_run_out_as_space_does(tmp_path: Path) -> None:
    disk = Disk(400 * GIB)
    guard = DiskGuard(tmp_path, room=disk)
    agents = [Agent("large", 9 * GIB, files=10), Agent("many", 0, files=900_000)]
    disk.free_files = RESERVE_FILES - 1
    await guard.look(agents)
    assert guard.is_low
    assert [agent.evicted for agent in agents] == [None, None]
    disk.free_files = RESERVE_FILES // 2 - 1
    await guard.look(agents)
    assert [agent.key.session_id for agent in agents if agent.evicted] == ["many"]


async def test_a_file_system_without_a_number_of_files_has_no_reserve_of_them(tmp_path: Path) -> None:
    guard = DiskGuard(tmp_path, room=lambda _folder: Room(400 * GIB, 500 * GIB, free_files=0, max_files=0))
    assert not guard.is_low


async def test_an_agent_beyond_its_own_limit_is_ended_however_much_is_free(tmp_path: Path) -> None:
    agent = Agent("one", 20 * GIB, exceeded="disk_bytes")
    await DiskGuard(tmp_path, room=Disk(400 * GIB)).look([agent])
    assert agent.evicted == "disk_bytes"


@pytest.mark.parametrize(
    ("reserve", "size", "kept"),
    [(None, 500 * GIB, 2 * GIB), (None, 20 * GIB, GIB), (7 * GIB, 20 * GIB, 7 * GIB), (0, 20 * GIB, 0)],
)
async def test_the_reserve_is_as_told_or_fits_the_disk(
    tmp_path: Path, reserve: int | None, size: int, kept: int
) -> None:
    state = DiskGuard(tmp_path, reserve, room=Disk(GIB // 2, size)).state()
    assert (state.reserve_bytes, state.is_low) == (kept, kept > GIB // 2)
