"""The application: routes over a `RolloutService`, behind the control token."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from gangline.server.access import Guard
from gangline.server.parts import ServerPart, ServerPlace, server_parts
from gangline.server.routes.annotations import AnnotationRoutes
from gangline.server.routes.events import EventRoutes
from gangline.server.routes.find import FindRoutes
from gangline.server.routes.forks import ForkRoutes
from gangline.server.routes.metrics import MetricsRoutes
from gangline.server.routes.nodes import NodeRoutes
from gangline.server.routes.page import PageRoutes
from gangline.server.routes.regrading import Regrading, RegradingRoutes
from gangline.server.routes.sessions import CallerSessionRoutes, CallerSessions
from gangline.server.routes.tasks import UserRoutes
from gangline.server.routes.tenants import TenantRoutes
from gangline.server.routes.tokens import TokenRoutes
from gangline.server.routes.views import ViewRoutes
from gangline.server.service.core import RolloutService
from gangline.server.service.finder import Finder
from gangline.server.service.opened import OpenedSessions
from gangline.server.service.running import RunningSessions
from gangline.server.service.token_texts import TokenTexts
from gangline.store.audit import ActionLog
from gangline.wire.http.openapi import described
from gangline.wire.http.routes import HEALTH, Door, Route
from gangline.wire.http.same_origin import OwnNames
from gangline.wire.http.visitors import Visitors

TITLE = "Gangline rollout server"
MAX_TASK_BYTES = 64 * 1024**2
MAX_RESULT_BYTES = 1024**3


def create_app(
    service: RolloutService,
    *,
    control_token: str | None,
    names: OwnNames | None = None,
    parts: Sequence[ServerPart] | None = None,
    actions: ActionLog | None = None,
    visitors: Visitors | None = None,
    index_path: Path | None = None,
    data_dir: Path | None = None,
    max_task_bytes: int = MAX_TASK_BYTES,
    max_result_bytes: int = MAX_RESULT_BYTES,
    keep_alive_s: float = 15.0,
) -> web.Application:
    """Build the application. It neither starts nor stops the service.

    control_token: required on every route except /health. None requires nothing (then listen on loopback only). names:
    names under which the server is reached. None is loopback. Requests for other names, and from web pages, are
    refused. parts: parts of wings, whose owner runs their work. None creates the installed ones. actions: the log of
    every change and every rejected request. visitors: signed-in browsers. None keeps them while the application lives.
    index_path: the file for the index of Find. None disables Find. data_dir: for parts created here. max_task_bytes,
    max_result_bytes: limits of a request's body. keep_alive_s: interval of comments on an idle event stream.
    """
    visitors = visitors or Visitors(secrets.token_bytes(32), control_token)
    running = RunningSessions(service)
    opened = OpenedSessions(service, running, TokenTexts(service))
    finder = Finder(service, index_path)
    routes = all_routes(
        service,
        visitors=visitors,
        opened=opened,
        running=running,
        finder=finder,
        control_token=control_token,
        parts=parts,
        data_dir=data_dir,
        max_task_bytes=max_task_bytes,
        max_result_bytes=max_result_bytes,
        keep_alive_s=keep_alive_s,
    )
    door = Door(control_token, names or OwnNames(), actions, visitors, Guard(service))
    app = web.Application(middlewares=[service.metrics.middleware()])
    app.add_routes([*door.served(routes), door.beyond()])

    async def close(_app: web.Application) -> None:
        await opened.close()
        await finder.close()

    app.on_cleanup.append(close)
    return app


def all_routes(
    service: RolloutService,
    *,
    control_token: str | None = None,
    parts: Sequence[ServerPart] | None = None,
    data_dir: Path | None = None,
    visitors: Visitors | None = None,
    running: RunningSessions | None = None,
    finder: Finder | None = None,
    opened: OpenedSessions | None = None,
    max_task_bytes: int = MAX_TASK_BYTES,
    max_result_bytes: int = MAX_RESULT_BYTES,
    keep_alive_s: float = 15.0,
) -> list[Route]:
    """Every route served, in the order of the API description."""
    visitors = visitors or Visitors(secrets.token_bytes(32), control_token)
    running = running or RunningSessions(service)
    if parts is None:
        parts = server_parts(ServerPlace(service, control_token, data_dir, max_task_bytes, max_result_bytes))
    routes = [
        *UserRoutes(service, max_task_bytes=max_task_bytes).routes(),
        *ViewRoutes(opened or OpenedSessions(service, running, TokenTexts(service))).routes(),
        *AnnotationRoutes(service).routes(),
        *FindRoutes(finder or Finder(service, None)).routes(),
        *EventRoutes(service, running, keep_alive_s=keep_alive_s).routes(),
        *NodeRoutes(service, max_result_bytes=max_result_bytes).routes(),
        *CallerSessionRoutes(CallerSessions(service)).routes(),
        *ForkRoutes(service).routes(),
        *RegradingRoutes(Regrading(service)).routes(),
        *MetricsRoutes(service).routes(),
        *TokenRoutes(service).routes(),
        *TenantRoutes(service).routes(),
        *PageRoutes(visitors).routes(),
        *(route for part in parts for route in part.routes()),
        HEALTH,
    ]
    return described(routes, TITLE)
