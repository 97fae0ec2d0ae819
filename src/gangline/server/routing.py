"""What a route is: its path and handler, and what the OpenAPI description says of it. And reading a query string."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import validated_id
from gangline.domain.tokens import encode_json

__all__ = ["MAX_WAIT_S", "SUBJECT", "Query", "Route", "answer_json", "number", "path_id", "wants_msgpack"]

MAX_WAIT_S = 300.0
"""The longest long poll; longer ones are answered then, and asked again."""

MSGPACK = "application/msgpack"

SUBJECT: ContextVar[str | None] = ContextVar("subject", default=None)
"""What a request did something to, where its path does not say: set by its handler, for the log of actions."""


@dataclass(frozen=True)
class Query:
    """One parameter in the query string."""

    name: str
    schema: dict[str, Any]
    doc: str


@dataclass(frozen=True)
class Route:
    """One route, as it is served and as it is described."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    body: Any = None
    """Type of the request's body: a pydantic model, a struct, a tuple of them, or None."""
    body_type: str = "application/json"
    answer: Any = None
    """Type of the answer; None for what is not a record."""
    answer_types: tuple[str, ...] = ("application/json",)
    query: tuple[Query, ...] = ()
    open: bool = False
    """Answered without the control token."""
    routine: bool = False
    """Nodes' own traffic: no action of anybody's, and not in the log of them."""
    errors: tuple[int, ...] = (400, 401)


def answer_json(record: Any) -> web.Response:
    return web.Response(body=encode_json(record), content_type="application/json")


def wants_msgpack(request: web.Request) -> bool:
    """Whether `Accept` names MessagePack, and does not like JSON better."""
    weights = dict(_weighted(part) for part in request.headers.get("Accept", "").split(","))
    return 0.0 < weights.get(MSGPACK, 0.0) >= weights.get("application/json", 0.0)


def _weighted(part: str) -> tuple[str, float]:
    """A media type of `Accept` and its weight; one that cannot be read weighs nothing."""
    kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
    weight = next((name[2:] for name in parameters if name.startswith("q=")), "1")
    try:
        return kind, float(weight)
    except ValueError:
        return kind, 0.0


def path_id(request: web.Request, what: str) -> str:
    """Raises: InvalidRequest."""
    return validated_id(request.match_info[what], what)


def number(request: web.Request, name: str, default: float, *, low: float, high: float) -> float:
    """A number from the query string, held to its bounds. Raises: InvalidRequest when it is none."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = msgspec.convert(text, float, strict=False)
    except msgspec.ValidationError:
        value = math.nan
    if math.isnan(value):
        raise InvalidRequest(f"{name} must be a number, got {text[:80]!r}.")
    return min(max(value, low), high)
