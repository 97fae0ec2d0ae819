"""An engine that reports the experts of a made-up mixture-of-experts model, on vLLM's routes, for benchmarks.

    python bench/moe_engine.py PORT NUM_SAMPLED NUM_LAYERS NUM_CHOSEN REPORTS

REPORTS: 1 as with `--enable-return-routed-experts`, else 0. Written after vLLM 0.32.0 (2026-11-26): the base64 of an
`.npy` file [prompt + sampled - 1 - start, layers, chosen] of uint8 in each choice. No model runs.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
from typing import Any

import numpy as np
from aiohttp import web
from mock_engine import MAX_CONTEXT, STOP_ID, render

NUM_EXPERTS = 128
_VARIANTS = 997


class MoeEngine:
    def __init__(self, num_sampled: int, num_layers: int, num_chosen: int, *, reports: bool) -> None:
        chance = np.random.default_rng(0)
        self._reports = reports
        self._table = chance.integers(0, NUM_EXPERTS, (_VARIANTS, num_layers, num_chosen), dtype=np.uint8)
        self._ids = [*chance.integers(1000, 90_000, num_sampled - 1).tolist(), STOP_ID]
        self._entries = [
            {"token": " word", "logprob": -float(value), "bytes": [32, 119, 111, 114, 100], "top_logprobs": []}
            for value in chance.exponential(0.5, num_sampled)
        ]

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "mock", "object": "model", "max_model_len": MAX_CONTEXT}
        return web.json_response({"object": "list", "data": [card]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": render((await request.json())["messages"])})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = render(body["messages"]) if given is None else given
        ids = self._ids[: body.get("max_tokens") or len(self._ids)]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": " word" * len(ids)},
            "logprobs": {"content": self._entries[: len(ids)]},
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
        }
        if self._reports and not body.get("stream"):
            choice["routed_experts"] = self._experts([*prompt, *ids], body.get("routed_experts_prompt_start", 0))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        reply = {"id": "x", "model": "mock", "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
        if not body.get("stream"):
            return web.json_response(reply)
        chunk = {name: value for name, value in choice.items() if name != "message"} | {"delta": choice["message"]}
        data = json.dumps(reply | {"choices": [chunk]})
        return web.Response(text=f"data: {data}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    def _experts(self, ids: list[int], start: int) -> str:
        inputs = np.asarray(ids, np.int64)[start:-1]
        array = self._table[(inputs * 31 + np.arange(start, start + len(inputs))) % _VARIANTS]
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode("ascii")


async def main(port: int, num_sampled: int, num_layers: int, num_chosen: int, reports: int) -> None:
    engine = MoeEngine(num_sampled, num_layers, num_chosen, reports=bool(reports))
    app = web.Application(client_max_size=1 << 28)
    app.add_routes(
        [
            web.get("/v1/models", engine.models),
            web.get("/version", engine.version),
            web.post("/tokenize", engine.tokenize),
            web.post("/v1/chat/completions", engine.chat),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*(int(value) for value in sys.argv[1:])))
