"""Leases that run out, with a clock of the test's own; and a server that could not listen for a while."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gangline.domain.errors import LeaseLost, StoreError
from gangline.domain.tokens import encode_msgpack
from gangline.server.service.core import CALLBACKS, RolloutService, task_topic
from gangline.store.journal.turns import TurnStore
from gangline.store.results.files import ResultStore
from gangline.store.sql.tasks import TaskStore
from support.service.running import NODE_URL, any_plugin, beat, request, result


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def service(tmp_path: Path, clock: Clock) -> AsyncIterator[RolloutService]:
    store = TaskStore(tmp_path / "gangline.db", clock=clock, lease_s=30.0)
    service = RolloutService(
        store, ResultStore(tmp_path / "results"), turns=TurnStore(tmp_path / "turns"), check_task=any_plugin
    )
    await service.start()
    yield service
    service.stop()
    service.close()
    store.close()


async def lease_one(service: RolloutService, node_id: str = "n1"):
    (lease,) = await service.lease(node_id, NODE_URL, 1, 0.0)
    return lease


async def test_a_lease_that_is_not_renewed_goes_to_another_node_with_the_next_attempt(
    service: RolloutService, clock: Clock, tmp_path: Path
):
    await service.submit([request(num_samples=1)])
    first = await lease_one(service)
    assert first.expires_at == 1030.0
    clock.now += 29.0
    assert (await service.sweep(), await service.lease("n2", NODE_URL, 1, 0.0)) == (0, [])
    clock.now += 1.0
    assert await service.sweep() == 1
    second = await lease_one(service, "n2")
    assert (second.attempt, second.fence) == (2, 2)
    assert (await service.heartbeat(beat([first], "n1"))).lost == ("t.0",)
    with pytest.raises(LeaseLost):
        await service.report("t.0", encode_msgpack(result(first, "n1")))
    assert list((tmp_path / "results" / ".incoming").iterdir()) == []
    receipt = await service.report("t.0", encode_msgpack(result(second, "n2")))
    assert receipt.state == "ended"


async def test_heartbeats_keep_a_lease_for_as_long_as_they_come(service: RolloutService, clock: Clock):
    await service.submit([request(num_samples=1)])
    lease = await lease_one(service)
    for _ in range(5):
        clock.now += 20.0
        assert (await service.heartbeat(beat([lease]))).renewed == ("t.0",)
        assert await service.sweep() == 0


async def test_a_node_that_beats_late_keeps_what_nobody_took_back(service: RolloutService, clock: Clock):
    await service.submit([request(num_samples=1)])
    lease = await lease_one(service)
    clock.now += 100.0
    assert (await service.heartbeat(beat([lease]))).renewed == ("t.0",)
    assert await service.sweep() == 0


async def test_a_session_whose_leases_all_run_out_ends_as_our_fault(service: RolloutService, clock: Clock):
    await service.submit([request(num_samples=1, max_attempts=2)])
    for attempt in (1, 2):
        assert (await lease_one(service)).attempt == attempt
        clock.now += 30.0
        await service.sweep()
    task, (found,) = await service.task_results("t", partial=False)
    assert (task.outcomes, task.rewards, found.outcome, found.attempt) == (
        {"infra_error": 1},
        (None,),
        "infra_error",
        2,
    )
    assert found.failure is not None
    assert (found.failure.boundary, found.failure.code) == ("node", "lease_expired")


async def test_a_lease_whose_answer_never_reached_its_node_is_put_back_unharmed(service: RolloutService, clock: Clock):
    await service.submit([request(num_samples=2)])
    known, unheard = await service.lease("n1", NODE_URL, 2, 0.0)
    clock.now += 10.0
    await service.heartbeat(beat([known]))
    assert (await service.store.query(service.store.session, unheard.session_id)).state == "leased"
    clock.now += 1.0
    assert (await service.heartbeat(beat([known]))).renewed == (known.session_id,)
    again = await lease_one(service, "n2")
    assert (again.session_id, again.attempt, again.fence) == (unheard.session_id, 1, 2)
    assert (await service.heartbeat(beat([known, unheard]))).lost == (unheard.session_id,)


async def test_the_oldest_sessions_are_leased_first_and_those_that_come_back_before_younger_ones(
    service: RolloutService,
):
    await service.submit([request("a", num_samples=2), request("b", num_samples=2)])
    taken = await service.lease("n1", NODE_URL, 3, 0.0)
    assert [lease.session_id for lease in taken] == ["a.0", "a.1", "b.0"]
    await service.release("n1", "a.1", taken[1].fence)
    assert [lease.session_id for lease in await service.lease("n1", NODE_URL, 9, 0.0)] == ["a.1", "b.1"]


async def test_after_a_pause_of_its_own_the_server_first_lets_nodes_be_heard(service: RolloutService, clock: Clock):
    await service.submit([request(num_samples=1)])
    lease = await lease_one(service)
    clock.now += 3600.0
    assert await service.sweep(after_pause=True) == 0
    assert await service.sweep() == 0
    assert (await service.heartbeat(beat([lease]))).renewed == ("t.0",)


async def test_a_server_that_was_down_for_long_takes_nothing_from_living_nodes(tmp_path: Path, clock: Clock):
    def opened() -> RolloutService:
        store = TaskStore(tmp_path / "gangline.db", clock=clock, lease_s=30.0)
        return RolloutService(
            store, ResultStore(tmp_path / "results"), turns=TurnStore(tmp_path / "turns"), check_task=any_plugin
        )

    before = opened()
    await before.submit([request(num_samples=1)])
    lease = await lease_one(before)
    before.store.close()
    clock.now += 3600.0
    after = opened()
    await after.start()
    assert await after.sweep() == 0
    assert (await after.report("t.0", encode_msgpack(result(lease)))).state == "ended"
    after.store.close()


class Unreachable(TaskStore):
    """A store whose database can be away."""

    away = False
    num_failed = 0

    def sweep(self) -> int:
        if self.away:
            self.num_failed += 1
            raise StoreError("the database does not answer")
        return super().sweep()


async def test_after_a_time_without_its_database_the_server_first_lets_nodes_be_heard(tmp_path: Path, clock: Clock):
    monotonic = Clock()
    store = Unreachable(tmp_path / "gangline.db", clock=clock, lease_s=30.0)
    results = ResultStore(tmp_path / "results")
    service = RolloutService(
        store,
        results,
        turns=TurnStore(tmp_path / "turns"),
        check_task=any_plugin,
        sweep_every_s=0.001,
        monotonic=monotonic,
    )
    await service.submit([request(num_samples=1)])
    await lease_one(service)
    store.away = True
    sweeping = asyncio.create_task(service.sweep_forever())
    try:
        async with asyncio.timeout(30):
            await failed(store, 1)
            clock.now += 3600.0
            monotonic.now += 3600.0
            await failed(store, 3)
            store.away = False
            while (await store.query(store.session, "t.0")).expires_at != clock.now + 30.0:
                assert (await store.query(store.session, "t.0")).state == "leased"
                await asyncio.sleep(0.001)
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])
        store.close()


async def failed(store: Unreachable, more: int) -> None:
    """Wait until the store failed so many more times."""
    enough = store.num_failed + more
    while store.num_failed < enough:
        await asyncio.sleep(0.001)


async def test_the_end_of_a_task_wakes_the_sender_of_callbacks_only_where_one_is_due(service: RolloutService):
    url = "https://receiver.test/ended"
    for task_id, fields, is_woken in (("quiet", {}, False), ("told", {"callback_url": url}, True)):
        with service.notifier.listen(CALLBACKS) as sender, service.notifier.listen(task_topic(task_id)) as caller:
            await service.submit([request(task_id, num_samples=1, **fields)])
            await service.cancel_task(task_id)
            assert await caller.wait(20.0)
            assert await sender.wait(0.0) == is_woken, task_id


async def test_results_that_wait_for_the_database_keep_nobody_else_waiting(service: RolloutService):
    """More of them than any pool of threads has: submissions are checked, and results read, in threads too."""
    await service.submit([request(num_samples=100)])
    leases = await service.lease("n1", NODE_URL, 100, 0.0)
    go_on, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait()

    holding = asyncio.create_task(service.store.run(hold))
    await asyncio.to_thread(begun.wait)
    data = [(lease.session_id, encode_msgpack(result(lease))) for lease in leases]
    reports = [asyncio.create_task(service.report(*one)) for one in data]
    await asyncio.sleep(0.2)
    try:
        async with asyncio.timeout(5.0):
            await asyncio.to_thread(int)
    finally:
        go_on.set()
        await asyncio.gather(holding, *reports)
