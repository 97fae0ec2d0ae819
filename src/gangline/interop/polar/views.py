"""Converts a node to Polar's record; pure.

Source: its published `GatewayNodeInfo`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from gangline.domain.views import NodeView

KNOBS = frozenset({"max_init_workers", "max_run_workers", "max_postrun_workers", "heartbeat_interval_seconds"})
"""Values that a gateway sends only at registration; kept with its metrics, since its heartbeats lack them."""

_USUAL_INTERVAL_S = 30.0
_MISSED_BEATS = 3


class PolarNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the server knows it. For a node of ours, each number of workers is its capacity."""

    node_id: str
    gateway_url: str
    max_init_workers: int
    max_run_workers: int
    max_postrun_workers: int
    metrics: dict[str, float]
    dispatch_reservations: int = 0
    """Always 0: a session is leased before it is sent."""
    healthy: bool
    draining: bool
    heartbeat_interval_seconds: int
    last_heartbeat: datetime
    """UTC"""


def interval_s(node: NodeView) -> float:
    """Seconds between two heartbeats."""
    return node.metrics.get("heartbeat_interval_seconds", _USUAL_INTERVAL_S)


def polar_node(node: NodeView) -> PolarNode:
    return PolarNode(**node_fields(node))


def node_fields(node: NodeView) -> dict[str, Any]:
    """Fields of a `PolarNode`."""
    workers = {name: int(node.metrics.get(name, node.capacity)) for name in KNOBS if name.endswith("workers")}
    return workers | {
        "node_id": node.node_id,
        "gateway_url": node.url,
        "metrics": {name: value for name, value in node.metrics.items() if name not in KNOBS},
        "healthy": node.age_s <= _MISSED_BEATS * interval_s(node),
        "draining": node.draining,
        "heartbeat_interval_seconds": int(interval_s(node)),
        "last_heartbeat": datetime.fromtimestamp(node.last_seen_at, UTC),
    }
