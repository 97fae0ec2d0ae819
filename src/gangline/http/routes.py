"""A route, as it is served and described, and the door in front of all routes of a service.

Every request is asked the same, in this order: the host and page that it is for, the control token, a method and path
that exist, query parameters that the route has, a body of its type.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from aiohttp import web
from aiohttp.typedefs import Handler

from gangline import __version__
from gangline.domain.errors import MethodNotAllowed, NotFound, Unauthorized
from gangline.http.audit import Actions, audited, given_token
from gangline.http.negotiation import JSON, RECORD_TYPES, answer_json
from gangline.http.problems import in_problems
from gangline.http.query import Query, refuse_unknown
from gangline.http.same_origin import OwnNames, require_json

__all__ = ["HEALTH", "Door", "Route", "json_route"]

_OWN = "/v1/"
"""Below it unknown query parameters are refused. Other systems' routes, and probes, may send more than is read."""


@dataclass(frozen=True)
class Route:
    """One route."""

    method: Literal["GET", "POST", "DELETE", "*"]
    path: str
    handler: Handler
    summary: str
    opened_by: Literal["control", "session", "nobody"] = "control"
    """`session`: the handler itself asks for the session's key. `nobody`: whoever asks is answered."""
    body: Any = None
    """Type of the request's body: a pydantic model, a struct, a list of them, or None."""
    body_type: str = JSON
    """Media type that is taken beside JSON; empty takes any."""
    answer: Any = None
    """Type of the answer; None for an object without a type of its own."""
    answer_types: tuple[str, ...] = RECORD_TYPES
    query: tuple[Query, ...] = ()
    routine: bool = False
    """Traffic of nodes, which is no action of anybody's."""
    errors: tuple[int, ...] = (400, 401)


json_route = partial(Route, answer_types=(JSON,))
"""Route in the form of another system, which speaks JSON alone."""


class Door:
    """Checks every request to a service's own routes, answers errors as problems, and writes actions down.

    control_token: None asks for nothing (then listen on loopback only).
    names: names of the service; requests for others, and from web pages of others, are refused.
    actions: log of changes and refusals.
    """

    def __init__(self, control_token: str | None, names: OwnNames, actions: Actions | None = None) -> None:
        self._expected = None if control_token is None else control_token.encode()
        self._names = names
        self._actions = actions

    def served(self, routes: Iterable[Route]) -> list[web.RouteDef]:
        """The routes behind the door. Other methods of their paths are answered 405, but for agents' routes."""
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
        """The answer to all paths below `root` that no earlier route has: 404."""
        path = f"{root}/{{path:.*}}"
        return web.route("*", path, self._opening(Route("*", path, _no_route, "", body_type="", routine=True)))

    def _opening(self, route: Route) -> Handler:
        handler = in_problems(self._checked(route))
        if self._actions is None or route.opened_by != "control":
            return handler
        return audited(handler, self._actions, routine=route.routine)

    def _checked(self, route: Route) -> Handler:
        is_strict = route.path.startswith(_OWN) and route.method != "*"

        async def handler(request: web.Request) -> web.StreamResponse:
            if route.opened_by == "control":
                self._names.check(request)
                self._check_token(request)
            if is_strict and request.query_string:
                refuse_unknown(request, route.query)
            if route.body_type and route.opened_by != "nobody":
                require_json(request, route.body_type)
            return await route.handler(request)

        return handler

    def _check_token(self, request: web.Request) -> None:
        """Raises: Unauthorized."""
        given = given_token(request).encode("utf-8", "surrogateescape")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise Unauthorized("the control token is missing or wrong; send `Authorization: Bearer TOKEN`.")


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
