"""A small server with SGLang's routes and fields, as its source was read; and one that speaks plain OpenAI."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gangline.models.engine_server.app import serving
from gangline.models.language.messages import template_messages
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer


@dataclass
class FakeSglang:
    """What it was asked, and how it answers."""

    text: str = "I am SGLang."
    context_length: int = 4096
    strips_fields: bool = False
    """As a stock router does."""
    ignores_input_ids: bool = False
    spans: list[dict[str, Any]] | None = None
    vocab_size: int = 151936
    checks_biases: bool = True
    """As SGLang does; a router in front may drop the field."""
    odd_ids: list[int] | None = None
    """Sampled ids that it reports in its own place."""
    odd_logprobs: bool = False
    incremental: bool = False
    """Streams bring new ids alone, as with `--incremental-streaming-output`."""
    has_masks: bool = False
    """Knows `return_sampling_mask`, as 0.5.23 does (`srt/managers/{scheduler,tokenizer_manager}.py`, read on 2026-11-27
    from its package); another version ignores the field."""
    largest_mask: int | None = None
    """`--sampling-mask-max-tokens`: requests of another top-k are refused, 0.5.23 refuses those without one."""
    weight_version: str = "v3"
    can_load: bool = True
    controlled: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    """What a trainer asked: route and body."""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        self.tokenizer = TinyTokenizer()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/get_weight_version", self._get_weight_version)
        for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
            app.router.add_post(path, self._control)
        return app

    async def _get_weight_version(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.controlled.append((request.path, body))
        if request.path != "/update_weights_from_disk":
            return web.json_response({"message": "ok", "status": "ok"})
        if not self.can_load:
            message = "Failed to update weights: shapes differ. Rolling back to original weights."
            return web.json_response({"success": False, "message": message}, status=400)
        self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/models/m", "tokenizer_path": "/models/m", "version": "0.5.23"})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "sg-model", "object": "model", "owned_by": "sglang", "max_model_len": self.context_length}
        return web.json_response({"object": "list", "data": [card]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["skip_special_tokens"] is False
        return web.json_response({"text": self.tokenizer.decode(body["tokens"])})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        wrong = [token for token in body.get("logit_bias") or () if not 0 <= int(token) < self.vocab_size]
        if wrong and self.checks_biases:
            return _error(f"logit_bias must has keys in [0, {self.vocab_size - 1}], got {wrong[0]}.")
        self.bodies.append(body)
        if body.get("stream") and (body.get("return_prompt_token_ids") or body.get("return_token_ids")):
            return _error("return_token_ids is not supported with streaming on /v1/chat/completions.")
        prompt = body.get("input_ids")
        if prompt is None or self.ignores_input_ids:
            prompt = self.tokenizer.render(template_messages(body["messages"]), tools=body.get("tools"))
        if (refused := self._mask_refused(body, body.get("top_k", -1))) is not None:
            return _error(refused)
        if len(prompt) >= self.context_length:
            return _error(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self.context_length} tokens)."
            )
        choices = [self._choice(index, body, prompt) for index in range(body.get("n") or 1)]
        num_sampled = sum(len(choice["sampled"]) for choice in choices)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_sampled, "reasoning_tokens": 1}
        usage["prompt_tokens_details"] = {"cached_tokens": 2}
        for choice in choices:
            del choice["sampled"]
        return web.json_response({"id": "x", "model": "sg-model", "choices": choices, "usage": usage})

    def _mask_refused(self, body: dict[str, Any], top_k: int) -> str | None:
        if not (self.has_masks and body.get("return_sampling_mask")) or self.largest_mask is None:
            return None
        if 1 <= top_k <= self.largest_mask:
            return None
        return f"return_sampling_mask requires finite 1 < top_k <= {self.largest_mask}; got top_k={top_k}."

    def _masks(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """Each token was drawn among itself and its neighbours."""
        if not (self.has_masks and body.get("return_sampling_mask")):
            return {}
        return {
            "output_token_sampling_mask": [[token, max(token - 1, 0), token + 1] for token in ids],
            "output_token_sampling_logprobs": [-0.125] * len(ids),
            "output_token_sampling_mask_length": len(ids),
        }

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["input_ids"]
        if not body["sampling_params"]["max_new_tokens"]:  # only the prompt is scored
            scored = [
                [None if not at else -0.01 * token, token, None] for at, token in enumerate(self.odd_ids or prompt)
            ]
            return web.json_response({"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": scored}})
        ids = [*self.tokenizer.encode(self.text), *self.tokenizer.eos_ids][: body["sampling_params"]["max_new_tokens"]]
        if not body["stream"]:
            whole = self._generated(prompt, ids, 0, is_last=True)
            whole["meta_info"] |= self._masks(body, ids)
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in range(1, len(ids) + 1):
            start = end - 1 if self.incremental else 0
            chunk = self._generated(prompt, ids[:end], start, is_last=end == len(ids))
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _generated(self, prompt: list[int], ids: list[int], start: int, *, is_last: bool) -> dict[str, Any]:
        finish = {"type": "stop" if ids[-1] in self.tokenizer.eos_ids else "length", "matched": ids[-1]}
        pairs: list[Any] = [[-0.25, token, None] for token in ids[start:]]
        meta: dict[str, Any] = {
            "finish_reason": finish if is_last else None,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 2,
            "output_token_logprobs": [["x"]] if self.odd_logprobs else pairs,
            "weight_version": self.weight_version,
        }
        return {"text": "", "output_ids": ids[start:], "meta_info": meta, "prompt_token_ids": prompt}

    def _choice(self, index: int, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        ids = [*self.tokenizer.encode(self.text), *self.tokenizer.eos_ids][: body.get("max_tokens") or 999]
        ended = ids[-1] in self.tokenizer.eos_ids
        message = {
            "role": "assistant",
            "content": self.text if ended else "",
            "reasoning_content": "Hm." if ended else None,
        }
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": "stop" if ended else "length",
            "matched_stop": ids[-1] if ended else None,
            "sampled": ids,
        }
        if self.strips_fields:
            return choice
        ids = ids if self.odd_ids is None or len(ids) == 1 else self.odd_ids  # a probe of one token goes well
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = prompt
        if body.get("return_token_ids"):
            choice["response_token_ids"] = ids
        if body.get("return_meta_info") and body.get("logprobs"):
            pairs: list[Any] = [[-0.25, token, None] for token in ids]
            choice["meta_info"] = {
                "output_token_logprobs": [["x"]] if self.odd_logprobs else pairs,
                "weight_version": self.weight_version,
            } | ({"weight_versions": self.spans} if self.spans is not None else {})
            choice["meta_info"] |= self._masks(body, ids)
        if body.get("logprobs"):
            texts = [self.tokenizer.decode([token]) if 0 <= token < self.tokenizer.num_ids else "" for token in ids]
            shown = [
                {"token": text, "bytes": list(text.encode()), "logprob": -0.25, "top_logprobs": []} for text in texts
            ]
            choice["logprobs"] = {"content": shown}
        return choice


@asynccontextmanager
async def sglang_server(fake: FakeSglang) -> AsyncGenerator[str, None]:
    async with serving(fake.app()) as url:
        yield url


@asynccontextmanager
async def text_server(status: int = 200) -> AsyncGenerator[str, None]:
    """An OpenAI-compatible server that returns text and nothing more."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "plain"}]})

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("stream"):
            return _error("no streams here")
        said = body["messages"][-1]["content"]
        message = {"role": "assistant", "content": f"You said {said}."}
        choices = [{"index": i, "message": message, "finish_reason": "stop"} for i in range(body.get("n") or 1)]
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        return web.json_response({"id": "x", "model": "plain", "choices": choices, "usage": usage}, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    async with serving(app) as url:
        yield url


def _error(message: str) -> web.Response:
    return web.json_response(
        {"object": "error", "message": message, "type": "BadRequestError", "code": 400}, status=400
    )
