"""One request to a raw generate route, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from gangline.domain.errors import EngineMalformed
from gangline.models.engines.generate.wire import GenerateAsk, GenerateRoute, Sampled
from gangline.models.engines.http import EngineHttp


class GenerateCalls:
    """All methods may raise EngineUnavailable, EngineRefused, ContextOverflow."""

    def __init__(self, http: EngineHttp) -> None:
        self.http = http
        self.url = http.url

    async def sample(self, route: GenerateRoute, ask: GenerateAsk) -> Sampled:
        sampled = route.read(await self.http.post(route.path, route.body(ask), ask.session_id), self.url)
        if sampled is None or sampled.finish_reason is None:
            raise EngineMalformed(f"engine {self.url} answered without a finish reason")
        return sampled

    async def chunks(self, route: GenerateRoute, ask: GenerateAsk) -> AsyncGenerator[Sampled, None]:
        """Closing it early cancels the call in the engine."""
        async with aclosing(self.http.events(route.path, route.body(ask), ask.session_id)) as reads:
            async for events in reads:
                for data in events:
                    sampled = route.read(data, self.url)
                    if sampled is not None:
                        yield sampled
