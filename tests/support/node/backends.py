"""Scripted engines that can be killed and started again on their port."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from gangline.models.engine_server.app import serving
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer


class KillableEngine:
    """A scripted engine. `async with` starts it, and kills it if it still runs."""

    def __init__(self, script: dict[str, Any] | None = None) -> None:
        self.script = script or {}
        self.url = ""
        self.sampler: ScriptedSampler | None = None
        self._running: AsyncExitStack | None = None

    async def start(self) -> None:
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.sampler = ScriptedSampler(Script.model_validate(self.script), TinyTokenizer())
        self._running = AsyncExitStack()
        self.url = await self._running.enter_async_context(serving(create_scripted_app(self.sampler), port=port))

    async def kill(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            await running.aclose()

    async def __aenter__(self) -> KillableEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
