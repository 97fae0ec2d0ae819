"""Faults of a scripted engine that occur outside token sampling.

A middleware looks up the script's reply to a model call and applies its faults. Faults that the sampler must apply
(hang, drop after k tokens, NaN) reach it through `current_faults`. Occurrences of a fault are counted per rule and
request content, so they do not depend on other clients.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gangline.models.engine_server.wire import ApiError, encode
from gangline.models.language.contract import ChatTokenizer
from gangline.serving.scripted.script import Faults, Script

_MODEL_CALLS = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"})
_CUT_OFF = b'{"id": "chatcmpl-scripted", "choices": [{"index": 0, "mess'


class ActiveFaults(msgspec.Struct, frozen=True):
    """The faults of the model call that the current task answers."""

    faults: Faults
    disconnect: Callable[[], None]
    """Closes the client's connection immediately."""


current_faults: ContextVar[ActiveFaults | None] = ContextVar("current_faults", default=None)


def fault_middleware(script: Script, tokenizer: ChatTokenizer) -> Middleware:
    strikes: Counter[bytes] = Counter()

    @web.middleware
    async def misbehave(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _MODEL_CALLS:
            return await handler(request)
        body = await request.read()
        faults = _faults(script, tokenizer, body)
        if faults.times is not None:
            key = hashlib.blake2b(faults.model_dump_json().encode() + body, digest_size=16).digest()
            strikes[key] += 1
            if strikes[key] > faults.times:
                faults = _lasting(faults)
        if faults.status is not None:
            return _refusal(faults.status, faults.retry_after_s)
        if faults.garbage:
            return _garbage(body)
        transport = request.transport
        current_faults.set(ActiveFaults(faults, transport.abort if transport else lambda: None))
        return await handler(request)

    return misbehave


@web.middleware
async def refuse_tools(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests with callable tools, as vLLM without a tool parser does."""
    if request.path == "/v1/chat/completions":
        fields = _fields(await request.read())
        if fields.get("tools") and fields.get("tool_choice") != "none":
            message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            return web.json_response(ApiError(message).body(), status=400)
    return await handler(request)


async def read_faulty_body(request: web.Request) -> bytes:
    """The body as seen by an engine that does not know all fields."""
    body = await request.read()
    active = current_faults.get()
    dropped: set[str] = set()
    if active is not None and active.faults.no_token_ids:
        dropped |= {"return_token_ids", "return_weight_versions"}
    if active is not None and active.faults.ignore_prompt_ids:
        dropped.add("kv_transfer_params")
    if not dropped:
        return body
    return encode({name: value for name, value in _fields(body).items() if name not in dropped})


def _faults(script: Script, tokenizer: ChatTokenizer, body: bytes) -> Faults:
    """Faults of the script's reply to `body`; none if a script could not answer the request."""
    fields = _fields(body)
    messages, tools = fields.get("messages"), fields.get("tools")
    try:
        if messages is None:
            prompt = fields.get("prompt", fields.get("token_ids"))
            text = prompt if isinstance(prompt, str) else tokenizer.decode(cast("list[int]", prompt or []))
            messages = [{"role": "user", "content": text}]
        known = msgspec.convert(messages, list[dict[str, Any]])
        return script.reply_to(known, msgspec.convert(tools, list[dict[str, Any]] | None)).faults
    except (msgspec.ValidationError, OverflowError, TypeError):
        return Faults()


def _fields(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _lasting(faults: Faults) -> Faults:
    """The remaining `faults` after counted ones are used up."""
    spent = {"status": None, "drop_connection": None, "garbage": False, "hang": False}
    return faults.model_copy(update=spent)


def _refusal(status: int, retry_after_s: float | None) -> web.Response:
    error = ApiError(f"scripted fault: {status}", status=status, type="ScriptedFault")
    headers = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:g}"}
    return web.json_response(error.body(), status=status, headers=headers)


def _garbage(body: bytes) -> web.Response:
    if _fields(body).get("stream"):
        return web.Response(body=b"data: " + _CUT_OFF + b"\n\n", content_type="text/event-stream")
    return web.Response(body=_CUT_OFF, content_type="application/json")
