"""A whole node in this process, without a server to lease from, for tests of what it answers itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp

from gangline.domain.session import SessionResult
from gangline.node.node import serve
from gangline.settings.node import NodeSettings
from gangline.wire.client.node import NodeClient

TOKEN = "control-token"
NO_SERVER = "http://127.0.0.1:9"


@dataclass
class RunningNode:
    url: str
    client: NodeClient
    http: aiohttp.ClientSession = field(repr=False)

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = TOKEN) -> tuple[int, Any]:
        """Status and JSON of one request."""
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        data = None if body is None else BytesIO(json.dumps(body).encode())
        async with self.http.request(method, self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json(content_type=None)


@asynccontextmanager
async def running_node(
    folder: Path,
    *engine_urls: str,
    node_id: str = "n1",
    server_url: str = NO_SERVER,
    control_token: str | None = TOKEN,
    on_result: Callable[[SessionResult], None] | None = None,
    **settings: Any,
) -> AsyncGenerator[RunningNode]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            NodeSettings(engines=engine_urls, **settings),
            data_dir=folder,
            node_id=node_id,
            server_url=server_url,
            control_token=control_token,
            on_ready=ready.set_result,
            on_result=on_result,
        )
    )
    try:
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await task
        async with aiohttp.ClientSession() as http, NodeClient(ready.result(), TOKEN) as client:
            yield RunningNode(ready.result(), client, http)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
