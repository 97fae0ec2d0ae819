"""SGLang as slime and miles use it: with their routes for weights and memory, and behind a router.

The engine notices what its trainer would break: calls in flight when generation is paused (the trainers pause without a
mode, so SGLang aborts them), and calls while its memory is released. Routes after `slime/backends/sglang_utils/
sglang_engine.py` at 624b824; the router's answers as sglang-router 0.3.2 gives them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gangline.models.engine_server.app import serving
from support.engines.sglang_engine import FakeSglang

__all__ = ["SglangRouter", "TrainedSglang"]


@dataclass
class TrainedSglang(FakeSglang):
    weight_version: str = "default"
    reply_s: float = 0.0
    """How long a reply takes."""
    disturbed: list[str] = field(default_factory=list[str])
    """What the trainer would have broken."""
    num_chats: int = 0
    num_in_flight: int = 0
    is_released: bool = False

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/flush_cache", self._flush)
        for path in ("/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_tensor"):
            app.router.add_post(path, self._change)
        return app

    async def _chat(self, request: web.Request) -> web.Response:
        self.num_in_flight += 1
        self.num_chats += 1
        try:
            self._notice(is_wrong=self.is_released, what="a call came while its memory was released")
            await asyncio.sleep(self.reply_s)
            return await super()._chat(request)
        finally:
            self.num_in_flight -= 1

    async def _control(self, request: web.Request) -> web.Response:
        if request.path == "/pause_generation":
            self._notice(is_wrong=self.num_in_flight > 0, what=f"{self.num_in_flight} calls were aborted")
        return await super()._control(request)

    async def _flush(self, _request: web.Request) -> web.Response:
        return web.Response(status=400 if self.num_in_flight else 200)

    async def _change(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.controlled.append((request.path, body))
        if request.path == "/update_weights_from_tensor":
            self.weight_version = body["weight_version"]
        else:
            self.is_released = request.path == "/release_memory_occupation"
            self._notice(is_wrong=self.num_in_flight > 0, what="its memory was taken from calls in flight")
        return web.json_response({"success": True, "message": "Success."})

    def _notice(self, *, is_wrong: bool, what: str) -> None:
        if is_wrong:
            self.disturbed.append(what)


@dataclass
class SglangRouter:
    """Lists workers, on the routes of sglang-router and of miles's own router."""

    urls: list[str]
    worker_type: str = "regular"

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/workers", self._workers)
        app.router.add_get("/list_workers", self._urls)
        return app

    async def _workers(self, _request: web.Request) -> web.Response:
        workers: list[dict[str, Any]] = [
            {
                "id": f"664bc457-{number}",
                "url": url,
                "model_id": "sg-model",
                "priority": 50,
                "cost": 1.0,
                "worker_type": self.worker_type,
                "is_healthy": True,
                "load": 0,
                "connection_mode": "HTTP",
                "metadata": {"model_path": "/models/m", "served_model_name": "sg-model", "tp_size": "1"},
                "disable_health_check": True,
            }
            for number, url in enumerate(self.urls)
        ]
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)}
        return web.json_response({"workers": workers, "total": len(workers), "stats": stats})

    async def _urls(self, _request: web.Request) -> web.Response:
        return web.json_response({"urls": self.urls})

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[dict[str, Any]]:
        """The router's address, as the trainer's arguments have it."""
        async with serving(self.app()) as url:
            host, _, port = url.removeprefix("http://").partition(":")
            yield {"sglang_router_ip": host, "sglang_router_port": int(port)}
