"""The record of a route, for serving and describing it, and `Door`, which checks every request of a service.

Every request is asked the same, in this order: the host and page that it is for, the control token, a method and path
that exist, query parameters that the route has, a body of its type. Every request that changes something, and every one
that was refused at the door, is an action of the log.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from gangline import __version__
from gangline.domain.errors import ForeignRequest, MethodNotAllowed, NotFound, ReadOnly, Unauthorized
from gangline.domain.tenancy import FIRST_ADMIN, Principal
from gangline.wire.http.negotiation import JSON, RECORD_TYPES, answer_json, prefers
from gangline.wire.http.problems import in_problems
from gangline.wire.http.query import Query, refuse_unknown
from gangline.wire.http.same_origin import OwnNames, require_json
from gangline.wire.http.visitors import Visitors

_READING = ("GET", "HEAD")
_OWN = "/v1/"
"""Below it unknown query parameters are refused. Other systems' routes, and probes, may send unused ones."""

REFUSED = (401, 403)
"""Statuses of requests without the token, or from another site's web page."""

SUBJECT: ContextVar[str | None] = ContextVar("subject", default=None)
"""Object of a request whose path does not name it; set by the handler."""

VISITOR: ContextVar[str | None] = ContextVar("visitor", default=None)
"""Name of the signed-in browser that sent a request; set by `Door`."""

PRINCIPAL: ContextVar[Principal] = ContextVar("principal", default=FIRST_ADMIN)
"""The caller of a request; set by `Door`."""

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


@dataclass(frozen=True)
class Route:
    """One route."""

    method: Literal["GET", "POST", "DELETE", "*"]
    path: str
    handler: Handler
    summary: str
    opened_by: Literal["control", "session", "link", "nobody"] = "control"
    """`control`: the control token, or a signed-in browser. `session`: the handler checks the session's key. `link`:
    the handler checks a sign-in link. `nobody`: no authentication.
    """
    body: Any = None
    """Type of the request's body: a pydantic model, a struct, a list of them, or None."""
    body_type: str = JSON
    """Media type accepted in addition to JSON; empty: any."""
    answer: Any = None
    """Type of the answer; None for an object without a declared type."""
    answer_types: tuple[str, ...] = RECORD_TYPES
    query: tuple[Query, ...] = ()
    password_too: bool = False
    """Whether the control token may be the password of the URL. Clients of Polar and ProRL Agent have no other place
    for it in most of their requests. Other routes refuse it: a browser may remember a password and send it unasked.
    """
    doorstep: Handler | None = None
    """Answers a browser that opens this route as a page but is not let in: it is not signed in, or it follows another
    site's link, with which it withholds its cookie. None: the problem as JSON, as for programs.
    """
    routine: bool = False
    """Routine traffic of nodes, which is not logged as an action."""
    errors: tuple[int, ...] = (400, 401)


json_route = partial(Route, answer_types=(JSON,), password_too=True)
"""Route in the form of another system, which uses only JSON."""


class OtherTokens(Protocol):
    """Tokens beside the control token, and their rights."""

    async def known(self, token: str) -> Principal | None: ...

    async def still(self, principal: Principal) -> bool: ...

    async def check(self, principal: Principal, request: web.Request, route: Route) -> None: ...


class Door:
    """Checks every request to a service's own routes, answers errors as problems, and logs actions.

    control_token: None: no authentication (then listen on loopback only).
    names: host names of the service; requests for other hosts, and from other hosts' web pages, are refused.
    actions: log of changes and refusals.
    visitors: browsers that may sign in instead of sending the token; None: no sign-in.
    tokens: None: the control token alone opens anything.
    """

    def __init__(
        self,
        control_token: str | None,
        names: OwnNames,
        actions: Actions | None = None,
        visitors: Visitors | None = None,
        tokens: OtherTokens | None = None,
    ) -> None:
        self._tokens = tokens
        self._expected = None if control_token is None else control_token.encode()
        self._names = names
        self._actions = actions
        self._visitors = visitors

    def served(self, routes: Iterable[Route]) -> list[web.RouteDef]:
        """The routes with their checks. Other methods of their paths are answered with 405, except on agents'
        routes.
        """
        paths: dict[str, list[Route]] = {}
        for route in routes:
            paths.setdefault(route.path, []).append(route)
        found: list[web.RouteDef] = []
        for path, known in paths.items():
            if known[0].opened_by != "session":
                known.append(_other_method(path, [route.method for route in known]))
            found += [web.route(route.method, path, self._opening(route)) for route in known]
        return found

    def beyond(self, root: str = "") -> web.RouteDef:
        """The answer to all other paths below `root`: 404."""
        path = f"{root}/{{path:.*}}"
        return web.route("*", path, self._opening(Route("*", path, _no_route, "", body_type="", routine=True)))

    def _opening(self, route: Route) -> Handler:
        path = route.path if route.opened_by == "link" else None  # a link is a secret: logs have the route instead
        handler = in_problems(self._checked(route), path=path)
        if self._actions is None or route.opened_by not in ("control", "link"):
            return handler
        return audited(handler, self._actions, routine=route.routine, path=path)

    def _checked(self, route: Route) -> Handler:
        is_strict = route.path.startswith(_OWN) and route.method != "*"

        async def handler(request: web.Request) -> web.StreamResponse:
            if route.opened_by == "control":
                try:
                    self._names.check(request)
                    principal = await self._opened_by(request, route)
                except (ForeignRequest, Unauthorized):
                    if route.doorstep is None or not _opens_page(request):
                        raise
                    self._names.check_host(request)
                    return await route.doorstep(request)
                PRINCIPAL.set(principal)
                if self._tokens is not None and route.method != "*":
                    await self._tokens.check(principal, request, route)
            elif route.opened_by == "link":
                self._check_comes_by_link(request)
            if is_strict and request.query_string:
                refuse_unknown(request, route.query)
            if route.body_type and route.opened_by != "nobody":
                require_json(request, route.body_type)
            return await route.handler(request)

        return handler

    async def _opened_by(self, request: web.Request, route: Route) -> Principal:
        """Raises: Unauthorized, ReadOnly, ForeignRequest."""
        given = given_token(request, password_too=route.password_too)
        if self._expected is None or hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._expected):
            return FIRST_ADMIN
        if given and self._tokens is not None and (found := await self._tokens.known(given)) is not None:
            return found
        visitor = None if given or self._visitors is None else self._visitors.visitor(request)
        if visitor is None or not (self._tokens is None or await self._tokens.still(visitor.principal)):
            raise Unauthorized(
                "the token is missing, wrong, expired or revoked; send `Authorization: Bearer TOKEN`. "
                "A browser is signed in with `gangline open`."
            )
        VISITOR.set(visitor.name)
        if request.method in _READING:
            return visitor.principal
        if visitor.read_only:
            raise ReadOnly("this browser was signed in with a read-only link, which can change nothing.")
        if hdrs.ORIGIN not in request.headers:
            raise ForeignRequest("a change by a signed-in browser names its page in `Origin`.")
        return visitor.principal

    def _check_comes_by_link(self, request: web.Request) -> None:
        """A link on another site may lead to the sign-in page; only that page itself may continue.

        Raises: ForeignRequest.
        """
        if request.method in _READING:
            self._names.check_host(request)
        else:
            self._names.check(request)


def _opens_page(request: web.Request) -> bool:
    """Whether a person's browser goes there, rather than a program or a script of a page."""
    return prefers(request, "text/html") and request.headers.get("Sec-Fetch-Mode", "navigate") == "navigate"


def _other_method(path: str, methods: Sequence[str]) -> Route:
    allow = ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise MethodNotAllowed(f"{request.path} does not take {request.method}; it takes {allow}.", allow=allow)

    return Route("*", path, refuse, "", body_type="", routine=True)


async def _no_route(request: web.Request) -> web.StreamResponse:
    raise NotFound(f"no route {request.method} {request.path[:200]}; GET /openapi.json lists the routes.")


async def _health(_request: web.Request) -> web.Response:
    return answer_json({"status": "ok", "version": __version__})


HEALTH = json_route("GET", "/health", _health, "Whether the service answers.", opened_by="nobody", errors=())
