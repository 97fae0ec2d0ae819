"""Which dialect a request speaks, and which of its routes: by path, then, where several share it, by headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gangline.wire.dialects.contract import Dialect, DialectRoute, RawRequest

__all__ = ["DialectRoutes", "Match"]

_VARIABLE = re.compile(r"\{(\w+)(?::([^{}]+))?\}")


class Match(msgspec.Struct, frozen=True):
    dialect: Dialect
    route: DialectRoute | None
    """None: not served; the dialect is the one to say so."""
    request: RawRequest


class DialectRoutes:
    def __init__(self, dialects: Sequence[Dialect]) -> None:
        """`dialects`: not empty; of those that a request could be, the first wins."""
        self._dialects = sorted(dialects, key=lambda dialect: dialect.name != "openai_chat")
        self._table = [(_pattern(route.path), route, dialect) for dialect in self._dialects for route in dialect.routes]
        self.roots = sorted({route.path.split("/")[1] for _, route, _ in self._table})
        """First segments of all paths: `v1`."""
        # Clients ask for a few paths, again and again.
        self._served = lru_cache(maxsize=256)(self._find_served)

    @property
    def served(self) -> str:
        """For people."""
        return "; ".join(
            f"{dialect.title} ({', '.join(f'`{route.path}`' for route in dialect.routes)})"
            for dialect in self._dialects
        )

    def find(self, method: str, path: str, request: RawRequest) -> Match:
        """`path`: behind the session's prefix."""
        found = self._served(method, path)
        if not found:
            return Match(self._nearest(path, request), None, request)
        route, dialect, params = found[0]
        if len(found) > 1:
            route, dialect, params = next((entry for entry in found if entry[1].speaks(request)), found[0])
        return Match(dialect, route, msgspec.structs.replace(request, params=params))

    def _find_served(self, method: str, path: str) -> list[tuple[DialectRoute, Dialect, dict[str, str]]]:
        """Every route that it could be, and the path's variables."""
        return [
            (route, dialect, hit.groupdict())
            for pattern, route, dialect in self._table
            if route.method == method and (hit := pattern.fullmatch(path)) is not None
        ]

    def _nearest(self, path: str, request: RawRequest) -> Dialect:
        """The dialect of the path's route with another method, else the one that the headers speak, else the first."""
        of_path = [dialect for pattern, _, dialect in self._table if pattern.fullmatch(path)]
        among = of_path or self._dialects
        return next((dialect for dialect in among if dialect.speaks(request)), among[0])


def _pattern(path: str) -> re.Pattern[str]:
    """aiohttp's way of writing paths -> a regular expression."""
    pieces: list[str] = []
    at = 0
    for variable in _VARIABLE.finditer(path):
        pieces += [re.escape(path[at : variable.start()]), f"(?P<{variable[1]}>{variable[2] or '[^{}/]+'})"]
        at = variable.end()
    return re.compile("".join(pieces) + re.escape(path[at:]))
