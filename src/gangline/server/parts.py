"""Parts of a server that wings bring: routes, work behind them, and forms of callbacks.

A part is an entry point of group `gangline.server_parts`: a class that is made of a `ServerPlace`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gangline.server.service.core import RolloutService
from gangline.settings.wings import wing_parts
from gangline.wire.http.routes import Route

__all__ = ["CallbackBody", "ServerPart", "ServerPlace", "server_parts"]

CallbackBody = Callable[[str, str], Awaitable[bytes]]
"""Task id and the callback's URL -> the body of the callback."""


class ServerPlace(NamedTuple):
    """What a part is made of."""

    service: RolloutService
    control_token: str | None
    data_dir: Path | None
    """None: the part keeps no files."""
    max_task_bytes: int
    """Most bytes of one request's body."""
    max_result_bytes: int


class ServerPart:
    """A part without routes, work or callbacks of its own."""

    def __init__(self, place: ServerPlace) -> None:
        self.place = place

    def routes(self) -> Sequence[Route]:
        return ()

    def work(self, own_url: str) -> Sequence[Coroutine[Any, Any, None]]:
        """Coroutines that run for as long as the server does. own_url: of this server, as others reach it."""
        return ()

    def callbacks(self) -> Mapping[str, CallbackBody]:
        """Value of a task's `callback_form` -> what makes its bodies."""
        return {}


def server_parts(place: ServerPlace) -> list[ServerPart]:
    """One of each installed part, by name."""
    return [part(place) for part in wing_parts("gangline.server_parts").values()]
