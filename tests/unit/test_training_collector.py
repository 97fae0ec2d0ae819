"""Collectors against a service whose groups end when the test says so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gangline.client import ServerClient
from gangline.domain.errors import InvalidGroup, NotFound, OutOfTasks, ServerUnavailable
from gangline.domain.session import SessionResult
from gangline.domain.task import AgentSpec, TaskRequest
from gangline.domain.views import Submitted, TaskView
from gangline.training.collector import (
    PlainCollector,
    ReplenishingCollector,
    RolloutService,
    informative,
)
from gangline.training.groups import Group, ValiditySettings
from training_samples import group

GOOD, DULL, BROKEN = (1.0, 0.0), (1.0, 1.0), (1.0, None)


class FakeService:
    """A task ends when it is told to, or at once when its rewards were given before."""

    def __init__(self, **rewards: tuple[float | None, ...]) -> None:
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.num_unavailable = 0
        """How many calls are still to fail."""
        self._rewards = dict(rewards)
        self._ended: dict[str, asyncio.Event] = {}
        self._was_submitted = asyncio.Condition()

    def end(self, task_id: str, rewards: tuple[float | None, ...] = GOOD) -> None:
        self._rewards[task_id] = rewards
        self._ended[task_id].set()

    async def until_submitted(self, number: int) -> None:
        async with self._was_submitted:
            await self._was_submitted.wait_for(lambda: len(self.submitted) >= number)

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        self._may_fail()
        task_id = (task.task_id if isinstance(task, TaskRequest) else task["task_id"]) or ""
        self._ended[task_id] = asyncio.Event()
        if task_id in self._rewards:
            self._ended[task_id].set()
        async with self._was_submitted:
            self.submitted.append(task_id)
            self._was_submitted.notify_all()
        return Submitted(task_id=task_id, session_ids=("s0", "s1"), created=True)

    async def wait(self, task_id: str) -> TaskView:
        await self._ended[task_id].wait()
        return await self._view(task_id)

    async def result(self, task_id: str) -> list[SessionResult]:
        self._may_fail()
        return list(group(*self._rewards[task_id]).sessions)

    async def cancel(self, task_id: str) -> TaskView:
        if task_id not in self._ended:
            raise NotFound(f"no task {task_id}.")
        self.cancelled.append(task_id)
        return await self._view(task_id)

    async def _view(self, task_id: str) -> TaskView:
        return TaskView(
            task_id=task_id,
            status="ended",
            num_samples=2,
            num_open=0,
            position=0,
            created_at=0.0,
            ended_at=1.0,
            states={},
            outcomes={},
            rewards=(),
            sessions=(),
            request={},
        )

    def _may_fail(self) -> None:
        if self.num_unavailable:
            self.num_unavailable -= 1
            raise ServerUnavailable("the server does not answer.")


def tasks() -> Iterator[dict[str, Any]]:
    return ({"task_id": f"t{number}", "instruction": "add"} for number in itertools.count())


def names(groups: list[Group]) -> list[str]:
    return [one.task_id for one in groups]


def test_the_client_of_the_server_is_a_rollout_service() -> None:
    service: RolloutService = ServerClient("http://127.0.0.1:1")
    assert service is not None


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
