"""What a server keeps and where: results at a URL and by reference, lists of sessions, tasks forgotten in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import aiohttp
import msgspec
import pytest

from gangline.domain.errors import Conflict, InvalidRequest, NotFound
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.server.run import Storage, serving
from gangline.server.service.core import RolloutService
from gangline.server.service.housekeeping import Housekeeper
from gangline.store.journal.turns import TurnStore
from gangline.store.results.artifacts import ArtifactResults
from gangline.store.results.files import Results, ResultStore
from gangline.store.sql.retention import Keep
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.service.running import NODE_URL, FakeNode, any_plugin, beat, request, result


def lease_of(store: TaskStore, name: str = "t"):
    store.submit([request(name, num_samples=1)])
    return store.lease("n1", NODE_URL, 1)[0]


@pytest.fixture(params=["files", "file://", "memory://"])
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Results:
    if request.param == "files":
        return ResultStore(tmp_path / "results")
    return ArtifactResults(f"{request.param}{tmp_path}/results")


def test_a_result_is_what_was_stored_wherever_it_is_stored(results: Results, tmp_path: Path):
    with TaskStore(tmp_path / "gangline.db") as store:
        lease = lease_of(store)
    results.prepare()
    told = result(lease, artifacts={"log": b"hello"})
    staged = results.stage(told)
    staged.keep()
    staged.keep()
    staged.discard()
    assert results.read("t", "t.0", 1) == told
    url, num_bytes = results.locate("t", "t.0", 1)
    assert url.startswith(("file://", "memory://"))
    assert num_bytes == len(results.read_bytes("t", "t.0", 1))
    for read in (results.read, results.locate):
        with pytest.raises(NotFound):
            read("t", "t.0", 2)
        with pytest.raises(InvalidRequest):
            read("../t", "t.0", 1)
    results.remove("t")
    results.remove("t")
    with pytest.raises(NotFound):
        results.read("t", "t.0", 1)


def test_a_late_report_does_not_overwrite_the_result_that_counts(tmp_path: Path):
    results = ArtifactResults(f"memory://{tmp_path}")
    with TaskStore(tmp_path / "gangline.db") as store:
        late = lease_of(store)
        store.release("n1", late.session_id, late.fence)
        (live,) = store.lease("n1", NODE_URL, 1)
    results.stage(result(live, reward=1.0)).keep()
    results.stage(result(late, reward=0.0)).discard()
    assert results.read("t", "t.0", 1).reward == 1.0


def test_a_url_that_nothing_opens_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="nowhere"):
        ArtifactResults("nowhere://bucket/results")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def service(tmp_path: Path, clock: Clock) -> AsyncIterator[RolloutService]:
    store = TaskStore(tmp_path / "gangline.db", clock=clock)
    service = RolloutService(
        store, ResultStore(tmp_path / "results"), turns=TurnStore(tmp_path / "turns"), check_task=any_plugin
    )
    await service.start()
    yield service
    service.stop()
    service.close()
    store.close()


async def nodes_of(service: RolloutService) -> set[str]:
    return {node.node_id for node in (await service.store.query(service.store.status)).nodes}


async def test_tidying_removes_results_and_rows_of_what_is_old_and_nothing_else(
    service: RolloutService, clock: Clock, tmp_path: Path
):
    for index in range(120):
        await service.submit([request(f"t{index}", num_samples=1)])
        (lease,) = await service.lease("n1", NODE_URL, 1, 0.0)
        await service.report(lease.session_id, encode_msgpack(result(lease)))
        clock.now += 1.0
    await service.submit([request("open")])
    keeper = Housekeeper(service, Keep(for_s=10.5), clock=clock)
    assert await keeper.tidy() == 110
    assert await keeper.tidy() == 0
    assert {path.name for path in (tmp_path / "results").glob("t*")} == {f"t{index}" for index in range(110, 120)}
    assert (await service.store.query(service.store.status)).tasks == {"ended": 10, "queued": 1}


async def test_a_node_that_is_silent_for_a_day_is_forgotten_unless_it_holds_a_session(
    service: RolloutService, clock: Clock
):
    keeper = Housekeeper(service, Keep(), clock=clock)
    await service.submit([request("t", num_samples=1)])
    for name in ("gone", "holds", "there"):
        await service.lease(name, NODE_URL, 1 if name == "holds" else 0, 0.0)
    clock.now += 86_000.0
    await service.lease("there", NODE_URL, 0, 0.0)
    assert await nodes_of(service) == {"gone", "holds", "there"}
    clock.now += 1_000.0
    await keeper.tidy()
    assert await nodes_of(service) == {"holds", "there"}
    await service.lease("gone", NODE_URL, 0, 0.0)
    assert await nodes_of(service) == {"gone", "holds", "there"}, "it may come back"


async def test_a_silent_node_is_listed_without_what_it_told_of_then(service: RolloutService, clock: Clock):
    told = beat([])
    engine = {"url": "http://engine", "state": "healthy"}
    told = msgspec.structs.replace(told, backends=(engine,), metrics={"breaker_open_disk": 1.0, "takes_bytes_t.0": 5.0})
    await service.heartbeat(told)
    clock.now += 29.0
    (node,) = (await service.status()).nodes
    assert (node.backends, node.metrics) == (told.backends, told.metrics)
    clock.now += 2.0
    (node,) = (await service.status()).nodes
    assert (node.node_id, node.capacity, node.backends, node.metrics) == ("n1", 8, (), {})
    assert b"gangline_engine_up{" not in service.metrics.exposition(await service.status())
    await service.heartbeat(told)
    assert (await service.status()).nodes[0].backends == told.backends


async def test_bytes_are_counted_as_they_are_stored(service: RolloutService, tmp_path: Path):
    await service.submit([request("t", num_samples=1)])
    (lease,) = await service.lease("n1", NODE_URL, 1, 0.0)
    await service.report("t.0", encode_msgpack(result(lease, artifacts={"log": b"x" * 5000})))
    size = (tmp_path / "results" / "t" / "t.0" / "attempt-1.msgpack").stat().st_size
    assert (await service.task("t")).result_bytes == size > 5000
    assert await Housekeeper(service, Keep(max_bytes=size)).tidy() == 0
    assert await Housekeeper(service, Keep(max_bytes=size - 1)).tidy() == 1


async def test_large_results_can_be_fetched_where_they_lie(tmp_path: Path):
    storage = Storage(results_url=f"file://{tmp_path}/elsewhere")
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin, storage=storage) as running,
        ServerClient(running.url) as client,
    ):
        await client.submit(request())
        node = FakeNode(client)
        leases = await node.lease()
        with pytest.raises(Conflict):
            await client.references("t")
        await node.finish(leases[:1], artifacts={"log": b"x" * 100})
        await client.cancel_session("t.1")
        first, second = await client.references("t")
        assert (first.outcome, first.reward, second.outcome, second.url) == ("completed", 1.0, "cancelled", None)
        assert first.url is not None
        data = Path(first.url.removeprefix("file://")).read_bytes()
        assert len(data) == first.num_bytes
        assert decode_msgpack(data, SessionResult).artifacts == {"log": b"x" * 100}
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{running.url}/v1/sessions/t.0/reference") as answer:
                assert (await answer.json())["url"] == first.url
            async with http.get(f"{running.url}/v1/sessions/t.0/reference?attempt=7") as answer:
                assert answer.status == 404
    assert not (tmp_path / "server" / "results").exists()


async def test_sessions_are_listed_page_by_page_and_by_what_they_are(tmp_path: Path):
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url) as client,
    ):
        await client.submit(request("a", num_samples=3, submitter="ann"))
        await client.submit(request("b", num_samples=1))
        await FakeNode(client).finish(await FakeNode(client).lease(1))
        page = await client.sessions(limit=3)
        rest = await client.sessions(limit=3, before=page.next)
        assert [one.session_id for one in (*page.sessions, *rest.sessions)] == ["b.0", "a.2", "a.1", "a.0"]
        ended = await client.sessions(state="ended", outcome="completed", node_id="n1", submitter="ann")
        assert [one.session_id for one in ended.sessions] == ["a.0"]
        assert [task.task_id for task in (await client.tasks(submitter="")).tasks] == ["b"]
        assert (await client.status()).queued == {"ann": 2, "": 1}
        for query in ("state=gone", "outcome=fine", "node_id=../x", "submitter=a%20b"):
            async with aiohttp.ClientSession() as http, http.get(f"{running.url}/v1/sessions?{query}") as answer:
                assert answer.status == 400


async def test_without_any_retention_silent_nodes_are_forgotten_and_tasks_are_kept(tmp_path: Path):
    long_ago = Clock()
    long_ago.now = time.time() - 40 * 86_400
    (tmp_path / "server").mkdir()
    with TaskStore(tmp_path / "server" / "gangline.db", clock=long_ago) as store:
        store.lease("gone", NODE_URL, 1)
        store.submit([request("kept")])
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url) as client,
        asyncio.timeout(30),
    ):
        while "gone" in {node.node_id for node in (await client.status()).nodes}:
            await asyncio.sleep(0.02)
        assert [task.task_id for task in (await client.tasks()).tasks] == ["kept"]
        async with aclosing(client.events(after=0)) as events:
            async for event in events:
                assert event.kind == "task.submitted", "the node's event is older than a month"
                break
