"""A node's own routes: what opens them, how they read bodies, how they answer errors (problem+json, RFC 9457).

Two keys open two doors. The control token opens everything here; a session's key opens what its agent may say of
itself, and nothing else. Model calls are not here: those are the proxy's, in the providers' shapes.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from gangline.connections import problem_body
from gangline.domain.errors import GanglineError, InvalidRequest, LimitExceeded, NodeError, Unauthorized
from gangline.domain.ids import validated_id
from gangline.domain.tokens import encode_json, encode_msgpack
from gangline.listening import read_body
from gangline.plugins import explain
from gangline.same_origin import OwnNames, require_json
from gangline.store.actions import REFUSED, Action, ActionLog, who
from gangline.telemetry.logs import FewRefusals

__all__ = ["MAX_WAIT_S", "ControlRoute", "answer", "as_routes", "key_of", "number", "path_id", "problem", "read_model"]

log = logging.getLogger("gangline.node")
log.addFilter(FewRefusals("control.refused"))

MAX_WAIT_S = 300.0
"""The longest long poll; longer ones are answered then, and asked again."""

MAX_CONTROL_BYTES = 4 << 20

_MSGPACK = "application/msgpack"
_CLIENT_LEFT = 499

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True)
class ControlRoute:
    """One route, as it is served and as it is described."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    summary: str
    opened_by: Literal["control", "session"] = "control"
    """`session`: the handler itself asks for the session's key."""
    body: type[BaseModel] | None = None
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Parameter -> its JSON schema."""


def as_routes(
    routes: list[ControlRoute], control_token: str | None, names: OwnNames, actions: ActionLog | None = None
) -> list[web.RouteDef]:
    """`control_token`: None asks for nothing (then listen on loopback only).

    names: under which the node is reached; the control routes refuse requests for others, and of web pages.
    actions: where every change that the control token opens, and every refusal, is written down.
    """
    served: list[web.RouteDef] = []
    for route in routes:
        handler = _in_problems(route, control_token, names)
        if actions is not None and route.opened_by == "control":
            handler = _written_down(route, handler, actions)
        served.append(web.route(route.method, route.path, handler))
    return served


def _written_down(route: ControlRoute, handler: Handler, actions: ActionLog) -> Handler:
    """Whatever becomes of it: an action counts also where its client does not wait for the answer."""

    def action_of(request: web.Request, status: int) -> Action:
        return Action(
            at=time.time(),
            where=actions.where,
            who=who(request.headers.get("Authorization", "").partition(" ")[2]),
            address=request.remote or "",
            forwarded_for=request.headers.get("X-Forwarded-For"),
            method=request.method,
            path=request.path,
            status=status,
        )

    async def write(request: web.Request) -> web.StreamResponse:
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            if route.method != "GET":
                left = action_of(request, _CLIENT_LEFT)
                asyncio.get_running_loop().run_in_executor(None, actions.write, left)
            raise
        if route.method != "GET" or response.status in REFUSED:
            await asyncio.to_thread(actions.write, action_of(request, response.status))
        return response

    return write


def _in_problems(route: ControlRoute, control_token: str | None, names: OwnNames) -> Handler:
    """Check the origin, the token and the type of a body; answer every error as a problem. Cancellation passes."""

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            if route.opened_by == "control":
                names.check(request)
                if control_token is not None:
                    _check_token(request, control_token)
            require_json(request)
            return await route.handler(request)
        except GanglineError as error:
            known = error
        except ValidationError as error:
            known = InvalidRequest(explain(error))
        except web.HTTPRequestEntityTooLarge:
            known = LimitExceeded("the body is too long.")
        except web.HTTPException:
            raise
        except Exception as error:
            if request.transport is None:  # its client has left
                raise
            log.exception("control.crashed method=%s path=%s", request.method, request.path)
            return problem(NodeError(f"the node made a mistake ({type(error).__name__}); its log says more."))
        _log_error(request, known)
        return problem(known)

    return handler


def _log_error(request: web.Request, error: GanglineError) -> None:
    """A refusal without its message, which may quote the body."""
    asked = (request.method, request.path)
    if error.status >= 500:
        log.error("control.failed method=%s path=%s code=%s message=%s", *asked, error.code, error)
    else:
        log.info("control.refused method=%s path=%.200s status=%d code=%s", *asked, error.status, error.code)


def _check_token(request: web.Request, token: str) -> None:
    """Raises: Unauthorized."""
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Unauthorized("the control token is missing or wrong; send `Authorization: Bearer TOKEN`.")


def problem(error: GanglineError) -> web.Response:
    """The error as problem+json."""
    return web.Response(
        body=problem_body(error, error.status),
        status=error.status,
        content_type="application/problem+json",
        headers={"WWW-Authenticate": "Bearer"} if error.status == 401 else {},
    )


def answer(request: web.Request, record: Any) -> web.Response:
    """JSON, or MessagePack where the client asks for it."""
    if _MSGPACK in request.headers.get("Accept", ""):
        return web.Response(body=encode_msgpack(record), content_type=_MSGPACK)
    return web.Response(body=encode_json(record), content_type="application/json")


async def read_model(request: web.Request, kind: type[ModelT], *, max_bytes: int = MAX_CONTROL_BYTES) -> ModelT:
    """The body; an empty one is `{}`. Raises: LimitExceeded, RequestTimeout, InvalidRequest, ValidationError."""
    return kind.model_validate_json(await read_body(request, max_bytes) or b"{}")


def path_id(request: web.Request, what: str) -> str:
    """Raises: InvalidRequest."""
    return validated_id(request.match_info[what], what)


def key_of(request: web.Request) -> str:
    """The session's key, from where any provider's SDK puts one. Raises: Unauthorized."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    found = key if scheme.lower() == "bearer" else ""
    found = found or request.headers.get("x-api-key", "") or request.headers.get("x-goog-api-key", "")
    if not found.strip():
        raise Unauthorized("send the session's key as `Authorization: Bearer KEY`.")
    return found.strip()


def number(request: web.Request, name: str, default: float, *, low: float, high: float) -> float:
    """A number from the query string, held to its bounds. Raises: InvalidRequest when it is none."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise InvalidRequest(f"{name} must be a number, got {text[:80]!r}.", param=name)
    return min(max(value, low), high)
