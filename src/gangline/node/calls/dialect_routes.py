"""Which dialect a request speaks, and which of its routes: by path, then, where several share it, by headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gangline.wire.dialects.contract import Dialect, DialectRoute, RawRequest

__all__ = ["DialectRoutes", "Match"]

_IN_FRONT = ("anthropic", "api", "gemini", "google", "openai")
"""First segments that clients put in front of a provider's paths, by the base URLs of routers and gateways."""
_UNVERSIONED = ("chat", "complete", "completions", "embeddings", "messages", "models", "responses", "tokenize")
"""Beginnings of paths of clients whose base URL should have ended in `/v1`."""
_ALIAS = re.compile(rf"/(?:(?:{'|'.join(_IN_FRONT)}|v1(?=/v1/)|v1beta(?=/openai/))/)*(?P<rest>.*)")
_INSTEAD = {
    "/v1/complete": "Use /v1/messages",
    "/v1/completions": "Use /v1/chat/completions: a completion of bare text belongs to no conversation",
    "/v1/embeddings": "A session's model samples text; it has no embeddings",
}
"""Paths of providers that are not served -> why, or what to use."""
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
        self.roots = sorted({route.path.split("/")[1] for _, route, _ in self._table} | {*_IN_FRONT, *_UNVERSIONED})
        """First segments of all paths: `v1`, and those of aliases."""
        # Clients ask for a few paths, again and again.
        self._served = lru_cache(maxsize=256)(self._find_served)

    @property
    def served(self) -> str:
        """For people."""
        return "; ".join(
            f"{dialect.title} ({', '.join(f'`{route.path}`' for route in dialect.routes)})"
            for dialect in self._dialects
        )

    def why_not(self, path: str) -> str:
        """What to say of a path that is not served."""
        instead = _INSTEAD.get(_usual(path))
        return f"{instead}. Served" if instead else "Served"

    def find(self, method: str, path: str, request: RawRequest) -> Match:
        """`path`: behind the session's prefix, or an alias of it."""
        path = _usual(path)
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


def _usual(path: str) -> str:
    """The provider's own path: `/chat/completions`, `/openai/v1/chat/completions` and `/v1/v1/chat/completions` are
    `/v1/chat/completions`."""
    found = _ALIAS.fullmatch(path)
    rest = found["rest"] if found else path.lstrip("/")
    return f"/v1/{rest}" if rest.split("/")[0] in _UNVERSIONED else f"/{rest}"


def _pattern(path: str) -> re.Pattern[str]:
    """aiohttp's way of writing paths -> a regular expression."""
    pieces: list[str] = []
    at = 0
    for variable in _VARIABLE.finditer(path):
        pieces += [re.escape(path[at : variable.start()]), f"(?P<{variable[1]}>{variable[2] or '[^{}/]+'})"]
        at = variable.end()
    return re.compile("".join(pieces) + re.escape(path[at:]))
