"""The application: routes over a `RolloutService`, behind the control token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from gangline import __version__
from gangline.domain.errors import Unauthorized
from gangline.same_origin import JSON, OwnNames, require_json
from gangline.server.acting import acting
from gangline.server.caller_sessions import CallerSessionRoutes, CallerSessions
from gangline.server.compat_polar import PolarRoutes
from gangline.server.compat_polar_dispatch import PolarDispatch
from gangline.server.compat_polar_nodes import PolarNodeRoutes
from gangline.server.compat_prorl import ProrlRoutes
from gangline.server.compat_prorl_nodes import NodeEngines
from gangline.server.compat_prorl_templates import no_templates, templates_in
from gangline.server.event_routes import EventRoutes
from gangline.server.metrics_routes import MetricsRoutes
from gangline.server.node_routes import NodeRoutes
from gangline.server.openapi import describe
from gangline.server.problems import problems
from gangline.server.routing import Route, answer_json
from gangline.server.service import RolloutService
from gangline.server.user_routes import UserRoutes
from gangline.store.actions import ActionLog

__all__ = ["all_routes", "create_app"]

MAX_TASK_BYTES = 64 * 1024**2
MAX_RESULT_BYTES = 1024**3


def create_app(
    service: RolloutService,
    *,
    control_token: str | None,
    names: OwnNames | None = None,
    handlers_folder: Path | None = None,
    engines: NodeEngines | None = None,
    polar: PolarDispatch | None = None,
    actions: ActionLog | None = None,
    max_task_bytes: int = MAX_TASK_BYTES,
    max_result_bytes: int = MAX_RESULT_BYTES,
    keep_alive_s: float = 15.0,
) -> web.Application:
    """Build the application; it neither starts nor stops the service.

    control_token: asked for on every route but /health; None asks for nothing (then listen on loopback only).
    names: under which the server is reached; None is loopback. Requests for others, and of web pages, are refused.
    handlers_folder: task templates by data source, for `/process`.
    engines: what `/add_llm_server` adds; its owner hands them to nodes that join later.
    polar: what sends sessions to Polar's gateways; its owner lets it.
    actions: where every change, and every refusal, is written down.
    max_task_bytes, max_result_bytes: of one request's body.
    keep_alive_s: between comments on an event stream on which nothing happens.
    """
    routes = all_routes(
        service,
        control_token=control_token,
        handlers_folder=handlers_folder,
        engines=engines,
        polar=polar,
        max_task_bytes=max_task_bytes,
        max_result_bytes=max_result_bytes,
        keep_alive_s=keep_alive_s,
    )
    open_handlers = frozenset(route.path for route in routes if route.open)
    body_types = {(route.method, route.path): route.body_type for route in routes}
    guarding = [problems, _guard(control_token, names or OwnNames(), open_handlers, body_types)]
    if actions is not None:
        routine = {(route.method, route.path) for route in routes if route.routine}
        guarding.insert(0, acting(actions, routine, _given_token))
    app = web.Application(middlewares=[service.metrics.middleware(), *guarding])
    app.add_routes([web.route(route.method, route.path, route.handler) for route in routes])
    return app


def all_routes(
    service: RolloutService,
    *,
    control_token: str | None = None,
    handlers_folder: Path | None = None,
    engines: NodeEngines | None = None,
    polar: PolarDispatch | None = None,
    max_task_bytes: int = MAX_TASK_BYTES,
    max_result_bytes: int = MAX_RESULT_BYTES,
    keep_alive_s: float = 15.0,
) -> list[Route]:
    """Every route that is served, in the order of its description."""
    template_of = no_templates if handlers_folder is None else templates_in(handlers_folder)
    engines = engines or NodeEngines(service, control_token)
    routes = [
        *UserRoutes(service, max_task_bytes=max_task_bytes).routes(),
        *EventRoutes(service, keep_alive_s=keep_alive_s).routes(),
        *NodeRoutes(service, max_result_bytes=max_result_bytes).routes(),
        *CallerSessionRoutes(CallerSessions(service, control_token)).routes(),
        *MetricsRoutes(service).routes(),
        *PolarRoutes(service, max_task_bytes=max_task_bytes).routes(),
        *PolarNodeRoutes(
            service, polar or PolarDispatch(service, control_token), max_result_bytes=max_result_bytes
        ).routes(),
        *ProrlRoutes(service, engines, template_of, max_task_bytes=max_task_bytes).routes(),
        Route("GET", "/health", health, "Whether the server answers.", open=True, errors=()),
    ]
    described = Route("GET", "/openapi.json", _describing(lambda: describe(routes)), "This description.")
    routes.append(described)
    return routes


async def health(_request: web.Request) -> web.Response:
    return answer_json({"status": "ok", "version": __version__})


def _describing(make: Callable[[], dict[str, Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def openapi(_request: web.Request) -> web.Response:
        return answer_json(make())

    return openapi


def _guard(
    control_token: str | None,
    names: OwnNames,
    open_paths: frozenset[str],
    body_types: Mapping[tuple[str, str], str],
) -> Any:
    """A middleware: where from, with what token, and what kind of body. Inside `problems`."""
    expected = None if control_token is None else f"Bearer {control_token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in open_paths:
            return await handler(request)
        names.check(request)
        given = _given_token(request).encode("utf-8", "surrogateescape")
        if expected is not None and not hmac.compare_digest(given, expected):
            raise Unauthorized("the control token is missing or wrong; send `Authorization: Bearer TOKEN`.")
        resource = request.match_info.route.resource
        require_json(request, body_types.get((request.method, resource.canonical if resource else ""), JSON))
        return await handler(request)

    return guard


def _given_token(request: web.Request) -> str:
    """What stands for the token; Polar's clients send theirs in a header of its own."""
    polar = request.headers.get("X-Polar-Control-Token")
    return request.headers.get("Authorization", "" if polar is None else f"Bearer {polar}")
