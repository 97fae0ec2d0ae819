"""The log of control actions: every request that changes something, and every unauthorised one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from contextvars import ContextVar
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

REFUSED = (401, 403)
"""Statuses of requests without the token, or from another site's web page."""

SUBJECT: ContextVar[str | None] = ContextVar("subject", default=None)
"""Object of a request whose path does not name it; set by the handler."""

VISITOR: ContextVar[str | None] = ContextVar("visitor", default=None)
"""Name of the signed-in browser that sent a request; set by `Door`."""

_CLIENT_LEFT = 499


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One request that changed something, or was refused because of its missing token or its origin."""

    at: float
    """Unix time, UTC, seconds."""
    where: str
    """`server`, or the node's id."""
    who: str
    """`token` and a digest of it, `page` and a digest of a signed-in browser's cookie, or `no token`."""
    address: str
    """Address of the connection's other end."""
    forwarded_for: str | None = None
    """The client's address in `X-Forwarded-For`, a header that anyone can send."""
    method: str
    path: str
    subject: str | None = None
    """The object of the action, if the path does not name it."""
    status: int
    """Status of the answer; 499 if the client disconnected before it."""


class Actions(Protocol):
    """Storage of actions. `write` blocks, can be called from any thread, and never raises."""

    where: str

    def write(self, action: Action) -> None: ...


def who(token: str | None) -> str:
    """Identifies a token without disclosing it."""
    return f"token {hashlib.sha256(token.encode(errors='replace')).hexdigest()[:8]}" if token else "no token"


def given_token(request: web.Request, *, password_too: bool) -> str:
    """The bearer token of a request, else the one in the header of Polar's clients; empty if there is none.

    password_too: whether it may be the password of the URL, `http://any:TOKEN@host`.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    match scheme.lower():
        case "":
            return request.headers.get("X-Polar-Control-Token", "")
        case "bearer":
            return token.strip()
        case "basic" if password_too:
            return _password(token.strip())
        case _:
            return ""


def _password(credentials: str) -> str:
    """Source: RFC 7617. Empty if they cannot be decoded."""
    try:
        return base64.b64decode(credentials, validate=True).decode("utf-8", "surrogateescape").partition(":")[2]
    except ValueError:
        return ""


def audited(handler: Handler, actions: Actions, *, routine: bool, path: str | None = None) -> Handler:
    """The handler, with its actions logged before they are answered; routine requests only if refused.

    Also logged if the client disconnects before the answer. path: logged in place of the request's own.
    """

    def action_of(request: web.Request, status: int) -> Action:
        return Action(
            at=time.time(),
            where=actions.where,
            who=VISITOR.get() or who(given_token(request, password_too=True)),
            address=request.remote or "",
            forwarded_for=request.headers.get("X-Forwarded-For"),
            method=request.method,
            path=path or request.path,
            subject=SUBJECT.get(),
            status=status,
        )

    async def write(request: web.Request) -> web.StreamResponse:
        SUBJECT.set(None)  # a connection's requests share one context
        VISITOR.set(None)
        changes = not routine and request.method not in ("GET", "HEAD")
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            if changes:
                left = action_of(request, _CLIENT_LEFT)
                asyncio.get_running_loop().run_in_executor(None, actions.write, left)
            raise
        if changes or response.status in REFUSED:
            await asyncio.to_thread(actions.write, action_of(request, response.status))
        return response

    return write
