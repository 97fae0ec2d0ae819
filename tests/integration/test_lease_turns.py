"""Many waiting nodes: new work wakes them all, and the database hears of few."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.image_names import packed
from gangline.domain.placement import Offer
from gangline.domain.session import Heartbeat, Lease
from gangline.server.run import serving
from gangline.server.service.core import HeartbeatRate
from gangline.server.service.notifier import LeaseTurns
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.node.attempt import lease_of
from support.service.running import NODE_URL, FakeNode, any_plugin, request

NUM_NODES = 60

Poll = asyncio.Task[list[Lease]]


def offered(node_id: str, *runtimes: str, **more: Any) -> Heartbeat:
    return Heartbeat(node_id=node_id, url=NODE_URL, sessions={}, capacity=8, offer=Offer(runtimes=runtimes, **more))


Tries = Counter[str]
"""Node -> tries to lease."""


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Tries:
    found: Tries = Counter()
    lease = TaskStore.lease

    def counted(store: TaskStore, node_id: str, *given: Any) -> list[Lease]:
        found[node_id] += 1
        return lease(store, node_id, *given)

    monkeypatch.setattr(TaskStore, "lease", counted)
    return found


async def waiting(client: ServerClient, tries: Tries, *names: str, wait_s: float = 60.0) -> list[Poll]:
    """Nodes in their long polls, each after its first try."""
    polls = [asyncio.create_task(FakeNode(client, name).lease(wait_s=60.0)) for name in names]
    async with asyncio.timeout(30):
        while not all(tries[name] for name in names):
            await asyncio.sleep(0.01)
    return polls


async def ended(polls: list[Poll]) -> None:
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)


class Turns:
    """Nodes that ask for work at once, as after an announcement, and a store that has some sessions."""

    def __init__(self, num_sessions: int) -> None:
        self.turns = LeaseTurns()
        self.num_sessions = num_sessions
        self.tried: list[str] = []

    async def _take(self, node_id: str) -> list[Lease]:
        self.tried.append(node_id)
        await asyncio.sleep(0)  # the store is asked in a thread: others come to their turns meanwhile
        self.num_sessions -= 1
        return [] if self.num_sessions < 0 else [lease_of(f"s{self.num_sessions}")]

    async def all_ask(self, names: Sequence[str], num_announced: int) -> list[list[Lease]]:
        return await asyncio.gather(
            *(self.turns.taken(name, None, num_announced, partial(self._take, name)) for name in names)
        )


async def test_of_nodes_that_are_alike_as_many_try_as_there_is_work_and_one_more() -> None:
    nodes = Turns(num_sessions=3)
    names = [f"n{number}" for number in range(NUM_NODES)]
    for name in names:
        nodes.turns.heard(offered(name, "sandbox"))
    taken = await nodes.all_ask(names, num_announced=1)
    assert sum(map(len, taken)) == 3
    assert nodes.tried == names[:4]
    nodes.num_sessions = 1
    assert sum(map(len, await nodes.all_ask(names, num_announced=2))) == 1
    assert len(nodes.tried) == 4 + 2


async def test_a_node_unlike_those_that_found_nothing_tries() -> None:
    nodes = Turns(num_sessions=0)
    for name, runtime in (("s1", "sandbox"), ("s2", "sandbox"), ("d1", "docker")):
        nodes.turns.heard(offered(name, runtime))
    await nodes.all_ask(("s1", "s2", "d1", "unheard"), num_announced=1)
    assert nodes.tried == ["s1", "d1", "unheard"]


async def test_new_work_wakes_nodes_that_wait(tries: Tries, tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(NUM_NODES)]
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url, None) as client,
    ):
        for name in names:
            await client.heartbeat(offered(name, "sandbox"))
        polls = await waiting(client, tries, *names)
        await client.submit(request("t", num_samples=1, runtime={"backend": "sandbox"}))
        done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        (leases,) = [poll.result() for poll in done]
        await client.submit(request("u", num_samples=2 * 8, runtime={"backend": "sandbox"}))
        polls = [poll for poll in polls if poll not in done]
        while sum(poll.done() for poll in polls) < 2:
            await asyncio.wait(
                [poll for poll in polls if not poll.done()], return_when=asyncio.FIRST_COMPLETED, timeout=30
            )
        await ended(polls)
    assert [lease.task_id for lease in leases] == ["t"]


async def test_nodes_that_can_run_other_things_try_too(tries: Tries, tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url, None) as client,
    ):
        for name in ("s1", "s2", "s3"):
            await client.heartbeat(offered(name, "sandbox"))
        await client.heartbeat(offered("d1", "docker"))
        polls = await waiting(client, tries, "s1", "s2", "s3", "d1")
        await client.submit(request("t", num_samples=1, runtime={"backend": "docker", "image": "debian"}))
        async with asyncio.timeout(30):
            (lease,) = await polls[-1]
        await ended(polls)
    assert lease.task_id == "t"


DIFFERENT: list[dict[str, Any]] = [
    {"labels": ("big",)},
    {"images": {"sandbox": {"/images": packed(["b"])}}},
    {"gpus": {"sandbox": 1}},
]


@pytest.mark.parametrize("more", DIFFERENT, ids=["labels", "images", "gpus"])
async def test_nodes_with_the_same_runtimes_that_differ_otherwise_try_too(
    tries: Tries, tmp_path: Path, more: dict[str, Any]
) -> None:
    wanted: dict[str, Any] = {"backend": "sandbox", "node_labels": more.get("labels", ())}
    wanted |= {"image": "/images/b"} if "images" in more else {}
    wanted |= {"gpus": 1} if "gpus" in more else {}
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url, None) as client,
    ):
        without = {"images": {"sandbox": {"/images": packed(["a"])}}}
        for name in ("s1", "s2", "s3"):
            await client.heartbeat(offered(name, "sandbox", **without))
        await client.heartbeat(offered("other", "sandbox", **more))
        polls = await waiting(client, tries, "s1", "s2", "s3", "other")
        await client.submit(request("t", num_samples=1, runtime=wanted))
        async with asyncio.timeout(30):
            (lease,) = await polls[-1]
        await ended(polls)
    assert lease.task_id == "t"


async def test_a_gpu_that_becomes_free_is_given_to_the_next_session_at_once(tries: Tries, tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url, None) as client,
    ):
        await client.heartbeat(offered("g1", "docker", gpus={"docker": 1}))
        await client.submit(request("t", num_samples=2, runtime={"backend": "docker", "image": "x", "gpus": 1}))
        node = FakeNode(client, "g1")
        (first,) = await node.lease()
        tries.clear()
        polls = await waiting(client, tries, "g1")
        await node.finish([first])
        async with asyncio.timeout(30):
            (second,) = await polls[0]
    assert (first.session_id, second.session_id) == ("t.0", "t.1")


async def test_all_work_finds_its_nodes_whatever_the_order(tries: Tries, tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(20)]
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url, None) as client,
    ):
        for name in names:
            await client.heartbeat(offered(name, "sandbox"))
        polls = await waiting(client, tries, *names)
        for number in range(20):
            await client.submit(request(f"t{number}", num_samples=8, runtime={"backend": "sandbox"}))
        async with asyncio.timeout(60):
            leases = await asyncio.gather(*polls)
    held = [lease.session_id for taken in leases for lease in taken]
    assert all(leases)
    assert len(held) == len(set(held))


def test_many_nodes_are_asked_for_fewer_heartbeats() -> None:
    now = 0.0
    rate = HeartbeatRate(lambda: now)
    assert max(rate.every_s(f"n{number}", 30.0) for number in range(100)) == 1.0
    assert max(rate.every_s(f"n{number}", 30.0) for number in range(500)) == 5.0
    assert max(rate.every_s(f"n{number}", 30.0) for number in range(2_000)) == 10.0  # a third of the lease
    now += 31.0
    assert rate.every_s("n1", 30.0) == 10.0  # those before still count
    now += 31.0
    assert rate.every_s("n1", 30.0) < 0.1
