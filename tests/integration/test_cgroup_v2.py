"""Control groups of version 2 in this machine's own hierarchy, with the controllers it has: on a hybrid one, none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.domain.ids import new_id
from gangline.domain.sandbox import ExecRequest
from gangline.domain.task import LimitsSpec
from gangline.sandbox.commands.execution import Executions, Order
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.confinement.cgroups import Cgroups, group_name, make_groups, remove_owned
from gangline.sandbox.shared.accounts import MemoryWatch
from support.requirements import DOES_NOT_APPLY, need

_FILES = {"memory_bytes": "memory.max", "max_pids": "pids.max", "cpus": "cpu.max"}


@pytest.fixture
def root() -> Path:
    """Where it is mounted."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2" and "rw" in mount[3].split(",")]
    need(found, f"{DOES_NOT_APPLY} no control groups of version 2 here")
    return found[0]


@pytest.fixture
def group(root: Path) -> Iterator[Path]:
    folder = root / group_name("test", new_id("group"))
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"{DOES_NOT_APPLY} no group can be made here: {error}")
    yield folder
    if folder.exists():
        (folder / "cgroup.kill").write_text("1")
        asyncio.run(remove_owned("test", frozenset(), root=root))
        pytest.fail(f"{folder.name} was left behind")


def test_what_is_said_to_be_enforced_is_what_the_kernel_holds(root: Path) -> None:
    limits = LimitsSpec(memory_bytes=64 << 20, max_pids=7, cpus=0.5)
    name = group_name("test", new_id("group"))
    groups = make_groups(name, limits, root=root)
    try:
        held = {limit: (groups.folders[0] / _FILES[limit]).read_text().strip() for limit in groups.enforced}
        expected = {"memory_bytes": str(64 << 20), "max_pids": "7", "cpus": "50000 100000"}
        assert held == {limit: expected[limit] for limit in groups.enforced}
        assert bool(groups.folders) == bool(groups.enforced)
    finally:
        asyncio.run(groups.remove())
    assert list(root.rglob(name)) == []


async def _end_nothing() -> None:
    """The group is killed by the test."""


async def test_a_command_joins_its_group_and_the_group_goes_when_its_processes_are_gone(group: Path) -> None:
    groups = Cgroups()
    groups.folders = [group]
    executions, spawner = Executions(), Spawner("test/cgroup/v2")
    await spawner.ready()
    order = Order(
        argv=["sh", "-c", "cat /proc/self/cgroup; sleep 100000 & echo $!"],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        cgroup_procs=groups.procs,
    )
    memory = MemoryWatch([group], None)
    request = ExecRequest(command=order.argv, max_output_bytes=4096)
    result = await executions.run(spawner, order, _end_nothing, request, memory=memory)
    assert f"0::/{group.name}" in result.stdout.decode().splitlines()[-2]
    while len(left := (group / "cgroup.procs").read_text().split()) > 1:
        await asyncio.sleep(0.01)  # the shell is on its way out
    assert left[0] == result.stdout.decode().split()[-1], "its child is in the group too"
    with pytest.raises(OSError, match="busy"):
        group.rmdir()
    (group / "cgroup.kill").write_text("1")
    await groups.remove()
    await executions.close()
    await spawner.end()


async def test_a_lost_group_is_found_by_its_name(group: Path, root: Path) -> None:
    await remove_owned("nobody", frozenset(), root=root)
    assert group.exists()
    await remove_owned("test", frozenset(), root=root)
