"""The server's numbers for Prometheus: queues, stages, outcomes, callbacks, nodes, its own requests.

Durable numbers are read from the store when scraped, so they are correct after a restart too; others are counted from
durable events. Labels never contain session or task ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from gangline.domain.lifecycle import STAGES
from gangline.domain.views import Event, NodeView, ServiceStatus
from gangline.machine.telemetry.exposition import LoopLag, exposition, gauge, new_registry

_REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 300)


class ServerMetrics:
    """One per server."""

    def __init__(self) -> None:
        self._status: ServiceStatus | None = None
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

    def exposition(self, status: ServiceStatus) -> bytes:
        """`status`: the current status."""
        self._status = status
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
        yield from _of_nodes(status.nodes)


def _of_nodes(nodes: Sequence[NodeView]) -> Iterable[Metric]:
    sessions = GaugeMetricFamily("gangline_node_sessions", "Sessions that a node holds.", labels=["node"])
    capacity = GaugeMetricFamily("gangline_node_capacity", "Sessions that the node can hold.", labels=["node"])
    age_s = GaugeMetricFamily("gangline_node_age_seconds", "Seconds since the node's last message.", labels=["node"])
    draining = GaugeMetricFamily("gangline_node_draining", "1 while the node takes no more sessions.", labels=["node"])
    for node in nodes:
        sessions.add_metric([node.node_id], node.num_sessions)
        capacity.add_metric([node.node_id], node.capacity)
        age_s.add_metric([node.node_id], node.age_s)
        draining.add_metric([node.node_id], node.draining)
    return sessions, capacity, age_s, draining
