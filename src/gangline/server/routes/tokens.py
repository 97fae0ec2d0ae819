"""The routes of tokens: created, listed, rotated and revoked by an admin."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from aiohttp import web

from gangline.domain.tenancy import DEFAULT_TENANT, TENANT_PATTERN, NewToken, Role, TokenList, TokenView
from gangline.server.service.core import RolloutService
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.routes import SUBJECT, Route

Tenant = Annotated[str, msgspec.Meta(pattern=TENANT_PATTERN)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class NewTokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tokens`."""

    role: Role
    tenant: Tenant = DEFAULT_TENANT
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Its purpose."""
    expires_in_s: _Seconds | None = None
    """None: it does not expire."""


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tokens/{token}/rotate`."""

    grace_s: _Seconds = 0.0
    """How long the present secret stays valid."""
    expires_in_s: _Seconds | None = None
    """None: as before."""


class TokenRoutes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def listed(self, request: web.Request) -> web.Response:
        tokens = self._service.tokens.stored
        return answer(request, TokenList(tokens=tuple(await tokens.database.query(tokens.all))))

    async def create(self, request: web.Request) -> web.Response:
        wanted, now, tokens = await read_record(request, NewTokenRequest), time.time(), self._service.tokens.stored
        new = (wanted.role, wanted.tenant, wanted.note, _at(now, wanted.expires_in_s), now)
        return await self._changed(request, await tokens.database.run(tokens.create, *new))

    async def rotate(self, request: web.Request) -> web.Response:
        wanted, now, tokens = await read_record(request, RotateRequest), time.time(), self._service.tokens.stored
        changes = (path_id(request, "token_id"), wanted.grace_s, _at(now, wanted.expires_in_s), now)
        return await self._changed(request, await tokens.database.run(tokens.rotate, *changes))

    async def revoke(self, request: web.Request) -> web.Response:
        tokens = self._service.tokens.stored
        view = await tokens.database.run(tokens.revoke, path_id(request, "token_id"), time.time())
        await self._service.tokens.changed()
        return answer(request, view)

    async def _changed(self, request: web.Request, new: NewToken) -> web.Response:
        SUBJECT.set(f"token {new.view.token_id} ({new.view.role}, {new.view.tenant})")
        await self._service.tokens.changed()
        response = answer(request, new)
        response.headers["Cache-Control"] = "no-store"
        return response

    def routes(self) -> list[Route]:
        one, errors = "/v1/tokens/{token_id}", (400, 401, 403, 404)
        return [
            Route("GET", "/v1/tokens", self.listed, "Tokens, without their secrets.", answer=TokenList,
                  errors=(401, 403)),
            Route("POST", "/v1/tokens", self.create, "Create a token. Its secret is in this answer alone.",
                  body=NewTokenRequest, answer=NewToken, errors=(400, 401, 403)),
            Route("POST", f"{one}/rotate", self.rotate, "Give a token a new secret.", body=RotateRequest,
                  answer=NewToken, errors=(*errors, 409)),
            Route("DELETE", one, self.revoke, "Revoke a token.", answer=TokenView, errors=errors),
        ]  # fmt: skip


def _at(now: float, in_s: float | None) -> float | None:
    return None if in_s is None else now + in_s
