"""An engine server without a model: a real tokenizer, chat template and protocol, with replies from a script.

`gangline engine --scripted FILE` starts it through the entry point `gangline.engine_servers: scripted`; tests use
`scripted_server`. The same request always gets the same ids, log-probs and tool-call ids.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.models.engine_server.app import create_app, serving
from gangline.models.engine_server.sampler import (
    FinishReason,
    PauseMode,
    SampledToken,
    SampleRequest,
)
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.parsing.parser import Parsers
from gangline.serving.scripted.faults import (
    current_faults,
    fault_middleware,
    read_faulty_body,
    refuse_tools,
)
from gangline.serving.scripted.script import Reply, Script, load_script
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
