"""Errors as `application/problem+json` (RFC 9457): one shape for every route, and bodies read within a limit."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from gangline.domain.errors import CallerError, GanglineError, InvalidRequest
from gangline.plugins import explain
from gangline.telemetry.logs import FewRefusals

__all__ = ["Problem", "problem_response", "problems"]

log = logging.getLogger("gangline.server")
log.addFilter(FewRefusals("request.refused"))


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, for programs (`code`) and for people (`detail`)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    boundary: str
    retryable: bool
    details: dict[str, str | int | float | None] = {}


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into a problem. Cancellation passes."""
    try:
        return await handler(request)
    except GanglineError as error:
        known = error
    except ValidationError as error:
        known = InvalidRequest(explain(error))
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        known = InvalidRequest(f"the body cannot be read: {error}")
    except RecursionError:
        known = InvalidRequest("the body is nested too deeply.")
    except web.HTTPException as error:
        return _of_http(request, error)
    except Exception:
        log.exception("request.crashed method=%s path=%s", request.method, request.path)
        return problem_response(GanglineError("the server made a mistake; its log says more."))
    if known.status >= 500:
        log.error(
            "request.failed method=%s path=%s code=%s message=%s", request.method, request.path, known.code, known
        )
    else:
        _log_refused(request, known.status, known.code)
    return problem_response(known)


def problem_response(error: GanglineError) -> web.Response:
    return _response(error, error.status)


def _of_http(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        return error
    found = CallerError(f"{request.method} {request.path}: {error.reason}; GET /openapi.json lists the routes.")
    code = "not_found" if error.status == 404 else found.code
    _log_refused(request, error.status, code)
    return _response(found, error.status, code)


def _log_refused(request: web.Request, status: int, code: str) -> None:
    """Without the message: it may quote the body."""
    log.info("request.refused method=%s path=%.200s status=%d code=%s", request.method, request.path, status, code)


def _response(error: GanglineError, status: int, code: str | None = None) -> web.Response:
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        code=code or error.code,
        boundary=error.boundary,
        retryable=error.retryable,
        details=error.details,
    )
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.Response(
        body=msgspec.json.encode(problem), status=status, content_type="application/problem+json", headers=headers
    )
