"""How many nodes a cluster has: a fixed number, one on each machine, or as many as the sessions ask for.

Machines are Ray's: its autoscaler starts one for an actor that has no room, and ends one on which nothing has run for
its idle time. So a node that is wanted is an actor, and one that is not is drained first and then ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from gangline.domain.errors import GanglineError
from gangline.domain.views import NodeView, ServiceStatus
from gangline.interop.ray.nodes import RayNode, RayNodes
from gangline.interop.ray.ray import Needs, fitting, machines

_log = logging.getLogger("gangline.interop.ray")

_ANSWERS_WITHIN_S = 1.0


class Fixed:
    """This many, wherever Ray has room."""

    def __init__(self, num_nodes: int) -> None:
        self.least = num_nodes
        self._missing = num_nodes

    async def look(self, nodes: RayNodes) -> None:
        while self._missing:
            self._missing -= 1
            nodes.add()


class EachMachine:
    """One on each machine that has enough, from when it joins until it leaves."""

    least = 1

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._known: set[str] = set()

    async def look(self, nodes: RayNodes) -> None:
        found = {one.ray_id: one for one in fitting(self._needs, await asyncio.to_thread(machines))}
        for node in nodes.all:
            if node.machine is not None and node.machine.ray_id not in found:
                node.let_go()
        for ray_id, machine in found.items():
            if ray_id not in self._known:
                nodes.add(machine)
        self._known = set(found)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's settings of a fleet that follows the sessions."""

    least: int
    most: int
    """Counts nodes that take sessions; draining ones come on top."""
    run_slots: int
    """Agents that a node runs at once."""
    shrink_after_s: float
    drain_timeout_s: float


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The work, and the nodes that have it."""

    queued: int
    """Sessions that wait for a node."""
    held: Sequence[int | None]
    """Sessions that each node has which takes more; None: it starts."""

    def wanted(self, bounds: Bounds) -> int:
        """Enough for all sessions to run at once."""
        num = math.ceil((self.queued + sum(one or 0 for one in self.held)) / bounds.run_slots)
        return min(max(num, bounds.least), bounds.most)

    def to_add(self, bounds: Bounds) -> int:
        """A session does not move: a new node helps queued ones only, and a starting node takes them first."""
        helped = math.ceil(self.queued / bounds.run_slots) - self.held.count(None)
        return max(min(self.wanted(bounds) - len(self.held), helped), bounds.least - len(self.held), 0)

    def to_drain(self, bounds: Bounds) -> int:
        """Without a queue also empty nodes, even while others hold more than they can run at once."""
        idle = 0 if self.queued else sum(not one for one in self.held)
        surplus = max(len(self.held) - self.wanted(bounds), idle)
        return max(min(surplus, len(self.held) - bounds.least), 0)


class ByDemand:
    """As many as the queued and running sessions ask for, between two bounds."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        ask: Callable[[], Awaitable[ServiceStatus]],
        drain: Callable[[str], Awaitable[object]],
    ) -> None:
        """ask: the server's status. drain: asks the node at a URL to take no more sessions. Raising GanglineError."""
        self.least = bounds.least
        self._bounds = bounds
        self._ask = ask
        self._drain = drain
        self._needed = deque[tuple[float, int]]()
        """How many were needed at each look of the last `shrink_after_s`."""
        self._give_up_at: dict[RayNode, float] = {}
        self._is_silent = False

    async def look(self, nodes: RayNodes) -> None:
        urls = await _urls(nodes.all)
        try:
            status = await self._ask()
        except GanglineError as error:
            if not self._is_silent:
                _log.warning("cluster.unknown_demand message=%s: the number of nodes stays", error.message)
            self._is_silent = True
            return
        self._is_silent = False
        views = {view.url: view for view in status.nodes}
        held = _held(nodes.all, urls, views)
        queued = status.demand - sum(view.num_sessions for view in status.nodes if not view.draining)
        load = Load(queued=queued, held=list(held.values()))
        bounds = _fitted(self._bounds, [views[url] for url in urls.values() if url in views])
        for _ in range(added := load.to_add(bounds)):
            nodes.add()
        needed = self._needed_lately(len(held) + added - load.to_drain(bounds))
        self._shrink(held, max(len(held) - needed, 0))
        self._end_drains(nodes.all)
        await self._ask_to_drain({url for node in self._give_up_at if (url := urls.get(node))}, views)

    def _needed_lately(self, num: int) -> int:
        """The most nodes that were needed in the last `shrink_after_s`, with `num` now."""
        now = asyncio.get_running_loop().time()
        self._needed.append((now, num))
        while now - self._needed[0][0] > self._bounds.shrink_after_s:
            self._needed.popleft()
        return max(num for _, num in self._needed)

    def _shrink(self, held: Mapping[RayNode, int | None], num: int) -> None:
        """Drain the nodes with the least to do."""
        for node in sorted(held, key=lambda node: (held[node] or 0, -node.index))[:num]:
            _log.info("cluster.shrinks index=%d sessions=%d", node.index, held[node] or 0)
            node.drain()
            self._give_up_at[node] = asyncio.get_running_loop().time() + self._bounds.drain_timeout_s

    def _end_drains(self, nodes: Sequence[RayNode]) -> None:
        self._give_up_at = {node: when for node, when in self._give_up_at.items() if node in nodes}
        for node, when in self._give_up_at.items():
            if asyncio.get_running_loop().time() > when and not node.is_let_go.is_set():
                _log.warning("cluster.drain_timed_out index=%d: its sessions go back to the queue", node.index)
                node.let_go()

    async def _ask_to_drain(self, urls: Collection[str], views: Mapping[str, NodeView]) -> None:
        """Asked until the server hears of it: a node that its actor has started again knows nothing of it."""
        asked = [url for url in urls if not (url in views and views[url].draining)]
        for url, answer in zip(
            asked, await asyncio.gather(*map(self._drain, asked), return_exceptions=True), strict=True
        ):
            if isinstance(answer, GanglineError):
                _log.info("cluster.drain_unheard url=%s message=%s", url, answer.message)
            elif isinstance(answer, BaseException):
                raise answer


async def _urls(nodes: Sequence[RayNode]) -> dict[RayNode, str | None]:
    """An actor that Ray has placed anew has another one."""
    return dict(zip(nodes, await asyncio.gather(*(node.url(_ANSWERS_WITHIN_S) for node in nodes)), strict=True))


def _held(
    nodes: Sequence[RayNode], urls: Mapping[RayNode, str | None], views: Mapping[str, NodeView]
) -> dict[RayNode, int | None]:
    """Sessions of each node that takes more, including external ones; None: the server has not heard it."""
    found: dict[RayNode, int | None] = {}
    for node in nodes:
        view = views.get(urls.get(node) or "")
        if not (node.is_draining or (view is not None and view.draining)):
            found[node] = None if view is None else view.num_sessions + int(view.metrics.get("external_sessions", 0))
    return found


def _fitted(bounds: Bounds, views: Sequence[NodeView]) -> Bounds:
    """A node with too few open files runs fewer agents than it was told."""
    slots = [int(view.metrics["run_slots"]) for view in views if view.metrics.get("run_slots")]
    return msgspec.structs.replace(bounds, run_slots=min([bounds.run_slots, *slots]))
