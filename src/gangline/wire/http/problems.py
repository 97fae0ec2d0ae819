"""Errors as `application/problem+json` (RFC 9457), in the same form on every route."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from gangline.domain.errors import GanglineError, InvalidRequest
from gangline.machine.telemetry.logs import FewRefusals
from gangline.settings.plugins import explain

log = logging.getLogger("gangline.wire.http")
log.addFilter(FewRefusals("request.refused"))


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error, for programs (`code`) and for people (`detail`)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    boundary: str
    retryable: bool
    details: dict[str, str | int | float | None] = {}


def problem_body(error: GanglineError, status: int) -> bytes:
    """The error as a JSON document."""
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        code=error.code,
        boundary=error.boundary,
        retryable=error.retryable,
        details=error.details,
    )
    return msgspec.json.encode(problem)


def problem_response(error: GanglineError) -> web.Response:
    """The error as an answer, with the headers that its status requires."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 405:
        headers["Allow"] = str(error.details.get("allow", ""))
    body = problem_body(error, error.status)
    return web.Response(body=body, status=error.status, headers=headers, content_type="application/problem+json")


def in_problems(handler: Handler, *, path: str | None = None) -> Handler:
    """The handler, with all exceptions answered as problems, except cancellation and aiohttp's own errors.

    path: logged in place of the request's own.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except Exception as error:
            if request.transport is None and _known(error) is None:  # the client has disconnected
                raise
            return _answered(request, error, path or request.path)

    return answer


def _answered(request: web.Request, error: Exception, path: str) -> web.Response:
    """The answer to an error, created in a separate frame: a frame in the error's traceback would keep the error alive
    through its variable, and with it the request's body, until the garbage collector runs.
    """
    known = _known(error)
    if known is None:
        log.error("request.crashed method=%s path=%s", request.method, path, exc_info=error)
        known = GanglineError("internal error; see the log of this service.")
    elif known.status >= 500:
        log.error("request.failed method=%s path=%s code=%s message=%s", request.method, path, known.code, known)
    else:
        log_refused(request.method, path, known.status, known.code)
    return problem_response(known)


def _known(error: Exception) -> GanglineError | None:
    match error:
        case GanglineError():
            return error
        case ValidationError():
            return InvalidRequest(explain(error))
        case msgspec.ValidationError() | msgspec.DecodeError() | UnicodeDecodeError():
            return InvalidRequest(f"the body cannot be read: {error}")
        case RecursionError():
            return InvalidRequest("the body is nested too deeply.")
        case _:
            return None


def log_refused(method: str, path: str, status: int, code: str) -> None:
    """Log a refusal without its message, which may quote the body or a header."""
    log.info("request.refused method=%s path=%.200s status=%d code=%s", method or "?", path or "?", status, code)
