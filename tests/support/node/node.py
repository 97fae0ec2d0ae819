"""A whole node in this process, without a server to lease from, for tests of what it answers itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp

from gangline.node.node import serve
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
async def running_node(folder: Path, *engine_urls: str, **options: Any) -> AsyncGenerator[RunningNode]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    node: dict[str, Any] = {"node_id": "n1", "server_url": NO_SERVER, "control_token": TOKEN, **options}
    task = asyncio.create_task(
        serve(data_dir=folder, engine_urls=engine_urls, **node, on_ready=ready.set_result),
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
