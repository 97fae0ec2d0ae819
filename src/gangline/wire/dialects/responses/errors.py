"""OpenAI Responses: errors, as an answer with its status, or as the end of a stream that has begun."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gangline.domain.errors import (
    ContextOverflow,
    EngineRefused,
    GanglineError,
    LimitExceeded,
    NotFound,
    ReplyNotFound,
    SessionOver,
    TooMany,
    Unauthorized,
)
from gangline.wire.dialects.contract import ErrorAnswer

_CALLERS_FAULT = (400, 413, 422)
"""An engine's statuses about the body; others (401, 404 ...) are about us."""


def responses_error(error: GanglineError) -> ErrorAnswer:
    status, kind, code = _error_class(error)
    param = "previous_response_id" if isinstance(error, ReplyNotFound) else error.details.get("param")
    inner = {"message": error.message, "type": kind, "param": param, "code": code}
    return ErrorAnswer(status, msgspec.json.encode({"error": inner}), _headers(error, status))


def stream_error(error: GanglineError) -> dict[str, Any]:
    """The `error` of a failed response. Codex retries on most codes; `invalid_prompt` ends its turn."""
    if isinstance(error, ContextOverflow):
        return {"code": "context_length_exceeded", "message": error.message}
    return {"code": "server_error" if error.retryable else "invalid_prompt", "message": error.message}


def _headers(error: GanglineError, status: int) -> dict[str, str]:
    """A 429 without Retry-After ends Codex at once. The SDKs retry 408, 409 and every 5xx unless a header forbids
    it.
    """
    after_s = error.details.get("retry_after_s")
    if status == 429 or isinstance(after_s, int | float):
        return {"Retry-After": str(math.ceil(after_s) if isinstance(after_s, int | float) else 1)}
    return {} if error.retryable or isinstance(error, Unauthorized) else {"x-should-retry": "false"}


def _error_class(error: GanglineError) -> tuple[int, str, str]:
    """(HTTP status, type, code)"""
    match error:
        case Unauthorized():
            return 401, "invalid_request_error", "invalid_api_key"
        case SessionOver():
            return 403, "permission_error", error.code
        case NotFound():
            return 404, "invalid_request_error", error.code
        case LimitExceeded() if "retry_after_s" in error.details:
            return 429, "rate_limit_error", "rate_limit_exceeded"
        case TooMany():
            return 429, "rate_limit_error", "rate_limit_exceeded"
        case LimitExceeded():
            return 413, "invalid_request_error", "request_too_large"
        case ContextOverflow():
            return 400, "invalid_request_error", error.code
        case EngineRefused() if error.details.get("status") in _CALLERS_FAULT:
            return 400, "invalid_request_error", error.code
        case _ if error.boundary == "caller":
            return error.status, "invalid_request_error", error.code
        case _:
            return max(error.status, 500), "server_error", error.code
