"""`GET /metrics`: the server's numbers for Prometheus."""

from __future__ import annotations

from aiohttp import web

from gangline.machine.telemetry.exposition import CONTENT_TYPE
from gangline.server.service.core import RolloutService
from gangline.wire.http.routes import Route


class MetricsRoutes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def metrics(self, _request: web.Request) -> web.Response:
        status = await self._service.status()
        tenants = await self._service.store.query(self._service.store.tenants)
        return web.Response(
            body=self._service.metrics.exposition(status, tenants), headers={"Content-Type": CONTENT_TYPE}
        )

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/metrics", self.metrics, "Numbers for Prometheus.", answer_types=("text/plain",)),
        ]
