"""How many nodes a cluster has, by what there is to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import ServerUnavailable
from gangline.domain.views import NodeView, ServiceStatus
from gangline.interop.ray.nodes import RayNode
from gangline.interop.ray.sizes import Bounds, ByDemand, Load


def bounds(least: int = 0, most: int = 10) -> Bounds:
    return Bounds(least=least, most=most, run_slots=16, shrink_after_s=30, drain_timeout_s=3600)


Held = Sequence[int | None]


@pytest.mark.parametrize(
    ("queued", "held", "added"),
    [
        (0, [], 0),
        (1, [], 1),
        (200, [], 10),
        (33, [], 3),
        (33, [None], 2),
        (33, [None, None, None], 0),
        (5, [28, 28], 1),
        (0, [28, 28], 0),
        (16, [28, None], 0),
    ],
    ids=str,
)
def test_nodes_are_added_for_sessions_that_are_queued_and_have_none_coming(queued: int, held: Held, added: int) -> None:
    assert Load(queued=queued, held=held).to_add(bounds()) == added


@pytest.mark.parametrize(
    ("queued", "held", "drained"),
    [
        (0, [], 0),
        (0, [0], 1),
        (0, [16, 16], 0),
        (0, [5, 5, 5, 5], 2),
        (0, [28, 28, 0, None], 2),
        (1, [28, 28, 0, None], 0),
        (60, [5, 5, 0, 0], 0),
        (10, [5, 5, 0, 0], 2),
    ],
    ids=str,
)
def test_nodes_are_drained_that_all_sessions_do_not_need(queued: int, held: Held, drained: int) -> None:
    assert Load(queued=queued, held=held).to_drain(bounds()) == drained


def test_no_load_leads_out_of_the_bounds_or_to_both_at_once() -> None:
    for least, queued, num, each in product((0, 1, 3), (0, 1, 17, 500), range(11), (None, 0, 1, 16, 28)):
        load, limits = Load(queued=queued, held=[each] * num), bounds(least, 10)
        added, drained = load.to_add(limits), load.to_drain(limits)
        assert not (added and drained), load
        assert num + added <= 10
        assert num - drained >= min(least, num)
        assert num + added >= least


class Service:
    """A server and a cluster, played: each node answers at once."""

    def __init__(self, limits: Bounds) -> None:
        self.all: list[Any] = []
        self.sessions: dict[int, int] = {}
        self.queued = 0
        self.asked: list[str] = []
        self.is_down = False
        self.size = ByDemand(limits, ask=self.status, drain=self.drain)

    def add(self) -> None:
        node: Any = RayNode(len(self.all) + 1, None)
        node.actor = Actor(node.index)
        self.all.append(node)

    async def look(self) -> None:
        await self.size.look(self)  # pyright: ignore[reportArgumentType]

    async def drain(self, url: str) -> None:
        self.asked.append(url)
        if self.is_down:
            raise ServerUnavailable("it restarts")

    async def status(self) -> ServiceStatus:
        if self.is_down:
            raise ServerUnavailable("it is down")
        held = {index: self.sessions.get(index, 0) for index in range(1, len(self.all) + 1)}
        views = [
            NodeView(
                node_id=f"n-{index}",
                url=f"http://n-{index}",
                capacity=28,
                draining=f"http://n-{index}" in self.asked,
                num_sessions=num,
                first_seen_at=0,
                last_seen_at=0,
                age_s=0,
            )
            for index, num in held.items()
        ]
        demand = self.queued + sum(view.num_sessions for view in views if not view.draining)
        return ServiceStatus(
            version="", at=0, tasks={}, sessions={}, stages={}, oldest_queued_s=None, callbacks={}, nodes=tuple(views),
            demand=demand,
        )  # fmt: skip


class Actor:
    was_ready = True

    def __init__(self, index: int) -> None:
        self._index = index

    async def url(self, _wait_s: float) -> str:
        return f"http://n-{self._index}"


async def test_the_nodes_with_the_least_to_do_are_drained_once_asked_each() -> None:
    service = Service(msgspec.structs.replace(bounds(), shrink_after_s=0))
    service.queued = 64
    await service.look()
    assert len(service.all) == 4
    service.queued, service.sessions = 0, {1: 16, 2: 3, 3: 9, 4: 1}
    await service.look()
    await service.look()
    assert [node.index for node in service.all if node.is_draining] == [2, 4]
    assert sorted(service.asked) == ["http://n-2", "http://n-4"]
    assert not any(node.is_let_go.is_set() for node in service.all)


async def test_nodes_stay_while_there_was_a_need_for_them_lately() -> None:
    service = Service(bounds())
    service.queued = 64
    await service.look()
    service.queued = 0
    await service.look()
    assert service.asked == []


async def test_a_drain_ends_at_its_time_whatever_runs() -> None:
    service = Service(msgspec.structs.replace(bounds(), shrink_after_s=0, drain_timeout_s=-1))
    service.queued = 32
    await service.look()
    service.queued, service.sessions = 0, {1: 9, 2: 2}
    await service.look()
    assert [node.index for node in service.all if node.is_let_go.is_set()] == [2]


async def test_while_the_server_says_nothing_the_number_stays() -> None:
    service = Service(bounds())
    service.queued = 64
    await service.look()
    service.is_down = True
    await service.look()
    assert len(service.all) == 4
    assert service.asked == []
