"""Several servers over one PostgreSQL: nothing is given out twice, no event is missed, waiters hear of all work."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gangline.domain.errors import StoreError
from gangline.server.run import Storage, serving
from gangline.store.sql.reader import TaskReader
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.service.running import NODE_URL, FakeNode, any_plugin, beat, request, result
from support.store.postgres import Cluster, running_cluster

NUM_SERVERS = 4


@contextmanager
def stores(url: str) -> Iterator[list[TaskStore]]:
    with ExitStack() as stack:
        yield [stack.enter_context(TaskStore(url)) for _ in range(NUM_SERVERS)]


def at_once(jobs: list[Callable[[], object]]) -> None:
    """All begin together. Raises what the first that failed raised."""
    ready = threading.Barrier(len(jobs))

    def begin(job: Callable[[], object]) -> object:
        ready.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(begin, job) for job in jobs]:
            done.result()


def test_servers_that_start_on_an_empty_database_at_once_all_find_it_whole(postgres: Cluster):
    url = postgres.new_database()
    at_once([lambda: TaskStore(url).close() for _ in range(NUM_SERVERS)])
    with TaskReader(url) as reader:
        assert reader.status().tasks == {}


def test_no_session_is_leased_twice_and_none_is_left(postgres: Cluster):
    taken: list[str] = []

    def work(store: TaskStore, node_id: str) -> None:
        while leases := store.lease(node_id, NODE_URL, 5):
            taken.extend(lease.session_id for lease in leases)
            store.heartbeat(beat(leases, node_id))
            for lease in leases:
                store.report(result(lease, node_id), lambda: None)

    with stores(postgres.new_database()) as opened:
        opened[0].submit([request(f"t{index}", num_samples=4) for index in range(60)])
        at_once([lambda store=store, n=n: work(store, f"n{n}") for n, store in enumerate(opened)])
        assert Counter(taken) == Counter(f"t{index}.{sample}" for index in range(60) for sample in range(4))
        assert opened[0].status().tasks == {"ended": 60}
        events = opened[0].events(limit=10**6)
    assert set(Counter(event.session_id for event in events if event.kind == "session.ended").values()) == {1}
    assert Counter(event.kind for event in events)["task.ended"] == 60


def test_the_same_batch_sent_to_all_servers_at_once_is_accepted_once(postgres: Cluster):
    batch = [request(f"t{index}", num_samples=1, priority=index % 3) for index in range(50)]
    created: list[bool] = []
    with stores(postgres.new_database()) as opened:
        at_once([lambda s=s: created.extend(answer.created for answer in s.submit(batch)) for s in opened])
        assert (len(created), sum(created)) == (NUM_SERVERS * 50, 50)
        assert opened[0].status().sessions == {"queued": 50}


def test_who_follows_events_by_number_misses_none_of_those_that_several_servers_write(postgres: Cluster):
    url = postgres.new_database()
    seen: list[int] = []
    done = threading.Event()

    def write(store: TaskStore, name: str) -> None:
        for index in range(60):
            store.submit([request(f"{name}-{index}", num_samples=1)])

    def follow() -> None:
        with TaskReader(url) as reader:
            while True:
                last_look = done.is_set()
                seen.extend(event.seq for event in reader.events(after=seen[-1] if seen else 0))
                if last_look:
                    return

    with stores(url) as opened:
        follower = threading.Thread(target=follow)
        follower.start()
        try:
            at_once([lambda store=store, n=n: write(store, f"s{n}") for n, store in enumerate(opened)])
        finally:
            done.set()
            follower.join()
        everything = [event.seq for event in opened[0].events(limit=10**6)]
    assert seen == everything
    assert len(everything) == NUM_SERVERS * 60


@asynccontextmanager
async def two_servers(url: str, folder: Path, results_url: str) -> AsyncIterator[list[ServerClient]]:
    storage = Storage(database_url=url, results_url=results_url)
    async with (
        serving(data_dir=folder / "a", control_token=None, check_task=any_plugin, storage=storage) as first,
        serving(data_dir=folder / "b", control_token=None, check_task=any_plugin, storage=storage) as second,
        ServerClient(first.url) as a,
        ServerClient(second.url) as b,
    ):
        yield [a, b]


@pytest.mark.parametrize("scheme", ["", "file://"])
async def test_whoever_waits_at_one_server_hears_what_comes_through_the_other(
    postgres: Cluster, tmp_path: Path, scheme: str
):
    url = postgres.new_database()
    async with two_servers(url, tmp_path, f"{scheme}{tmp_path}/results") as (a, b):
        node = FakeNode(b)
        leasing = asyncio.create_task(node.lease(wait_s=60.0))
        await until(lambda: has_node(b))
        await a.submit(request())
        leases = await asyncio.wait_for(leasing, 30)
        assert len(leases) == 2
        waiting = asyncio.create_task(a.wait("t", timeout_s=60.0))
        await node.finish(leases, artifacts={"log": b"hello"})
        assert (await asyncio.wait_for(waiting, 30)).rewards == (1.0, 1.0)
        assert [found.artifacts for found in await a.result("t")] == [{"log": b"hello"}] * 2


async def test_each_callback_is_sent_by_one_of_the_servers(postgres: Cluster, tmp_path: Path):
    received: Counter[str] = Counter()
    app = web.Application()

    async def take(call: web.Request) -> web.Response:
        received[json.loads(await call.read())["task_id"]] += 1
        return web.Response(status=204)

    app.router.add_post("/done", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    callback_url = f"http://127.0.0.1:{runner.addresses[0][1]}/done"
    try:
        async with two_servers(postgres.new_database(), tmp_path, f"{tmp_path}/results") as (a, b):
            await a.submit_many([request(f"t{i}", num_samples=1, callback_url=callback_url) for i in range(20)])
            for node in (FakeNode(a, "n1"), FakeNode(b, "n2")):
                await node.finish(await node.lease(10))
            await until(lambda: all_delivered(b, 20))
        assert received == {f"t{index}": 1 for index in range(20)}
    finally:
        await runner.cleanup()


async def test_a_database_that_was_away_for_a_while_is_used_again_and_has_forgotten_nothing(tmp_path: Path):
    with running_cluster() as cluster:
        storage = Storage(database_url=cluster.new_database())
        async with (
            serving(
                data_dir=tmp_path, control_token=None, check_task=any_plugin, sweep_every_s=0.05, storage=storage
            ) as running,
            ServerClient(running.url) as client,
        ):
            await client.submit(request())
            node = FakeNode(client)
            leases = await node.lease()
            waiting = asyncio.create_task(client.wait("t", timeout_s=60.0))
            following = asyncio.create_task(kinds_until_end(client))
            await asyncio.to_thread(cluster.stop)
            for ask in (client.status, node.lease, lambda: node.beat(leases)):
                with pytest.raises(StoreError) as caught:
                    await ask()
                assert caught.value.retryable
            await asyncio.to_thread(cluster.start)
            await until(lambda: answers(client))
            assert (await node.beat(leases)).renewed == ("t.0", "t.1")
            await node.finish(leases)
            assert (await waiting).rewards == (1.0, 1.0)
            assert (await asyncio.wait_for(following, 30)).count("session.ended") == 2


async def kinds_until_end(client: ServerClient) -> list[str]:
    kinds: list[str] = []
    async for event in client.events(after=0, retry_s=0.05):
        kinds.append(event.kind)
        if event.kind == "task.ended":
            break
    return kinds


async def answers(client: ServerClient) -> bool:
    try:
        await client.status()
    except StoreError:
        return False
    return True


async def has_node(client: ServerClient) -> bool:
    return bool((await client.status()).nodes)


async def all_delivered(client: ServerClient, count: int) -> bool:
    return (await client.status()).callbacks == {"delivered": count}


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not await holds():  # type: ignore[misc]
            await asyncio.sleep(0.02)
