"""Routes of the engines behind a node: added, removed and cleared while sessions run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.errors import NotFound
from gangline.domain.ids import ROLE_PATTERN
from gangline.domain.node_views import BackendView, DecodedIds, IdsToDecode
from gangline.models.engines.times import engine_times
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.backends.engine import BackendSpec
from gangline.settings.machine import read_secret
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.query import Flag, Text
from gangline.wire.http.routes import SUBJECT, Route


class BackendRequest(BaseModel):
    """Body of `POST /v1/backends`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://[^\s/]+")
    """URL of a running engine."""
    kind: str = "auto"
    """Name of the engine plug-in to use; `auto` asks the engine."""
    label: str | None = None
    """Host name of where it runs: a node prefers backends with its own. None: determined from the addresses of
    `url`."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the node's environment variable with the engine's key; never the key itself."""
    options: dict[str, Any] = {}
    """Options of the plug-in, such as `tokenizer`, and `parsers` for any plug-in, such as `{"thinking": "qwen3",
    "tools": "hermes"}`."""
    role: str | None = Field(default=None, pattern=ROLE_PATTERN)
    """The role whose calls it answers from now on; None: the policy's."""


class BackendRoutes:
    """`keep`: called after each change with the remaining engines."""

    def __init__(self, backends: BackendsByRole, keep: Callable[[Sequence[BackendSpec]], Awaitable[None]]) -> None:
        self._backends = backends
        self._keep = keep

    def routes(self) -> list[Route]:
        one = "/v1/backends/{backend}"
        return [
            Route("GET", "/v1/backends", self.all, "The engines behind the node, and their state.",
                  answer=list[BackendView], query=(_TIMES,)),
            Route("POST", "/v1/backends", self.add, "Probe a running engine and add it.", body=BackendRequest,
                  answer=BackendView, errors=(400, 401, 409, 502, 503)),
            Route("DELETE", "/v1/backends", self.clear, "Take away all of the policy, or of a role; calls wait.",
                  query=(_DRAIN, _ROLE), errors=(400, 401, 404)),
            Route("GET", one, self.view, "One of them.", answer=BackendView, errors=(400, 401, 404)),
            Route("DELETE", one, self.remove, "Take it away.", query=(_DRAIN,), errors=(400, 401, 404)),
            Route("POST", "/v1/detokenize", self.detokenize, "The text of ids, by an engine with their tokenizer.",
                  body=IdsToDecode, answer=DecodedIds, routine=True, errors=(400, 401, 404, 502, 503)),
        ]  # fmt: skip

    async def all(self, request: web.Request) -> web.StreamResponse:
        views = self._backends.views()
        return answer(request, await asyncio.gather(*map(_timed, views)) if _TIMES.read(request) else views)

    async def view(self, request: web.Request) -> web.StreamResponse:
        wanted = path_id(request, "backend")
        found = next((view for view in self._backends.views() if view.backend_id == wanted), None)
        if found is None:
            raise NotFound(f"no backend {wanted!r}; GET /v1/backends lists them.")
        return answer(request, found)

    async def add(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_record(request, BackendRequest)
        SUBJECT.set(wanted.url)
        spec = BackendSpec(wanted.url, wanted.kind, wanted.label, wanted.api_key_env, wanted.options, wanted.role)
        added = await self._backends.add(spec)
        await self._keep(self._backends.members())
        return answer(request, added)

    async def remove(self, request: web.Request) -> web.StreamResponse:
        drain = _DRAIN.read(request)
        async with self._kept_whatever_becomes_of_it():
            await self._backends.remove(path_id(request, "backend"), drain=drain)
        return answer(request, {})

    async def clear(self, request: web.Request) -> web.StreamResponse:
        drain, role = _DRAIN.read(request), _ROLE.read(request)
        async with self._kept_whatever_becomes_of_it():
            await self._backends.clear(role or None, drain=drain)
        return answer(request, {})

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_record(request, IdsToDecode)
        engine = self._backends.with_tokenizer(wanted.tokenizer_digest)
        if engine is None:
            raise NotFound(f"no healthy engine has the tokenizer {wanted.tokenizer_digest!r}.")
        return answer(request, DecodedIds(text=await engine.detokenize(wanted.ids)))

    @asynccontextmanager
    async def _kept_whatever_becomes_of_it(self) -> AsyncGenerator[None]:
        """Store the members even if the client disconnects: a drain may outlast it, and a draining engine is no longer
        one."""
        try:
            yield
        finally:
            await self._keep(self._backends.members())


async def _timed(view: BackendView) -> BackendView:
    key = view.api_key_env and read_secret(view.api_key_env)
    return msgspec.structs.replace(view, times=await engine_times(view.url, key))


_TIMES = Flag("times", "1: with the engines' own times, which each is asked for.")
_ROLE = Text("role", "The role whose engines are taken away; left out: those of the policy.")
_DRAIN = Flag("drain", "0: at once; 1: once its calls have ended.", default=True)
