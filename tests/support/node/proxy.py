"""A proxy with one session before an engine, all on loopback, for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
from aiohttp import web

from gangline.domain.completion import Completion
from gangline.domain.task import CaptureSpec
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.serving.scripted.server import scripted_server
from gangline.wire.http.listening import accepting

_OF_PROXY = ("dialects", "limits", "readers", "keep_alive_s", "body_idle_s")


class MemoryJournal:
    """Keeps what is appended; raises `failure` instead while it is set."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        self.failure: Exception | None = None

    async def append_all(self, completions: Sequence[Completion]) -> None:
        if self.failure is not None:
            raise self.failure
        self.completions += completions


@dataclass
class Proxied:
    url: str
    proxy: Proxy
    session: ModelSession
    journal: MemoryJournal
    engine: Any

    @property
    def base_url(self) -> str:
        return f"{self.url}/s/{self.session.session_id}/v1"

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **({"base_url": self.base_url, "api_key": self.session.key, "max_retries": 0} | options)
        )


@asynccontextmanager
async def served(proxy: Proxy) -> AsyncGenerator[str, None]:
    app = web.Application()
    app.add_routes(proxy.routes())
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, auto_decompress=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        assert runner.server is not None
        async with accepting(runner.server, host="127.0.0.1", port=0) as listeners:
            yield f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def proxied_engine(engine: str | Any, **options: Any) -> AsyncGenerator[Proxied, None]:
    """
    engine: the URL of one that speaks vLLM's wire, or the engine itself.
    options: of the proxy (see `_OF_PROXY`), of `CaptureSpec`, of `SessionSpec`, the rest of `ModelSession`. A client
    that vanished is given no grace.
    """
    of_proxy = {name: options.pop(name) for name in _OF_PROXY if name in options}
    engine = VllmEngine(engine) if isinstance(engine, str) else engine
    journal = options.pop("journal", None) or MemoryJournal()
    capture = {name: options.pop(name) for name in CaptureSpec.model_fields if name in options}
    given = {name: options.pop(name) for name in SessionSpec.__struct_fields__ if name in options}
    fields: dict[str, Any] = {"session_id": "s1", "attempt": 1, "key": "gls-right", "retry_grace_s": 0.0}
    spec = SessionSpec(**(fields | {"capture": CaptureSpec(**capture)} | given))
    session = ModelSession(spec, engine, journal, **options)
    proxy = Proxy(**of_proxy)
    proxy.add(session)
    try:
        async with served(proxy) as url:
            yield Proxied(url, proxy, session, journal, engine)
    finally:
        await session.fence("the test is over")
        await engine.close()


@asynccontextmanager
async def proxied(script: dict[str, Any], tokenizer: Any = "tiny", **options: Any) -> AsyncGenerator[Proxied, None]:
    async with scripted_server(script, tokenizer) as engine_url, proxied_engine(engine_url, **options) as running:
        yield running
