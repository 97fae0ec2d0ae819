"""An HTTP server on loopback with one handler for all paths."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from gangline.wire.http.listening import accepting

__all__ = ["Handler", "serving"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1") -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=2)
    await runner.setup()
    try:
        assert runner.server is not None
        async with accepting(runner.server, host=host, port=0) as listeners:
            yield f"http://{host}:{listeners[0].getsockname()[1]}"
    finally:
        await runner.cleanup()
