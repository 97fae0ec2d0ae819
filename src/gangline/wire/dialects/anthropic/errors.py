"""Anthropic Messages: errors in the provider's form, with the fields that make its clients retry or stop."""

from __future__ import annotations

import re

import msgspec

from gangline.domain.errors import (
    ContextOverflow,
    EngineMalformed,
    EngineRefused,
    EngineUnavailable,
    GanglineError,
    LimitExceeded,
    NotFound,
    ReplyNotFound,
    RequestTimeout,
    ServerUnavailable,
    SessionOver,
    TooMany,
    Unauthorized,
)
from gangline.machine.telemetry.logs import request_in_logs
from gangline.wire.dialects.contract import ErrorAnswer

# The wording of vLLM and the embedded engine.
_CONTEXT = re.compile(r"(?:maximum context length is|and the context) (\d+)")
_PROMPT = re.compile(r"(?:has|contains|passed|resulted in)(?: at least)? (\d+)(?: input)? tokens")
_MAX_TOKENS = re.compile(r"(?:requested|max_(?:completion_)?tokens'? is too large:) (\d+)(?! input)")


def messages_error(error: GanglineError) -> ErrorAnswer:
    status, kind = _status_and_type(error)
    message = _overflow_message(error.message) if isinstance(error, ContextOverflow) else error.message
    inner = {"type": kind, "message": message} | _error_code(error)
    body = {"type": "error", "error": inner, "request_id": request_in_logs()}
    headers: dict[str, str] = {}
    if status == 429:
        headers["retry-after"] = str(error.details.get("retry_after_s") or 1)
    elif not error.retryable:
        headers["x-should-retry"] = "false"
    return ErrorAnswer(status, msgspec.json.encode(body), headers)


def _error_code(error: GanglineError) -> dict[str, dict[str, str]]:
    """Further field that clients act on: the SDK sends the whole conversation if its thread is missing."""
    code = "thread_not_found" if isinstance(error, ReplyNotFound) else error.details.get("error_code")
    return {} if code is None else {"details": {"error_code": str(code)}}


def _status_and_type(error: GanglineError) -> tuple[int, str]:
    match error:
        case Unauthorized():
            return 401, "authentication_error"
        case SessionOver():
            return 403, "permission_error"
        case NotFound() | ReplyNotFound():
            return 404, "not_found_error"
        case RequestTimeout():
            return 408, "timeout_error"
        case LimitExceeded():
            too_many = isinstance(error, TooMany) or error.details.get("status") == 429
            return (429, "rate_limit_error") if too_many else (413, "request_too_large")
        case ContextOverflow():
            return 400, "invalid_request_error"
        case EngineRefused():
            # An engine's 4xx about the body is the caller's to fix; about us (401, 404 ...) it is ours.
            about_body = error.details.get("status") in (400, 413, 422)
            return (400, "invalid_request_error") if about_body else (502, "api_error")
        case EngineMalformed():
            return error.status, "api_error"
        case EngineUnavailable() | ServerUnavailable():
            return 529, "overloaded_error"
        case _ if error.boundary == "caller":
            return error.status, "invalid_request_error"
        case _:
            return max(error.status, 500), "api_error"


def _overflow_message(message: str) -> str:
    """The wording that clients look for: some then compact the conversation, some ask for a shorter reply."""
    context, prompt, reply = (_number(pattern, message) for pattern in (_CONTEXT, _PROMPT, _MAX_TOKENS))
    if context is None or prompt is None:
        return f"prompt is too long: {message}"
    if prompt < context and reply is not None:
        sizes = f"{prompt} + {reply} > {context}"
        return (
            f"input length and `max_tokens` exceed context limit: {sizes}, "
            "decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {prompt} tokens > {context} maximum"


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found.group(1)) if found else None
