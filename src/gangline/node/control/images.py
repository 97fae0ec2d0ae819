"""The route that brings an image to the node before sessions need it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.image_store import HeldImage
from gangline.wire.http.negotiation import answer, read_record
from gangline.wire.http.routes import Route


class PrefetchRequest(BaseModel):
    """Body of `POST /v1/images/prefetch`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: Annotated[str, Field(max_length=64)]
    """Name of the runtime: `docker`, `podman` or `sandbox`."""
    image: Annotated[str, Field(min_length=1, max_length=512)]
    """As a task names it."""


class ImageRoutes:
    def __init__(self, prefetch: Callable[[str, str], Awaitable[HeldImage]]) -> None:
        self._prefetch = prefetch

    async def prefetch(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_record(request, PrefetchRequest)
        return answer(request, await self._prefetch(wanted.runtime, wanted.image))

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/images/prefetch", self.prefetch,
                  "Pull an image if the node lacks it; answered when it is there.",
                  body=PrefetchRequest, answer=HeldImage, errors=(400, 401, 422, 502, 503)),
        ]  # fmt: skip
