"""Engines of a mixture-of-experts model that report its routing, as vLLM and SGLang write it; no model runs.

Compared on 2026-11-26 with vLLM 0.32.0 (its package: `entrypoints/openai/chat_completion/{protocol,serving}.py`,
`utils/serial_utils.py`, `distributed/aux_output_connector/connector.py`) and SGLang 0.5.23 (its package:
`srt/managers/{detokenizer_manager,scheduler}.py`, `scheduler_components/batch_result_processor.py`,
`srt/entrypoints/openai/serving_chat.py`); `routed_experts_dtype` with SGLang's main at a6463a1.

vLLM: with `--enable-return-routed-experts` each choice of each whole chat reply has `routed_experts`, the base64 of an
`.npy` file [num_tokens - 1 - start, layers, chosen] of uint8, uint16 or int32; streams have none. The route of ids,
`/inference/v1/generate`, has the same (`entrypoints/scale_out/token_in_token_out/{protocol,serving}.py`, compared on
2026-11-27). SGLang: `meta_info` has the base64 of int32 numbers without a shape, for requests that ask.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from gangline.models.engine_server.app import serving
from gangline.models.language.messages import template_messages
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.sglang_engine import FakeSglang

__all__ = ["FakeMoeSglang", "FakeMoeVllm", "Routing", "moe_server"]

_VARIANTS = 997


class Routing:
    """Made-up choices of a model: of a token at a position, always the same."""

    def __init__(self, num_layers: int = 3, num_chosen: int = 2, num_experts: int = 128, seed: int = 0) -> None:
        number = np.uint8 if num_experts <= 256 else np.uint16
        shape = (_VARIANTS, num_layers, num_chosen)
        self._table = np.random.default_rng(seed).integers(0, num_experts, shape, dtype=number)

    def of(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """[T - 1, layers, chosen]: the last id was never an input."""
        inputs = np.asarray(ids, np.int64)[:-1]
        return self._table[(inputs * 31 + np.arange(len(inputs))) % _VARIANTS]


@dataclass
class FakeMoeVllm:
    routing: Routing = field(default_factory=Routing)
    texts: Sequence[str] = ("I am vLLM.",)
    """Replies in order; the last one is repeated. A probe, which asks for one token, takes none."""
    reports: bool = True
    """Started with `--enable-return-routed-experts`."""
    ignores_start: bool = False
    ignores_ids_from: int | None = None
    """Number of the chat call from which exact prompt ids are ignored."""
    spells: bool = False
    """Samples each character by itself, which no tokenizer of the text would give."""
    lost_rows: int = 0
    dtype: str | None = None
    """None: as the routing has it."""
    strips_from: int | None = None
    """Number of the chat call from which a router in front strips the field."""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Chat calls that were no probes."""

    def __post_init__(self) -> None:
        self.tokenizer = TinyTokenizer()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "moe", "object": "model", "max_model_len": 65536}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self._rendered(body)
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 65536})

    def _rendered(self, body: dict[str, Any]) -> list[int]:
        messages = template_messages(body["messages"])
        begins = body.get("add_generation_prompt", True)
        return self.tokenizer.render(messages, tools=body.get("tools"), add_generation_prompt=begins)

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.tokenizer.decode((await request.json())["tokens"])})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("logit_bias"):
            size = self.tokenizer.num_ids
            message = f"token_id(s) in logit_bias contain out-of-vocab token ids. Vocabulary size: {size}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        ignores = self.ignores_ids_from is not None and len(self.bodies) >= self.ignores_ids_from
        prompt = self._rendered(body) if given is None or ignores else given
        is_probe = (body.get("max_tokens") or body.get("max_completion_tokens")) in (1, 2)
        text = "x" if is_probe else self.texts[min(len(self.bodies), len(self.texts) - 1)]
        if not is_probe:
            self.bodies.append(body)
        pieces = list(text) if self.spells else [text]
        ids = [token for piece in pieces for token in self.tokenizer.encode(piece)] + sorted(self.tokenizer.eos_ids)
        reply = self._reply(body, prompt, ids[:1] if is_probe else ids, text, "length" if is_probe else "stop")
        return await _streamed(request, reply) if body.get("stream") else web.json_response(reply)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """A whole reply of the route of ids has the field too, and takes the start among its sampling parameters."""
        body = await request.json()
        params = body["sampling_params"]
        if body.get("stream"):
            return web.json_response({"error": {"message": "not here", "code": 400}}, status=400)
        is_probe = params["max_tokens"] == 1
        if not is_probe:
            self.bodies.append(body)
        ids = [*self.tokenizer.encode(self.texts[0]), *self.tokenizer.eos_ids]
        ids = ids[: params["max_tokens"]]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": one, "logprob": -0.25, "top_logprobs": []} for one in ids]},
            "finish_reason": "length" if is_probe else "stop",
            "stop_reason": None,
            "routed_experts": self._experts(params, body["token_ids"], ids),
            "sampling_mask": None,
        }
        return web.json_response({"request_id": "x", "choices": [choice], "prompt_token_ids": body["token_ids"]})

    def _reply(
        self, body: dict[str, Any], prompt: list[int], ids: list[int], text: str, finish_reason: str
    ) -> dict[str, Any]:
        value = 0.0 if body.get("top_k") == 1 else -0.25  # `--logprobs-mode processed_logprobs`
        content = [{"token": "", "logprob": value, "bytes": None, "top_logprobs": []} for _ in ids]
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": {"content": content},
                "finish_reason": finish_reason,
                "stop_reason": None,
                "token_ids": ids,
                "routed_experts": self._experts(body, prompt, ids),
            }
            for index in range(body.get("n") or 1)
        ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return {"id": "x", "model": "moe", "choices": choices, "usage": usage, "prompt_token_ids": prompt}

    def _experts(self, body: dict[str, Any], prompt: list[int], ids: list[int]) -> str | None:
        stripped = self.strips_from is not None and len(self.bodies) >= self.strips_from
        if not self.reports or body.get("stream") or stripped:
            return None
        start = 0 if self.ignores_start else body.get("routed_experts_prompt_start", 0)
        assert 0 <= start <= len(prompt), "vLLM refuses it"
        array = self.routing.of([*prompt, *ids])[start:]
        array = array[: len(array) - self.lost_rows]
        buffer = io.BytesIO()
        np.save(buffer, array if self.dtype is None else array.astype(self.dtype), allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode("ascii")


async def _streamed(request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
    (choice,) = reply["choices"]
    chunk = {name: value for name, value in choice.items() if name not in ("message", "routed_experts")}
    events = [{**reply, "choices": [chunk | {"delta": choice["message"]}], "usage": None}, {**reply, "choices": []}]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@dataclass
class FakeMoeSglang(FakeSglang):
    routing: Routing = field(default_factory=Routing)
    reports: bool = True
    """Started with `--enable-return-routed-experts`; a server without it ignores the request's field."""
    says_dtype: str | None = None
    """Name of the type, as newer versions say it; None: int32, unsaid, as 0.5.23."""

    def _choice(self, index: int, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        choice = super()._choice(index, body, prompt)
        if self.reports and body.get("return_routed_experts") and "meta_info" in choice:
            array = self.routing.of([*prompt, *choice["sampled"]])[body.get("routed_experts_start_len", 0) :]
            data = array.astype(self.says_dtype or "int32").tobytes()
            choice["meta_info"]["routed_experts"] = base64.b64encode(data).decode("utf-8")
            if self.says_dtype is not None:
                choice["meta_info"]["routed_experts_dtype"] = self.says_dtype
        return choice


@asynccontextmanager
async def moe_server(fake: FakeMoeVllm | FakeMoeSglang) -> AsyncGenerator[str, None]:
    async with serving(fake.app()) as url:
        yield url
