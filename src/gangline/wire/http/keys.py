"""Authentication of a service with one key for all clients, separate from the control token of a server or node."""

from __future__ import annotations

import hmac

from aiohttp import web

from gangline.domain.errors import Unauthorized
from gangline.wire.http.routes import given_token


def require_key(request: web.Request, key: str | None) -> None:
    """key: the bearer token that every client must send; None: no authentication. Raises: Unauthorized."""
    given = given_token(request, password_too=False).encode("utf-8", "surrogateescape")
    if key is not None and not hmac.compare_digest(given, key.encode()):
        raise Unauthorized("send this service's key as `Authorization: Bearer KEY`.")
