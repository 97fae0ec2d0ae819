"""Parts of a server provided by wings: routes, background work, and callback formats.

A part is an entry point of group `gangline.server_parts`: a class constructed with a `ServerPlace`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gangline.server.service.core import RolloutService
from gangline.settings.wings import wing_parts
from gangline.wire.http.routes import Route

CallbackBody = Callable[[str, str], Awaitable[bytes]]
"""Task id and the callback's URL -> the body of the callback."""


class ServerPlace(NamedTuple):
    """Arguments for constructing a part."""

    service: RolloutService
    control_token: str | None
    data_dir: Path | None
    """None: the part stores no files."""
    max_task_bytes: int
    """Maximum bytes of a request's body."""
    max_result_bytes: int


class ServerPart:
    """Base class of parts, without routes, work or callbacks."""

    def __init__(self, place: ServerPlace) -> None:
        self.place = place

    def routes(self) -> Sequence[Route]:
        return ()

    def work(self, own_url: str) -> Sequence[Coroutine[Any, Any, None]]:
        """Coroutines that run while the server runs. own_url: the server's URL for others."""
        return ()

    def callbacks(self) -> Mapping[str, CallbackBody]:
        """Value of a task's `callback_form` -> function that makes the bodies."""
        return {}


def server_parts(place: ServerPlace) -> list[ServerPart]:
    """An instance of each installed part, by name."""
    return [part(place) for part in wing_parts("gangline.server_parts").values()]
