"""What goes into the server's log of control actions: every request that changes something, and every refused one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from gangline.server.routing import SUBJECT
from gangline.store.actions import REFUSED, Action, ActionLog, who

__all__ = ["acting"]

_CLIENT_LEFT = 499


def acting(
    actions: ActionLog,
    routine: Collection[tuple[str, str]],
    given_token: Callable[[web.Request], str],
    clock: Callable[[], float] = time.time,
) -> Any:
    """A middleware. routine: (method, path) of routes that are no action: nodes' heartbeats and results."""

    def action_of(request: web.Request, status: int) -> Action:
        scheme, _, token = given_token(request).partition(" ")
        return Action(
            at=clock(),
            where=actions.where,
            who=who(token or scheme),
            address=request.remote or "",
            forwarded_for=request.headers.get("X-Forwarded-For"),
            method=request.method,
            path=request.path,
            subject=SUBJECT.get(),
            status=status,
        )

    def counts(request: web.Request, status: int) -> bool:
        if status in REFUSED:
            return True
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        return request.method not in ("GET", "HEAD") and bool(path) and (request.method, path) not in routine

    @web.middleware
    async def write_actions(request: web.Request, handler: Handler) -> web.StreamResponse:
        SUBJECT.set(None)  # a connection's requests share one context
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            if counts(request, _CLIENT_LEFT):
                left = action_of(request, _CLIENT_LEFT)
                asyncio.get_running_loop().run_in_executor(None, actions.write, left)
            raise
        if counts(request, response.status):
            await asyncio.to_thread(actions.write, action_of(request, response.status))
        return response

    return write_actions
