"""The server's numbers for Prometheus: queues, stages, outcomes, callbacks, nodes, its own requests.

Durable numbers are read from the store when scraped, so they are correct after a restart too; others are counted from
durable events. Labels never contain session or task ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gangline.domain.lifecycle import STAGES
from gangline.domain.node_views import speed_of
from gangline.domain.tenancy import TenantView
from gangline.domain.views import HEARTBEAT_REFUSED, Event, NodeView, ServiceStatus
from gangline.machine.telemetry.exposition import SPEED_FIGURES, LoopLag, exposition, gauge, new_registry

_REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 300)


MAX_TENANTS = 100
"""Tenants that have a label: the largest."""


class ServerMetrics:
    """One per server."""

    def __init__(self) -> None:
        self._status: ServiceStatus | None = None
        self._tenants: Sequence[TenantView] = ()
        self._registry = registry = new_registry(self._read)
        self.loop_lag = LoopLag(registry)
        self._events = Counter("gangline_events", "Durable events since the start.", ["kind"], registry=registry)
        self._ended = Counter("gangline_sessions_ended", "Sessions ended.", ["outcome"], registry=registry)
        self._failures = Counter("gangline_failures", "Failed attempts, by code.", ["code", "again"], registry=registry)
        self._requests = Counter(
            "gangline_requests", "Answered requests.", ["method", "route", "status"], registry=registry
        )
        self._request_s = Histogram(
            "gangline_request_seconds",
            "Duration of requests, including long polls.",
            ["method", "route"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )

    def saw(self, events: Sequence[Event]) -> None:
        """Durable events, once each."""
        for event in events:
            self._events.labels(event.kind).inc()
            if event.kind == "session.ended":
                self._ended.labels(str(event.data.get("outcome"))).inc()
            if event.data.get("code"):
                self._failures.labels(str(event.data["code"]), str(event.kind == "session.requeued").lower()).inc()

    def middleware(self) -> Middleware:
        """Counts requests by the route's pattern, never by the path, which contains ids and arbitrary text."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            began = time.perf_counter()
            status = 499  # the client left
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                resource = request.match_info.route.resource
                is_known = resource is not None and request.match_info.route.method != hdrs.METH_ANY
                route = resource.canonical if resource is not None and is_known else "none"
                method = request.method if is_known else "other"
                self._requests.labels(method, route, str(status)).inc()
                self._request_s.labels(method, route).observe(time.perf_counter() - began)

        return count

    def exposition(self, status: ServiceStatus, tenants: Sequence[TenantView] = ()) -> bytes:
        """`status`, `tenants`: the current ones."""
        self._status, self._tenants = status, tenants
        return exposition(self._registry)

    def _read(self) -> Iterable[Metric]:
        status = self._status
        if status is None:
            return
        yield gauge("gangline_tasks", "Tasks by state.", "state", status.tasks)
        yield gauge("gangline_sessions", "Sessions by state.", "state", status.sessions)
        yield GaugeMetricFamily("gangline_demand_sessions", "Sessions for which there should be nodes.", status.demand)
        stages = {"leased": 0, **dict.fromkeys(STAGES, 0), **status.stages}
        yield gauge("gangline_leased_sessions", "Leased sessions by stage.", "stage", stages)
        yield gauge("gangline_callbacks", "Callbacks by state.", "state", status.callbacks)
        oldest_s = status.oldest_queued_s or 0.0
        yield GaugeMetricFamily("gangline_oldest_queued_seconds", "Age of the next session in the queue.", oldest_s)
        unplaced = sum(status.unplaced.values())
        yield GaugeMetricFamily("gangline_unplaced_sessions", "Queued sessions that no node can run.", unplaced)
        yield GaugeMetricFamily("gangline_result_bytes", "Bytes of all stored results.", status.result_bytes)
        yield from _of_nodes(status.nodes)
        yield from _of_engines(status.nodes)
        yield from _of_tenants(self._tenants[:MAX_TENANTS])


def _told(name: str) -> Callable[[NodeView], float | None]:
    return lambda node: node.metrics.get(name)


def _has(node: NodeView, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in node.metrics)


_NODE_FIGURES: tuple[tuple[str, str, Callable[[NodeView], float | None]], ...] = (
    ("sessions", "Sessions that a node holds.", lambda node: node.num_sessions),
    ("capacity", "Sessions that the node can hold.", lambda node: node.capacity),
    ("age_seconds", "Seconds since the node's last message.", lambda node: node.age_s),
    ("draining", "1 while the node takes no more sessions.", lambda node: node.draining),
    ("resting", "1 while it takes none after faults of its own.", lambda node: _has(node, "breaker_open_")),
    ("disk_low", "1 while it takes none for lack of disk.", lambda node: _has(node, "disk_low_")),
    ("refused", "1 while the server cannot store its heartbeats.", lambda node: _has(node, HEARTBEAT_REFUSED)),
    ("stuck_sessions", "Sessions that have exceeded their budgets.", _told("num_stuck")),
    ("orphans", "Folders of sandboxes that it does not have.", _told("orphans")),
    ("disk_free_bytes", "Free on the disk of its data.", _told("disk_free_bytes")),
    ("disk_reserve_bytes", "Below it takes no session.", _told("disk_reserve_bytes")),
    ("memory_bytes", "Memory of its machine.", _told("memory_bytes")),
    ("memory_free_bytes", "That programs may still take.", _told("memory_free_bytes")),
    ("sandbox_memory_bytes", "Of sandboxes now.", _told("sandbox_memory_bytes")),
    ("largest_sandbox_bytes", "Of the largest one now.", _told("largest_sandbox_bytes")),
    ("sandbox_cpus", "Processors that sandboxes take now.", _told("sandbox_cpus")),
)
"""End of the name, text, reading. From heartbeats, so that alerts need no addresses of nodes."""


def _of_nodes(nodes: Sequence[NodeView]) -> Iterable[Metric]:
    for name, text, read in _NODE_FIGURES:
        family = GaugeMetricFamily(f"gangline_node_{name}", text, labels=["node"])
        for node in nodes:
            if (value := read(node)) is not None:
                family.add_metric([node.node_id], value)
        yield family


def _of_engines(nodes: Sequence[NodeView]) -> Iterable[Metric]:
    """As nodes report them; other implementations of nodes may report less."""
    engines = [([node.node_id, str(engine.get("url"))], engine) for node in nodes for engine in node.backends]
    up = GaugeMetricFamily("gangline_engine_up", "1 while the node finds it healthy.", labels=["node", "url"])
    for labels, engine in engines:
        up.add_metric(labels, engine.get("state") != "unhealthy")
    yield up
    for name, field, text in SPEED_FIGURES:
        family = GaugeMetricFamily(f"gangline_engine_{name}", text, labels=["node", "url"])
        for labels, engine in engines:
            if (value := getattr(speed_of(engine), field, None)) is not None:
                family.add_metric(labels, value)
        yield family


def _of_tenants(tenants: Sequence[TenantView]) -> Iterable[Metric]:
    slot_s = CounterMetricFamily("gangline_tenant_slot_seconds", "Seconds of ended leases.", labels=["tenant"])
    tokens = CounterMetricFamily("gangline_tenant_sampled_tokens", "Sampled tokens of results.", labels=["tenant"])
    running = GaugeMetricFamily("gangline_tenant_running", "Sessions that nodes hold.", labels=["tenant"])
    queued = GaugeMetricFamily("gangline_tenant_queued", "Queued sessions.", labels=["tenant"])
    for tenant in tenants:
        slot_s.add_metric([tenant.name], tenant.slot_s)
        tokens.add_metric([tenant.name], tenant.num_sampled_tokens)
        running.add_metric([tenant.name], tenant.num_running)
        queued.add_metric([tenant.name], tenant.num_queued)
    return slot_s, tokens, running, queued
