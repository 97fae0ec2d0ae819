"""A collector at a real server, whose node reports made-up sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from gangline.domain.errors import LeaseLost
from gangline.server.run import serving
from gangline.train.collecting.collector import ReplenishingCollector, informative
from gangline.train.collecting.groups import InvalidGroup
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request
from support.training.samples import session


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url) as client,
    ):
        yield client


async def report(client: ServerClient) -> None:
    """Every third task succeeds in one of its two samples, the next in both; the next breaks."""
    node = FakeNode(client)
    while True:
        for lease in await node.lease(wait_s=30.0):
            number = int(lease.task_id.removeprefix("task"))
            reward = [float(lease.sample_index), 1.0, None][number % 3]
            trajectory = session(lease.session_id, reward).trajectory
            with suppress(LeaseLost):  # the collector was left meanwhile, and cancelled what it had in flight
                await node.finish([lease], reward=reward, trajectory=trajectory)


async def test_groups_come_from_a_service(client: ServerClient) -> None:
    tasks = (request(f"task{number}") for number in count())
    reporting = asyncio.create_task(report(client))
    collector = ReplenishingCollector(client, tasks, num_in_flight=2, admit=informative)
    async with collector:
        found = await collector.collect(1)
        assert [one.task_id for one in found] == ["task0"]
        assert found[0].rewards == (0.0, 1.0)
        with pytest.raises(InvalidGroup, match=r"task2.*it has no reward"):
            await collector.collect(1)
        assert [one.task_id for one in await collector.collect(1)] == ["task3"]
        assert collector.counts.not_admitted >= 1
    reporting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reporting
