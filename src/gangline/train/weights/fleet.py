"""The parties of a weight update: the nodes known to the server, their gates, and their engines.

An engine used by several nodes is one engine here. An engine at a loopback address is on its node's machine and is
called at that machine's name. Engines that a node considers dead are left out: they return without the weights, and
their node detects that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal, Protocol
from urllib.parse import urlsplit

from gangline.domain.errors import EngineRefused, EngineUnavailable, GanglineError, NotAllowed
from gangline.domain.node_views import GateState
from gangline.domain.views import NodeView, ServiceStatus
from gangline.models.engines.weights import EngineWeights, engine_weights
from gangline.settings.machine import read_secret
from gangline.wire.client.node import NodeClient

_log = logging.getLogger("gangline.train")

_DRAIN_POLL_S = 30.0

Mode = Literal["drain", "keep"]
Failed = tuple[str, GanglineError]
"""The party that failed, and its error."""


class Roster(Protocol):
    """The service calls needed for a weight update, implemented for example by `gangline.wire.client.ServerClient`."""

    async def status(self) -> ServiceStatus: ...


@dataclass(eq=False)
class FleetNode:
    node_id: str
    client: NodeClient
    gate: GateState
    """Its state, as last reported."""

    @property
    def name(self) -> str:
        return f"node {self.node_id}"

    @property
    def version(self) -> int | None:
        return self.gate.version

    async def hold(self, mode: Mode, lease_s: float, wait_s: float = 0.0) -> None:
        self.gate = await self.client.hold(mode, lease_s, wait_s)

    async def drain(self, lease_s: float) -> None:
        while not self.gate.is_drained:
            await self.hold("drain", lease_s, wait_s=min(_DRAIN_POLL_S, lease_s / 3))


@dataclass(frozen=True)
class Place:
    """An engine as registered at a node."""

    node: FleetNode
    url: str
    """The engine's URL at the node."""
    is_known: bool
    """Whether the node knows that the engine has the weights of its gate's version."""


@dataclass(eq=False)
class FleetEngine:
    url: str
    weights: EngineWeights
    places: list[Place] = field(default_factory=list["Place"])
    """One for each node that uses it."""
    has: Literal["old", "loading", "new"] = "old"
    """State of its weights in this update; stays `loading` after a failed load."""

    @property
    def is_known(self) -> bool:
        """Whether all its nodes know that it has the weights of their gates' version, which is the same for all."""
        return all(place.is_known for place in self.places) and len({place.node.version for place in self.places}) == 1

    async def load(self, folder: str, version: int) -> None:
        """Raises: EngineError."""
        self.has = "loading"
        try:
            await self.weights.load(folder, version)
        except EngineRefused:
            self.has = "old"
            raise
        self.has = "new"

    async def version(self) -> int | None:
        """Policy version of its weights; None if unknown. Raises: EngineError."""
        reported = await self.weights.version()
        if reported is None and self.is_known:
            return self.places[0].node.version
        return reported if isinstance(reported, int) else None


@dataclass
class Fleet:
    nodes: list[FleetNode]
    engines: list[FleetEngine]

    # These methods return the failures; the other calls succeeded.

    async def close_gates(self, mode: Mode, lease_s: float) -> list[Failed]:
        return await _failures((node.name, node.hold(mode, lease_s)) for node in self.nodes)

    async def drain(self, lease_s: float) -> list[Failed]:
        """Wait until no call is in flight at any node."""
        return await _failures((node.name, node.drain(lease_s)) for node in self.nodes)

    async def renew_leases(self, mode: Mode, lease_s: float, done: asyncio.Event) -> None:
        """Runs until `done`. Renewals are never cancelled: a late one would close a gate that was opened."""
        while not done.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), lease_s / 3)
                return
            await asyncio.gather(*(self._renew(node, mode, lease_s) for node in self.nodes))

    async def _renew(self, node: FleetNode, mode: Mode, lease_s: float) -> None:
        num_expired = node.gate.num_expired_leases
        try:
            await node.hold(mode, lease_s)
        except GanglineError as error:
            _log.warning("weights.lease_not_renewed node=%s error=%s", node.node_id, error)
        if node.gate.num_expired_leases > num_expired:
            _log.warning("weights.lease_ran_out node=%s", node.node_id)

    async def load(self, folder: str, version: int) -> list[Failed]:
        """Load into all engines at once, after all are paused."""
        failed = await _failures((engine.url, engine.weights.hold()) for engine in self.engines)
        return failed or await _failures((engine.url, engine.load(folder, version)) for engine in self.engines)

    async def tell_version(self, version: int) -> list[Failed]:
        """Report to each node the known versions of its engines, at any stage of the update."""
        return await _failures((node.name, self._tell(node, version)) for node in self.nodes)

    async def _tell(self, node: FleetNode, version: int) -> None:
        here = [(engine.has, at.url) for engine in self.engines for at in engine.places if at.node is node]
        not_new = [url for has, url in here if has != "new"]
        is_done = all(engine.has == "new" for engine in self.engines)
        if is_done or len(not_new) < len(here):
            await node.client.set_version(version, not_new)
        elif node.version is not None and (broken := [url for has, url in here if has == "loading"]):
            await node.client.set_version(node.version, broken)

    async def open(self) -> list[Failed]:
        """Resume the engines, then open the gates."""
        failed = await _failures((engine.url, engine.weights.let_go()) for engine in self.engines)
        return failed + await _failures((node.name, node.client.resume()) for node in self.nodes)

    async def report(self, phases: Mapping[str, float]) -> None:
        """Send every node the phases of the finished update. Failures are only logged, because the weights are
        loaded.
        """
        for name, error in await _failures((node.name, node.client.report_phases(phases)) for node in self.nodes):
            _log.warning("weights.not_reported party=%s error=%s", name, error)

    def part(self, engines: Iterable[FleetEngine], nodes: Iterable[FleetNode]) -> Fleet:
        """These engines, all of their nodes, and `nodes`."""
        chosen = list(engines)
        wanted = {*nodes, *(place.node for engine in chosen for place in engine.places)}
        return Fleet([node for node in self.nodes if node in wanted], chosen)


def nodes_in(status: ServiceStatus) -> Sequence[NodeView]:
    """Raises: NotAllowed if the caller's token is of a tenant, which sees no nodes."""
    if status.tenant:
        raise NotAllowed(
            f"a token of tenant {status.tenant!r} sees no nodes: engines and weights are those of all tenants. Give "
            "the trainer the control token."
        )
    return status.nodes


@asynccontextmanager
async def open_fleet(roster: Roster, token: str | None, lost_after_s: float) -> AsyncGenerator[Fleet]:
    """lost_after_s: nodes without a heartbeat at the server for this long are left out.

    Raises: ServerUnavailable if server or node do not answer. EngineUnavailable if there is no engine. EngineIncapable
    if an engine cannot load weights. NotAllowed: see `nodes_in`.
    """
    async with AsyncExitStack() as stack:
        heard = [view for view in nodes_in(await roster.status()) if view.age_s <= lost_after_s]
        engines: dict[str, FleetEngine] = {}
        stack.push_async_callback(_close, engines)
        nodes: list[FleetNode] = []
        for view in heard:
            client = await stack.enter_async_context(NodeClient(view.url, token))
            nodes.append(await _node(view, client, engines))
        if not engines:
            raise EngineUnavailable(
                f"no engine to give weights to: the server heard of {len(nodes)} nodes in the last {lost_after_s:g} s, "
                "none of them with a healthy engine. Start a node with an engine, or wait for them."
            )
        yield Fleet(nodes, list(engines.values()))


async def _close(engines: dict[str, FleetEngine]) -> None:
    for engine in engines.values():
        await engine.weights.close()


async def _node(view: NodeView, client: NodeClient, engines: dict[str, FleetEngine]) -> FleetNode:
    """A node. Its policy engines are added to `engines` by URL."""
    gate, backends = await asyncio.gather(client.gate(), client.backends())
    node = FleetNode(view.node_id, client, gate)
    for backend in backends:
        if backend.state != "healthy" or backend.role is not None:
            continue
        url = engine_url(backend.url, view.url)
        if url not in engines:
            key = backend.api_key_env
            engines[url] = FleetEngine(url, engine_weights(backend.engine, url, key and read_secret(key)))
        engines[url].places.append(Place(node, backend.url, backend.weights_known))
    return node


def engine_url(engine_url: str, node_url: str) -> str:
    """The URL under which an engine registered at a node is reachable from here."""
    engine, node = urlsplit(engine_url), urlsplit(node_url)
    if not _is_loopback(engine.hostname) or _is_loopback(node.hostname):
        return engine_url
    host = node.netloc.rpartition("@")[2]
    host = host[: host.rindex("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return engine._replace(netloc=host if engine.port is None else f"{host}:{engine.port}").geturl()


def _is_loopback(host: str | None) -> bool:
    if host is None or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


async def _failures(calls: Iterable[tuple[str, Awaitable[object]]]) -> list[Failed]:
    """Waits for all calls."""
    named = list(calls)
    answers = await asyncio.gather(*(call for _, call in named), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, GanglineError):
            raise answer
    return [
        (name, answer) for (name, _), answer in zip(named, answers, strict=True) if isinstance(answer, GanglineError)
    ]
