"""The common part of engine clients that talk to one server: its connections, what the last probe found, its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from gangline.domain.errors import EngineError
from gangline.models.engines.contract import EngineCapabilities, EngineDelta, EngineReply, EngineRequest, whole_deltas
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.replies import decode


class EngineClient(ABC):
    """Implements a part of `Engine`. It owns the connections."""

    def __init__(self, http: EngineHttp, model: str | None) -> None:
        """model: served name; None takes the first that the engine lists."""
        self._http = http
        self.url = http.url
        self._model = model
        self._capabilities: EngineCapabilities | None = None
        self._probing = asyncio.Lock()

    @abstractmethod
    async def probe(self) -> EngineCapabilities: ...

    @abstractmethod
    async def chat(self, request: EngineRequest) -> EngineReply: ...

    async def capabilities(self) -> EngineCapabilities:
        async with self._probing:
            return self._capabilities or await self.probe()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """The whole reply, as one delta per choice."""
        for delta in whole_deltas(await self.chat(request)):
            yield delta

    async def check_health(self, timeout_s: float) -> None:
        await self._http.check_health(timeout_s)

    async def close(self) -> None:
        await self._http.close()

    async def _model_name(self) -> str:
        if self._model is None:
            self._model = (await self._http.served_model(self._model)).id
        return self._model


async def server_version(http: EngineHttp, *paths: str) -> str:
    """The `version` that the first of these routes to answer gives; empty where none does."""
    for path in paths:
        try:
            return str(decode(await http.get(path), dict[str, Any], http.url).get("version", ""))
        except EngineError:
            continue
    return ""
