"""What sandboxes take now, and folders that no sandbox has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gangline.domain.usage import Usage, since
from gangline.node.health.sandbox_use import HeldSandboxes, Orphans, SandboxUse, memory_of_machine
from gangline.sandbox.shared.accounts import memory_now
from gangline.store.journal.log import AttemptKey


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def usage(memory_bytes: int | None, cpu_s: float | None = None) -> Usage:
    return Usage(disk_bytes=None, memory_bytes=memory_bytes, cpu_s=cpu_s)


def test_the_largest_sandboxes_are_named_and_all_are_summed() -> None:
    clock = Clock()
    use = SandboxUse(clock)
    keys = [AttemptKey(f"t.{number}", 1) for number in range(8)]
    for clock.now in (0.0, 1.0, 2.0, 3.0):
        use.look((key, usage(100 * place, clock.now * place / 10)) for place, key in enumerate(keys))
    found = use.now()
    assert (found.memory_bytes, found.largest_bytes) == (2800, 700)
    assert found.cpus == pytest.approx(2.8)
    assert found.top == {
        name: value
        for place in (7, 6, 5)
        for name, value in ((f"takes_bytes_t.{place}", 100.0 * place), (f"takes_cpus_t.{place}", place / 10))
    }


def test_what_is_not_measured_is_left_out_and_what_is_gone_is_forgotten() -> None:
    use = SandboxUse(Clock())
    use.look([(AttemptKey("a", 1), usage(None)), (AttemptKey("b", 1), usage(5))])
    assert set(use.now().top) == {"takes_bytes_b", "takes_cpus_b"}
    use.look([])
    assert use.now().top == {}
    assert since(usage(1), usage(7)).memory_bytes is None, "a record has no `now`"


class Held:
    def __init__(self, runtime_id: str) -> None:
        self.runtime_id = runtime_id


async def test_a_folder_is_an_orphan_once_nobody_has_held_it_for_a_while(tmp_path: Path) -> None:
    clock, held = Clock(), HeldSandboxes()
    sandbox = held.hold(Held("kept"))  # type: ignore[arg-type]
    for name in ("kept", "starts", "orphan", "checkpoint-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    orphans = Orphans(tmp_path, held, clock)
    async with held.starting("starts"):
        for clock.now in (0.0, 20.0):
            await orphans.look()
        assert orphans.found == ["orphan"]
    await orphans.look()
    assert orphans.found == ["orphan"], "one that has just ended is being removed"
    (tmp_path / "orphan").rmdir()
    (tmp_path / "starts").rmdir()
    del sandbox
    await orphans.look()
    clock.now = 40.0
    await orphans.look()
    assert orphans.found == ["kept"]


def test_memory_is_of_control_groups_without_cold_files_or_of_the_processes_inside(tmp_path: Path) -> None:
    v1, v2, proc = tmp_path / "v1", tmp_path / "v2", tmp_path / "proc"
    v1.mkdir()
    (v1 / "memory.usage_in_bytes").write_text("900\n")
    (v1 / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 300\n")
    v2.mkdir()
    (v2 / "memory.current").write_text("800\n")
    (v2 / "memory.stat").write_text("anon 1\ninactive_file 100\n")
    for pid, pages in (("1", 3), ("17", 4)):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "statm").write_text(f"99 {pages} 1 1 0 9 0\n")
    (proc / "meminfo").touch()
    assert [memory_now([folder], proc) for folder in (v1, v2)] == [600, 700]
    assert memory_now([tmp_path], proc) == 7 * os.sysconf("SC_PAGE_SIZE")
    assert memory_now([], None) is None
    assert memory_now([], tmp_path / "gone") is None


def test_the_machines_memory_is_known() -> None:
    total, free = memory_of_machine()
    assert total > free > 0
