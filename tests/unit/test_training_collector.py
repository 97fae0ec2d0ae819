"""Collectors against a service whose groups end when the test says so."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gangline.domain.errors import InvalidGroup, OutOfTasks
from gangline.domain.task import AgentSpec, TaskRequest
from gangline.train.collecting.collector import (
    PlainCollector,
    ReplenishingCollector,
    informative,
)
from gangline.train.collecting.groups import Group, ValiditySettings
from support.training.service import BROKEN, DULL, GOOD, FakeService, tasks


def names(groups: list[Group]) -> list[str]:
    return [one.task_id for one in groups]


async def test_a_plain_batch_waits_for_its_slowest() -> None:
    service = FakeService()
    async with PlainCollector(service, tasks()) as collector:
        work = asyncio.create_task(collector.collect(2))
        await service.until_submitted(2)
        service.end("t1")
        assert service.submitted == ["t0", "t1"]
        service.end("t0")
        assert names(await work) == ["t0", "t1"]
    assert service.cancelled == []


async def test_a_plain_batch_is_asked_again_for_what_was_dull_and_wastes_what_is_too_much() -> None:
    service = FakeService(t0=GOOD, t1=DULL, t2=GOOD, t3=GOOD)
    async with PlainCollector(service, tasks(), admit=informative) as collector:
        assert names(await collector.collect(2)) == ["t0", "t2"]
        counts = collector.counts
    assert (counts.submitted, counts.handed_out, counts.not_admitted, counts.wasted) == (4, 2, 1, 1)


async def test_the_queue_stays_full_and_the_rest_is_carried_over() -> None:
    service = FakeService()
    async with ReplenishingCollector(service, tasks(), num_in_flight=3, admit=informative) as collector:
        work = asyncio.create_task(collector.collect(2))
        await service.until_submitted(3)
        service.end("t1", DULL)
        await service.until_submitted(4)  # one in its place, though t0 still runs
        service.end("t2")
        await service.until_submitted(5)
        service.end("t3")
        assert names(await work) == ["t2", "t3"]
        assert service.cancelled == []

        work = asyncio.create_task(collector.collect(2))
        service.end("t0")
        service.end("t4")
        assert names(await work) == ["t0", "t4"]  # begun in the first call
        still_open = set(service.submitted) - {"t0", "t1", "t2", "t3", "t4"}
    assert set(service.cancelled) == still_open


async def test_groups_that_end_together_are_handed_out_in_the_order_of_their_start() -> None:
    service = FakeService(t0=GOOD, t1=GOOD, t2=GOOD)
    async with ReplenishingCollector(service, tasks(), num_in_flight=3) as collector:
        assert names(await collector.collect(1)) == ["t0"]
        assert names(await collector.collect(2)) == ["t1", "t2"]


async def test_the_rest_is_cancelled_if_so_chosen() -> None:
    service = FakeService()
    async with ReplenishingCollector(service, tasks(), num_in_flight=3, unfinished="cancel") as collector:
        work = asyncio.create_task(collector.collect(1))
        await service.until_submitted(3)
        service.end("t1")
        assert names(await work) == ["t1"]
        assert service.cancelled == ["t0", "t2"]
        assert collector.counts.cancelled == 2


async def test_a_group_that_is_not_whole_is_refused_and_the_others_are_kept() -> None:
    service = FakeService(t0=GOOD, t1=BROKEN, t2=GOOD)
    async with ReplenishingCollector(service, tasks(), num_in_flight=3) as collector:
        with pytest.raises(InvalidGroup, match="t1"):
            await collector.collect(3)
        assert names(await collector.collect(2)) == ["t0", "t2"]


async def test_a_group_that_is_not_whole_is_run_again_under_another_id() -> None:
    service = FakeService(**{"t0": BROKEN, "t0.run2": GOOD})
    again = ValiditySettings(on_invalid="resubmit")
    async with PlainCollector(service, tasks(), validity=again) as collector:
        assert names(await collector.collect(1)) == ["t0.run2"]


@pytest.mark.parametrize("as_data", [True, False])
async def test_a_group_with_as_many_sessions_as_its_task_calls_enough_is_whole(as_data: bool) -> None:
    task = TaskRequest(
        task_id="t0", instruction="i", num_samples=2, enough_sessions=1, agent=AgentSpec(harness="shell")
    )
    service = FakeService(t0=BROKEN)
    given = iter([task.model_dump(mode="json") if as_data else task])
    async with PlainCollector(service, given) as collector:
        (group,) = await collector.collect(1)
    assert len(group.sessions) == 1


async def test_a_task_that_never_comes_back_whole_is_dropped() -> None:
    service = FakeService(**{"t0": BROKEN, "t0.run2": BROKEN, "t0.run3": BROKEN, "t1": GOOD})
    again = ValiditySettings(on_invalid="resubmit")
    async with PlainCollector(service, tasks(), validity=again) as collector:
        assert names(await collector.collect(1)) == ["t1"]
        assert collector.counts.invalid == 1


async def test_a_server_that_is_away_is_asked_again() -> None:
    service = FakeService(t0=GOOD)
    service.num_unavailable = 3
    async with PlainCollector(service, tasks(), retry_s=0.0) as collector:
        assert names(await collector.collect(1)) == ["t0"]
    assert service.submitted == ["t0"]


async def test_tasks_that_end_too_soon_are_told_and_what_was_found_is_kept() -> None:
    service = FakeService(t0=GOOD, t1=DULL)
    few = itertools.islice(tasks(), 2)
    async with ReplenishingCollector(service, few, num_in_flight=4, admit=informative) as collector:
        with pytest.raises(OutOfTasks, match="1 of 2 groups"):
            await collector.collect(2)
        assert names(await collector.collect(1)) == ["t0"]


async def test_a_call_that_is_cancelled_loses_no_group() -> None:
    service = FakeService()
    async with ReplenishingCollector(service, tasks(), num_in_flight=2) as collector:
        work = asyncio.create_task(collector.collect(2))
        await service.until_submitted(2)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        service.end("t1")
        service.end("t0")
        assert names(await collector.collect(2)) == ["t0", "t1"]


async def test_a_task_without_an_id_is_given_one() -> None:
    service = FakeService()
    task = TaskRequest(instruction="add", agent=AgentSpec(harness="shell"), num_samples=2)
    async with PlainCollector(service, itertools.repeat(task)) as collector:
        work = asyncio.create_task(collector.collect(2))
        await service.until_submitted(2)
        for task_id in service.submitted:
            service.end(task_id)
        assert names(await work) == service.submitted
    assert len(set(service.submitted)) == 2
