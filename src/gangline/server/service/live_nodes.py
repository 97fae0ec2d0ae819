"""Our nodes that are currently live."""

from __future__ import annotations

from gangline.domain.views import SILENT_AFTER_S, NodeView
from gangline.server.service.core import RolloutService
from gangline.wire.client.node import NodeClient


def is_polar_gateway(node: NodeView) -> bool:
    """Whether it joined by Polar's route, and so has none of our routes."""
    return "max_run_workers" in node.metrics


async def live_nodes(service: RolloutService) -> list[NodeView]:
    """Raises: StoreError."""
    status = await service.store.query(service.store.status)
    return [node for node in status.nodes if node.age_s <= SILENT_AFTER_S and not is_polar_gateway(node)]


def node_client(service: RolloutService, node: NodeView, *, timeout_s: float = 60.0) -> NodeClient:
    return NodeClient(node.url, service.tokens.of_node(node), timeout_s=timeout_s)
