"""A small engine that sees: vLLM's routes over a real vision model, in this process.

It answers as vLLM 0.32.0 does (its package was read on 2026-11-26: `renderers/online_renderer.py`,
`entrypoints/scale_out/token_in_token_out/{protocol,serving}.py`, `entrypoints/openai`): the chat route ignores exact
ids where messages have other content than text; `/inference/v1/generate` takes ids with one placeholder for each image
of `content_parts`, expands them, and repeats the expanded ids with `mm_placeholders`.

Its replies are texts that a test gives, cut into ids as no tokenizer would cut them; their log-probs are the model's,
on the pixels that came with the request.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from gangline.wire.http.listening import accepting
from support.engines.tiny_vision import IMAGE_ID, load_model

__all__ = ["VisionEngine", "logprobs_of", "vision_engine"]

_END_ID = 151_645
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def logprobs_of(model: Any, ids: Sequence[int], pixels: dict[str, Any], num_last: int) -> list[float]:
    """Log-probs of the last `num_last` ids, each given those before it and the pixels."""
    fields = {name: torch.as_tensor(np.asarray(value)) for name, value in pixels.items()}
    row = torch.tensor([list(ids)])
    fields["mm_token_type_ids"] = (row == IMAGE_ID).int()
    with torch.inference_mode():
        logits = model(input_ids=row, logits_to_keep=num_last + 1, **fields).logits[0, :-1]
    values = torch.log_softmax(logits.float(), -1)
    chosen: Any = values[torch.arange(num_last), row[0, -num_last:]]
    return chosen.tolist()


@dataclass
class _Prompt:
    ids: list[int]
    placeholders: list[dict[str, int]]
    pixels: dict[str, Any]


class VisionEngine:
    def __init__(self, folder: Path, say: Callable[[], str], seed: int = 0) -> None:
        """say: the next reply; calls of tools in Hermes' form, as Qwen's template writes them."""
        self.model = load_model(folder)
        loader: Any = PreTrainedTokenizerFast
        self._tokenizer: Any = loader.from_pretrained(str(folder), local_files_only=True)
        processor: Any = Qwen2VLImageProcessorPil
        self._processor = processor.from_pretrained(str(folder))
        self._say = say
        self._chance = random.Random(seed)
        self.num_generated = self.num_chats = 0

    # -- prompts -------------------------------------------------------------------------------------------------

    def _rendered(self, body: dict[str, Any]) -> _Prompt:
        messages = body["messages"]
        ids = self._tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            tokenize=True,
            return_dict=False,
            add_generation_prompt=body.get("add_generation_prompt", True),
        )
        parts: list[Any] = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
        return self._expanded(ids, [part["image_url"]["url"] for part in parts if part["type"] == "image_url"])

    def _expanded(self, ids: Sequence[int], urls: Sequence[str]) -> _Prompt:
        if not urls:
            return _Prompt(list(ids), [], {})
        images = [Pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in urls]
        pixels = dict(self._processor(images=images, return_tensors="np"))
        grids: Any = pixels["image_grid_thw"]
        lengths = iter([int(time * height * width) // 4 for time, height, width in grids.tolist()])
        expanded: list[int] = []
        placeholders: list[dict[str, int]] = []
        for token in ids:
            length = next(lengths) if token == IMAGE_ID else 1
            if token == IMAGE_ID:
                placeholders.append({"offset": len(expanded), "length": length})
            expanded += [token] * length
        return _Prompt(expanded, placeholders, pixels)

    # -- replies -------------------------------------------------------------------------------------------------

    def _sampled(self, prompt: _Prompt, max_tokens: int) -> tuple[list[int], list[float], str, str]:
        """Ids, log-probs, finish reason, text."""
        text = self._say()
        ids = self._cut(text)
        finish = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        # A sampled placeholder has no pixels; it is any other id here.
        row = [*prompt.ids, *(0 if token == IMAGE_ID else token for token in ids)]
        return ids, logprobs_of(self.model, row, prompt.pixels, len(ids)), finish, text

    def _cut(self, text: str) -> list[int]:
        """Ids that decode to the text, of pieces that were tokenised apart; tags stay whole."""
        ids: list[int] = []
        for piece in re.split(r"(</?tool_call>|<\|image_pad\|>)", text):
            at = self._chance.randrange(len(piece) + 1) if not piece.startswith("<") else 0
            for part in (piece[:at], piece[at:]):
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        return [*ids, _END_ID]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("logit_bias"):
            text = "token_id(s) in logit_bias contain out-of-vocab token ids. Vocabulary size: 151936"
            return web.json_response({"error": {"message": text, "code": 400}}, status=400)
        self.num_chats += 1
        has_media = any(isinstance(one.get("content"), list) for one in body["messages"])
        transfer: dict[str, Any] = body.get("kv_transfer_params") or {}
        ids = transfer.get("prompt_token_ids")
        prompt = _Prompt(ids, [], {}) if ids and not has_media else await asyncio.to_thread(self._rendered, body)
        if body.get("top_k") == 1:
            sampled, values, finish, text = await asyncio.to_thread(self._likeliest, prompt)
        else:
            sampled, values, finish, text = await asyncio.to_thread(
                self._sampled, prompt, body.get("max_tokens") or 512
            )
        calls = [
            {"index": at, "id": f"call-{at}", "type": "function", "function": _function(call)}
            for at, call in enumerate(_CALL.findall(text))
        ]
        message: dict[str, Any] = {"role": "assistant", "content": _CALL.sub("", text).strip() or None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "finish_reason": "tool_calls" if calls and finish == "stop" else finish,
            "token_ids": sampled,
            "logprobs": {"content": [{"token": "", "logprob": value} for value in values]},
        }
        reply = {"id": "c", "object": "chat.completion", "model": "tiny", "prompt_token_ids": prompt.ids}
        if not body.get("stream"):
            return web.json_response({**reply, "choices": [{**choice, "message": message}]})
        return await _stream(request, {**reply, "choices": [{**choice, "delta": message}]})

    def _likeliest(self, prompt: _Prompt) -> tuple[list[int], list[float], str, str]:
        with torch.inference_mode():
            row = torch.tensor([prompt.ids])
            fields = {name: torch.as_tensor(np.asarray(value)) for name, value in prompt.pixels.items()}
            fields["mm_token_type_ids"] = (row == IMAGE_ID).int()
            logits = self.model(input_ids=row, logits_to_keep=1, **fields).logits[0, -1]
        best = int(logits.argmax())
        return [best], [float(torch.log_softmax(logits.float(), -1)[best])], "length", ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_generated += 1
        parts: list[Any] = body.get("content_parts") or []
        assert all(part["type"] == "image_url" and isinstance(part["url"], str) for part in parts)
        prompt = await asyncio.to_thread(self._expanded, body["token_ids"], [part["url"] for part in parts])
        params = body["sampling_params"]
        if params.get("top_k") == 1:
            sampled, values, finish, _ = await asyncio.to_thread(self._likeliest, prompt)
        else:
            sampled, values, finish, _ = await asyncio.to_thread(self._sampled, prompt, params["max_tokens"])
        entries = [{"token_id": token, "logprob": value} for token, value in zip(sampled, values, strict=True)]
        reply: dict[str, Any] = {
            "request_id": "g",
            "choices": [{"index": 0, "token_ids": sampled, "logprobs": {"content": entries}, "finish_reason": finish}],
        }
        if body.get("return_token_ids"):
            reply |= {"prompt_token_ids": prompt.ids, "mm_placeholders": {"image": prompt.placeholders}}
        return await _stream(request, reply) if body.get("stream") else web.json_response(reply)

    async def tokenize(self, request: web.Request) -> web.Response:
        prompt = await asyncio.to_thread(self._rendered, await request.json())
        return web.json_response({"tokens": prompt.ids, "count": len(prompt.ids)})

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json())["tokens"]
        return web.json_response({"prompt": self._tokenizer.decode(ids)})


def _function(call: str) -> dict[str, str]:
    name = re.search(r'"name": "([^"]*)"', call)
    arguments = re.search(r'"arguments": (.*)\}$', call, re.DOTALL)
    assert name is not None
    assert arguments is not None
    return {"name": name[1], "arguments": arguments[1]}


async def _stream(request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: " + web.json_response(reply).body + b"\n\ndata: [DONE]\n\n")  # pyright: ignore
    await response.write_eof()
    return response


async def _card(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "tiny", "max_model_len": 8192}]})


async def _version(_request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


@asynccontextmanager
async def vision_engine(engine: VisionEngine) -> AsyncGenerator[str]:
    """Its URL."""
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.get("/v1/models", _card),
            web.get("/version", _version),
            web.get("/health", _version),
            web.post("/v1/chat/completions", engine.chat),
            web.post("/inference/v1/generate", engine.generate),
            web.post("/tokenize", engine.tokenize),
            web.post("/detokenize", engine.detokenize),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        assert runner.server is not None
        async with accepting(runner.server, host="127.0.0.1", port=0) as listeners:
            yield f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
    finally:
        await runner.cleanup()
