"""An engine server without a model: a real tokenizer, chat template and protocol, with replies from a script.

`gangline engine --scripted FILE` starts it through the entry point `gangline.engine_servers: scripted`; tests use
`scripted_server`. The same request always gets the same ids, log-probs and tool-call ids.

A middleware looks up the script's reply to a model call and applies its faults. Faults that the sampler must apply
(hang, drop after k tokens, NaN) reach it through `current_faults`. Occurrences of a fault are counted per rule and
request content, so they do not depend on other clients.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gangline.domain.errors import InvalidRequest
from gangline.models.engine_server.app import create_app, serving
from gangline.models.engine_server.sampler import (
    FinishReason,
    PauseMode,
    SampledToken,
    SampleRequest,
)
from gangline.models.engine_server.wire import ApiError, encode
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.parsing.parser import Parsers
from gangline.serving.scripted.script import Faults, Reply, Script, load_script
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.serving.scripted.tokens import ReplyEncoder, scripted_logprob
from gangline.serving.scripted.tools import choose_tool
from gangline.wire.http.same_origin import OwnNames


async def serve(
    *,
    script: Path,
    tokenizer: str,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the script until cancelled. `on_ready` is called with the base URL.

    tokenizer: a folder, a Hugging Face name, `smollm2`, or `tiny` for the built-in one.

    Raises:
        InvalidRequest: the script is wrong.
        PortUnavailable: the address cannot be bound.
    """
    sampler = ScriptedSampler(load_script(script), open_tokenizer(tokenizer))
    names = OwnNames(host, allowed_hosts=allowed_hosts)
    async with serving(create_scripted_app(sampler, names=names), host=host, port=port) as base_url:
        if on_ready is not None:
            on_ready(base_url)
        await asyncio.Event().wait()


@asynccontextmanager
async def scripted_server(
    script: Script | dict[str, Any], tokenizer: str | ChatTokenizer = "tiny", parsers: Parsers | None = None
) -> AsyncGenerator[str, None]:
    """A running scripted engine on a free loopback port. Yields its base URL (without `/v1`).

    parsers: formats that it parses in its replies, by default the formats it writes; `Parsers()` leaves parsing to
        the client.
    """
    checked = script if isinstance(script, Script) else Script.model_validate(script)
    opened = open_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    async with serving(create_scripted_app(ScriptedSampler(checked, opened), parsers)) as base_url:
        yield base_url


def create_scripted_app(
    sampler: ScriptedSampler, parsers: Parsers | None = None, names: OwnNames | None = None
) -> web.Application:
    """The engine routes over `sampler`, with the faults of its script. Without a tool parser it refuses callable tools,
    as vLLM does.
    """
    parsers = sampler.parsers if parsers is None else parsers
    app = create_app(sampler, parsers=parsers, read_body=read_faulty_body, names=names)
    app.middlewares.append(fault_middleware(sampler.script, sampler.tokenizer))
    if parsers.tools is None:
        app.middlewares.append(refuse_tools)
    return app


def open_tokenizer(name: str) -> ChatTokenizer:
    if name == "tiny":
        return TinyTokenizer()
    # Imports transformers: half a second that the built-in tokenizer does not need.
    from gangline.models.language.tokenizer import load_tokenizer  # noqa: PLC0415

    return load_tokenizer(name)


class ScriptedSampler:
    """Implements `Sampler`. Sampling parameters other than lengths and stop ids have no effect."""

    def __init__(self, script: Script, tokenizer: ChatTokenizer) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.model_name = script.model
        self.context_length = script.context_length
        self.num_ids = tokenizer.num_ids
        self.returns_masks = False
        self.weight_version = script.weight_version
        self._encoder = ReplyEncoder(tokenizer)
        self.parsers = self._encoder.parsers
        self._admits = _set_event()
        self._flows = _set_event()
        self._is_idle = _set_event()
        self._num_running = 0
        self._abort = asyncio.Event()  # of the current sequences; later ones get a new event

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        await self._admits.wait()
        aborted = self._abort
        self._num_running += 1
        self._is_idle.clear()
        try:
            reply, ids = self._script_reply(request)
            for position, token_id in enumerate(ids):
                await self._delay(reply, position, aborted)
                if aborted.is_set():
                    return
                token = self._token(request, reply, position, token_id, is_last=position + 1 == len(ids))
                yield token
                if token.finish_reason is not None:
                    return
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._is_idle.set()

    async def pause(self, mode: PauseMode) -> None:
        self._admits.clear()
        if mode == "keep":
            self._flows.clear()
        elif mode == "abort":
            self._abort.set()
            self._abort = asyncio.Event()
            self._flows.set()
        else:
            await self._is_idle.wait()

    async def resume(self) -> None:
        self._flows.set()
        self._admits.set()

    async def load_weights(self, path: Path) -> None:
        """There are no weights; only checks that the folder exists."""
        if not await asyncio.to_thread(path.is_dir):
            raise InvalidRequest(f"no checkpoint folder at {path}")

    async def set_version(self, version: int) -> None:
        self.weight_version = version

    async def close(self) -> None:
        await self.pause("abort")

    def _script_reply(self, request: SampleRequest) -> tuple[Reply, list[int]]:
        """The reply for `request` and its ids: at least one, at most `max_tokens`."""
        prompt = request.prompt_ids
        messages = request.messages or [{"role": "user", "content": self.tokenizer.decode(prompt)}]
        reply = self.script.reply_to(messages, request.tools)
        calls = [choose_tool(use, request.tools) for use in reply.tool_calls]
        return reply, self._encoder.encode(reply, calls, prompt)[: request.max_tokens]

    async def _delay(self, reply: Reply, position: int, aborted: asyncio.Event) -> None:
        """Wait until this token is due: the script's pace, a pause, or a fault that never lets it come."""
        active = current_faults.get()
        drops = active is not None and active.faults.drop_connection == position
        if active is not None and drops:
            active.disconnect()
        if active is not None and (drops or active.faults.hang):
            await aborted.wait()
        await _sleep(reply.token_delay_s if position else reply.delay_s, aborted)
        await self._flows.wait()

    def _token(
        self, request: SampleRequest, reply: Reply, position: int, token_id: int, *, is_last: bool
    ) -> SampledToken:
        logprob = scripted_logprob(position, token_id) if reply.logprob is None else reply.logprob
        if reply.faults.nan_logprobs:
            logprob = math.nan
        return SampledToken(
            token_id=token_id,
            logprob=logprob,
            version=self.weight_version,
            finish_reason=self._finish_reason(request, position, token_id, is_last=is_last),
            top_logprobs=((token_id, logprob),) if request.num_top_logprobs else (),
        )

    def _finish_reason(
        self, request: SampleRequest, position: int, token_id: int, *, is_last: bool
    ) -> FinishReason | None:
        if token_id in request.stop_ids and position >= request.min_tokens:
            return "stop"
        if not is_last:
            return None
        return "stop" if token_id in self.tokenizer.eos_ids else "length"


async def _sleep(delay_s: float, aborted: asyncio.Event) -> None:
    """Sleep until the delay is over or the call is aborted. Always yields to other tasks."""
    await asyncio.sleep(0)
    if delay_s:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await aborted.wait()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


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
