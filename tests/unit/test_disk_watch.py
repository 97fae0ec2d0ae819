"""When a sandbox's disk is measured: as often as it may have grown, and now and then in any case."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gangline.domain.task import LimitsSpec
from gangline.sandbox.shared import disk
from gangline.sandbox.shared.disk import DiskWatch

KIB = 2**10


class FileSystem:
    """What `statvfs` and `du` would say; counts the measures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: dict[str, int] | None = {"disk_bytes": 10**9, "max_files": 5000}
        self.mine = {"--block-size=1": 0, "--inodes": 1}
        self.num_looks = self.num_measures = 0
        monkeypatch.setattr(disk, "_PAUSE_S", 0.0)
        monkeypatch.setattr(disk, "_taken", self._looked)
        monkeypatch.setattr(disk, "counted", self._counted)

    def _looked(self, folders: Sequence[Path]) -> dict[str, int] | None:
        self.num_looks += 1
        return None if self.taken is None else dict(self.taken)

    async def _counted(self, folders: Sequence[Path], unit: str) -> int:
        self.num_measures += unit == "--inodes"
        return self.mine[unit]

    def write(self, num_bytes: int = 0, files: int = 0) -> None:
        """By the sandbox."""
        assert self.taken is not None
        self.taken["disk_bytes"] += num_bytes
        self.taken["max_files"] += files
        self.mine["--block-size=1"] += num_bytes
        self.mine["--inodes"] += files

    def removed_elsewhere(self, num_bytes: int) -> None:
        assert self.taken is not None
        self.taken["disk_bytes"] -= num_bytes


async def eventually(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.001)


def begun(ends: list[str], **limits: int) -> DiskWatch:
    async def end() -> None:
        ends.append("ended")

    watch = DiskWatch(LimitsSpec(**limits))
    watch.begin(end, lambda: [Path("/")])
    return watch


async def test_a_sandbox_that_writes_nothing_is_hardly_ever_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    files, ends = FileSystem(monkeypatch), list[str]()
    watched = begun(ends, disk_bytes=KIB * KIB)
    await eventually(lambda: files.num_measures == 4)
    assert files.num_measures == 1 + (files.num_looks - 1) // disk._LOOKS
    await watched.close()
    assert ends == []


@pytest.mark.parametrize(
    ("limits", "wrote"),
    [({"disk_bytes": 64 * KIB}, {"num_bytes": 80 * KIB}), ({"max_files": 100}, {"files": 200})],
    ids=["space", "files"],
)
async def test_growth_is_measured_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], wrote: dict[str, int]
) -> None:
    monkeypatch.setattr(disk, "_LOOKS", 10**9)
    files, ends = FileSystem(monkeypatch), list[str]()
    watched = begun(ends, **limits)
    await eventually(lambda: files.num_looks > 20)
    assert files.num_measures == 1
    files.write(**wrote)
    await eventually(lambda: ends == ["ended"])
    assert files.num_measures == 2
    assert watched.usage.exceeded == next(iter(limits))
    await watched.close()


async def test_files_that_others_remove_hide_it_for_a_few_looks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    files, ends = FileSystem(monkeypatch), list[str]()
    watched = begun(ends, disk_bytes=64 * KIB)
    await eventually(lambda: files.num_measures == 1)
    files.removed_elsewhere(10**6)
    files.write(80 * KIB)
    await eventually(lambda: ends == ["ended"])
    await watched.close()


async def test_a_file_system_that_does_not_tell_is_measured_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileSystem(monkeypatch)
    files.taken = None
    watched = begun([], disk_bytes=64 * KIB)
    await eventually(lambda: files.num_measures > disk._LOOKS)
    await watched.close()
    assert files.num_looks - files.num_measures <= 1


def test_a_folder_that_is_gone_does_not_tell(tmp_path: Path) -> None:
    assert disk._taken([tmp_path, tmp_path / "none"]) is None


def test_two_folders_of_one_file_system_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda folder: found)  # others write meanwhile
    assert disk._taken([tmp_path, tmp_path]) == disk._taken([tmp_path])
