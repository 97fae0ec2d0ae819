"""ProRL Agent's part of the server: its routes, and the engines that it sends to nodes."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from gangline.interop.prorl.nodes import NodeEngines
from gangline.interop.prorl.routes import ProrlRoutes
from gangline.interop.prorl.templates import Templates
from gangline.server.parts import ServerPart, ServerPlace
from gangline.wire.http.routes import Route


class ProrlPart(ServerPart):
    def __init__(self, place: ServerPlace) -> None:
        super().__init__(place)
        self._engines = NodeEngines(place.service)

    def routes(self) -> Sequence[Route]:
        folder = None if self.place.data_dir is None else self.place.data_dir / "server" / "handlers"
        max_task_bytes = self.place.max_task_bytes
        return ProrlRoutes(self.place.service, self._engines, Templates(folder), max_task_bytes=max_task_bytes).routes()

    def work(self, own_url: str) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._engines.hand_out_forever()]
