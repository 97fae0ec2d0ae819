"""Reads bodies within a limit, as records, and writes answers in the format that `Accept` prefers (RFC 9110,
12.5.1).
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import validated_id
from gangline.domain.tokens import encode_json, encode_msgpack
from gangline.wire.http.listening import read_body

JSON = "application/json"
MSGPACK = "application/msgpack"
RECORD_TYPES = (JSON, MSGPACK)
MAX_CONTROL_BYTES = 4 << 20
"""Maximum length of a request body without a task, prompt or result."""
_ZIPPED_BYTES = 8 << 10

T = TypeVar("T")


def answer(request: web.Request, record: Any) -> web.Response:
    """The record as MessagePack if `Accept` prefers or names it, else as JSON, even if neither is acceptable."""
    if prefers_msgpack(request):
        return web.Response(body=encode_msgpack(record), content_type=MSGPACK)
    return answer_json(record)


def answer_json(record: Any) -> web.Response:
    return web.Response(body=encode_json(record), content_type=JSON)


async def answer_large(request: web.Request, content_type: str, encode: Callable[[], bytes]) -> web.Response:
    """A potentially large body: encoded in a thread, and compressed if the client accepts gzip."""

    def make() -> tuple[bytes, bool]:
        body = encode()
        zips = len(body) >= _ZIPPED_BYTES and accepts_gzip(request)
        return (gzip.compress(body, 1, mtime=0) if zips else body), zips

    body, zipped = await asyncio.to_thread(make)
    headers = {"Vary": "Accept, Accept-Encoding"} | ({"Content-Encoding": "gzip"} if zipped else {})
    return web.Response(body=body, content_type=content_type, headers=headers)


def accepts_gzip(request: web.Request) -> bool:
    weights = dict(_weighted(part) for part in request.headers.get("Accept-Encoding", "").split(","))
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def prefers(request: web.Request, content_type: str) -> bool:
    """Whether `Accept` names the type, with at least JSON's weight."""
    weights = dict(_weighted(part) for part in request.headers.get("Accept", "").split(","))
    return weights.get(content_type, 0.0) > 0 and weights[content_type] >= weights.get(JSON, 0.0)


def prefers_msgpack(request: web.Request) -> bool:
    """Whether `Accept` gives MessagePack more weight than JSON, or names it with the same weight."""
    weights = dict(_weighted(part) for part in request.headers.get("Accept", "").split(","))
    rest = weights.get("application/*", weights.get("*/*", 0.0))
    as_json, as_msgpack = weights.get(JSON, rest), weights.get(MSGPACK, rest)
    return as_msgpack > as_json or (0.0 < as_msgpack == as_json and MSGPACK in weights)


def _weighted(part: str) -> tuple[str, float]:
    """A media type of `Accept` and its weight; an unreadable weight is 0."""
    kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
    weight = next((name[2:] for name in parameters if name.startswith("q=")), "1")
    try:
        return kind, float(weight)
    except ValueError:
        return kind, 0.0


async def read_record(request: web.Request, kind: type[T], *, max_bytes: int = MAX_CONTROL_BYTES) -> T:
    """The JSON body as a pydantic model, a struct or another type that msgspec decodes; an empty body is `{}`.

    Raises: LimitExceeded, RequestTimeout, InvalidRequest, ValidationError (pydantic's or msgspec's).
    """
    body = await read_body(request, max_bytes) or b"{}"
    validate = getattr(kind, "model_validate_json", None)
    if validate is not None:
        return validate(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        where = "" if "(byte " in str(error) else f" (byte {len(body)})"  # it does not report an early end
        raise InvalidRequest(f"the body cannot be read: {error}{where}.") from error


def path_id(request: web.Request, what: str) -> str:
    """Raises: InvalidRequest."""
    return validated_id(request.match_info[what], what)
