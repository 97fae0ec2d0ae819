"""The HTTP server that NeMo RL opens over its vLLM (`expose_http_server`): two routes, its assertions, its errors.

Source: NeMo RL, main of August 2026 (7ea279a), `models/generation/vllm/vllm_worker_async.py`: `create_chat_completion`
asserts the trainer's sampling, which FastAPI answers with a bare 500. Its vLLM knows no `kv_transfer_params` of ours.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from gangline.models.engine_server.app import serving
from gangline.serving.scripted.server import scripted_server

Sampling = tuple[float, float]
"""Temperature and top-p."""


@asynccontextmanager
async def nemo_rl_server(
    script: dict[str, Any], *, train: Sampling = (1.0, 1.0), val: Sampling = (1.0, 1.0), streams: bool = True
) -> AsyncGenerator[str, None]:
    """`streams`: False answers `stream: true` with the whole reply, as a server does that cannot stream."""
    async with scripted_server(script) as url, aiohttp.ClientSession() as client:

        async def answer(path: str, body: dict[str, Any]) -> web.Response:
            body["model"] = body.get("model") or "scripted"
            async with client.post(url + path, json=body) as found:
                return web.Response(body=await found.read(), status=found.status, content_type=found.content_type)

        async def chat(request: web.Request) -> web.Response:
            body = await request.json()
            sampling = body.get("temperature"), body.get("top_p")
            if body.get("top_k") not in (None, -1) or sampling not in (train, val):
                return web.Response(status=500, text="Internal Server Error")
            as_ids = body.setdefault("return_tokens_as_token_ids", True)
            if as_ids and body.get("logprobs") and body.get("top_logprobs") is None:
                return web.json_response({"error": {"message": "`top_logprobs` must be set", "code": 400}}, status=400)
            body.pop("kv_transfer_params", None)
            if not streams:
                body |= {"stream": False, "stream_options": None}
            return await answer("/v1/chat/completions", body)

        async def tokenize(request: web.Request) -> web.Response:
            return await answer("/tokenize", await request.json())

        app = web.Application(middlewares=[_as_fastapi])
        app.add_routes([web.post("/v1/chat/completions", chat), web.post("/tokenize", tokenize)])
        async with serving(app) as own_url:
            yield own_url


@web.middleware
async def _as_fastapi(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)
