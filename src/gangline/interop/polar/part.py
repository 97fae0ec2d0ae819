"""Polar's part of the server: its routes, its gateway dispatcher, and its callback format."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from gangline.interop.polar.dashboard import DashboardRoutes
from gangline.interop.polar.dispatch import PolarDispatch
from gangline.interop.polar.nodes import PolarNodeRoutes
from gangline.interop.polar.routes import PolarRoutes, polar_callback
from gangline.server.parts import CallbackBody, ServerPart, ServerPlace
from gangline.server.routes.events import EventRoutes
from gangline.server.service.running import RunningSessions
from gangline.wire.http.routes import Route

_KEEP_ALIVE_S = 15.0


class PolarPart(ServerPart):
    def __init__(self, place: ServerPlace) -> None:
        super().__init__(place)
        self._dispatch = PolarDispatch(place.service, place.control_token)

    def routes(self) -> Sequence[Route]:
        service = self.place.service
        events = EventRoutes(service, RunningSessions(service), keep_alive_s=_KEEP_ALIVE_S)
        return [
            *PolarRoutes(service, max_task_bytes=self.place.max_task_bytes).routes(),
            *DashboardRoutes(service, events).routes(),
            *PolarNodeRoutes(service, self._dispatch, max_result_bytes=self.place.max_result_bytes).routes(),
        ]

    def work(self, own_url: str) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._dispatch.send_forever(own_url)]

    def callbacks(self) -> Mapping[str, CallbackBody]:
        return {"polar": partial(polar_callback, self.place.service)}
