"""A full disk: refused with what to do, nothing lost, accepted when there is room again."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from gangline.domain.errors import DiskFull
from gangline.machine.durable import write_new
from gangline.server.app import create_app
from gangline.server.service.core import RolloutService
from gangline.store.journal.turns import TurnStore
from gangline.store.results.files import ResultStore
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, beat, request, result


class Disk:
    """A disk that can be full."""

    full = False

    def write(self, path: Path, data: bytes) -> None:
        if self.full:
            path.write_bytes(data[:1])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_new(path, data)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path):
    store = TaskStore(tmp_path / "gangline.db")
    yield store
    store.close()


@pytest.fixture
async def client(tmp_path: Path, store: TaskStore, disk: Disk) -> AsyncIterator[ServerClient]:
    service = RolloutService(
        store,
        ResultStore(tmp_path / "results", write=disk.write),
        turns=TurnStore(tmp_path / "turns"),
        check_task=any_plugin,
    )
    await service.start()
    async with (
        TestServer(create_app(service, control_token=None)) as server,
        ServerClient(str(server.make_url(""))) as c,
    ):
        yield c


async def test_a_result_refused_for_lack_of_room_is_accepted_later(client: ServerClient, disk: Disk, tmp_path: Path):
    node = FakeNode(client)
    await client.submit(request(num_samples=1))
    (lease,) = await node.lease()
    disk.full = True
    with pytest.raises(DiskFull, match="free some space") as refusal:
        await client.post_result(result(lease))
    assert (refusal.value.retryable, refusal.value.status) == (True, 507)
    assert list((tmp_path / "results" / ".incoming").iterdir()) == []
    assert (await client.session("t.0")).state == "leased"
    disk.full = False
    assert (await client.post_result(result(lease))).state == "ended"
    assert (await client.session_result("t.0")).reward == 1.0


async def test_a_node_whose_heartbeat_had_no_room_is_shown_to_operators_and_to_no_tenant(
    tmp_path: Path, store: TaskStore, monkeypatch: pytest.MonkeyPatch
):
    turns, results = TurnStore(tmp_path / "turns"), ResultStore(tmp_path / "results")
    service = RolloutService(store, results, turns=turns, check_task=any_plugin)

    def full(*_: object) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(store, "heartbeat", full)
    with pytest.raises(DiskFull):
        await service.heartbeat(beat([], "n1", "run"))
    assert [node.node_id for node in (await service.status()).nodes] == ["n1"]
    assert (await service.status("beta")).nodes == ()


async def test_a_full_database_refuses_a_task_and_keeps_what_it_has(client: ServerClient, store: TaskStore):
    await client.submit(request("kept"))
    with store.database.writing() as conn:
        pages = conn.exec_driver_sql("PRAGMA page_count").scalar()
        conn.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    with pytest.raises(DiskFull):
        await client.submit(request("refused", instruction="x" * 500_000))
    assert [task.task_id for task in (await client.tasks()).tasks] == ["kept"]
    with store.database.writing() as conn:
        conn.exec_driver_sql("PRAGMA max_page_count=1000000")
    assert (await client.submit(request("refused", instruction="x" * 500_000))).created
