"""Google: errors in the form of `google.rpc.Status`.

Google's clients ignore `x-should-retry` and look only at the status. Gemini CLI repeats 429, 499 and every 5xx up to
ten times, so an engine that can never answer is a 4xx here.

Source: Gemini API, error codes; google.rpc.Code, error_details.proto.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gangline.domain.errors import (
    Conflict,
    ContextOverflow,
    EngineIncapable,
    EngineMalformed,
    EngineRefused,
    GanglineError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    SessionOver,
    TooMany,
    Unauthorized,
)
from gangline.wire.dialects.contract import ErrorAnswer

_TYPES = "type.googleapis.com/google.rpc."

_ABOUT_THE_BODY = (400, 413, 422)


def google_error(error: GanglineError) -> ErrorAnswer:
    code, status = _error_class(error)
    headers: dict[str, str] = {}
    if isinstance(error, SessionOver | ContextOverflow | EngineIncapable) or (code >= 500 and not error.retryable):
        headers["x-should-retry"] = "false"
    details = [_error_info(error)]
    param = error.details.get("param")
    if param is not None:
        violation = {"field": str(param), "description": error.message}
        details.append({"@type": f"{_TYPES}BadRequest", "fieldViolations": [violation]})
    if code == 429:
        seconds = _retry_after_s(error)
        headers["retry-after"] = str(seconds)
        details.append({"@type": f"{_TYPES}RetryInfo", "retryDelay": f"{seconds}s"})
    inner = {"code": code, "message": error.message, "status": status, "details": details}
    return ErrorAnswer(code, msgspec.json.encode({"error": inner}), headers)


def _error_class(error: GanglineError) -> tuple[int, str]:
    """(HTTP status, google.rpc.Code)"""
    match error:
        case Unauthorized():
            return 401, "UNAUTHENTICATED"
        case SessionOver():
            return 403, "PERMISSION_DENIED"
        case NotFound():
            return 404, "NOT_FOUND"
        case Conflict():
            return 409, "ABORTED"
        case LimitExceeded() if error.details.get("status") == 429 or "retry_after_s" in error.details:
            return 429, "RESOURCE_EXHAUSTED"
        case TooMany():
            return 429, "RESOURCE_EXHAUSTED"
        case LimitExceeded():
            return 413, "INVALID_ARGUMENT"
        case InvalidRequest() | ContextOverflow():
            return 400, "INVALID_ARGUMENT"
        case EngineIncapable():
            return 400, "FAILED_PRECONDITION"
        case EngineMalformed():
            return 502, "UNAVAILABLE"
        case EngineRefused() if error.details.get("status") in _ABOUT_THE_BODY:
            return 400, "INVALID_ARGUMENT"
        case _ if error.boundary == "caller":
            return error.status, "INVALID_ARGUMENT"
        case _:
            return (503, "UNAVAILABLE") if error.retryable else (500, "INTERNAL")


def _error_info(error: GanglineError) -> dict[str, Any]:
    reason = "API_KEY_INVALID" if isinstance(error, Unauthorized) else error.code.upper()
    return {"@type": f"{_TYPES}ErrorInfo", "reason": reason, "domain": "gangline"}


def _retry_after_s(error: GanglineError) -> int:
    """Whole seconds, at least one."""
    seconds = error.details.get("retry_after_s")
    return max(1, math.ceil(seconds)) if isinstance(seconds, int | float) and math.isfinite(seconds) else 1
