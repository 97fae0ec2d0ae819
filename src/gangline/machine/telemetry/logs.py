"""One formatter for all log lines: text for people, JSON for machines.

A line is an action and its fields: `log.info("session.run session=%s attempt=%d", ...)`. The action is a stable name,
listed in `gangline.machine.telemetry.actions`. Fields are read from the `name=%s` of the template, so a value may
contain spaces or `=`. Lines logged while working for a session name it, even if the logging code does not know the
session (`session_in_logs`).
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["text", "json"]

FIELDS = "fields"
"""`extra={FIELDS: {...}}` adds fields that are not in the template."""

_MAX_VALUE_CHARS = 4000
_PLACEHOLDER = re.compile(r"(?:(\w+)=)?%(?:%|[-#0 +]*[\d.]*[a-zA-Z])")
_ACTION = re.compile(r"[a-z_]+(\.[a-z_]+)+(?= |$)")
_OWN = ("at", "level", "logger", "action", "text", "exception")
_UNSAFE = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))} | {
    0x0A: "\\n",
    0x0D: "\\r",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}

_request: ContextVar[str | None] = ContextVar("request_in_logs", default=None)
_session: ContextVar[str | None] = ContextVar("session_in_logs", default=None)


@contextmanager
def session_in_logs(session_id: str) -> Generator[None]:
    """Lines logged inside the block, and by tasks started in it, name the session."""
    token = _session.set(session_id)
    try:
        yield
    finally:
        _session.reset(token)


def stays_request_in_logs(request_id: str) -> None:
    """Adds the request's id to log lines until the next request of its connection."""
    _request.set(request_id)


def request_in_logs() -> str | None:
    """The id of the HTTP request being answered."""
    return _request.get()


def stays_session_in_logs(session_id: str) -> None:
    """Adds the session's id to all further log lines of the current task."""
    _session.set(session_id)


class FewRefusals(logging.Filter):
    """Lets through a limited number of lines of one action per minute, because lines that anyone can trigger must not
    fill a disk.

    The first line of a later minute reports the number left out. At level debug all pass.
    """

    def __init__(self, action: str, *, per_minute: int = 60, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._begins = f"{action} "
        self._per_minute = per_minute
        self._now = now
        self._minute = now()
        self._num_lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(self._begins) or logging.Logger.manager.getLogger(record.name).isEnabledFor(
            logging.DEBUG
        ):
            return True
        if self._now() - self._minute >= 60:
            num_left_out = max(self._num_lines - self._per_minute, 0)
            self._minute, self._num_lines = self._now(), 0
            if num_left_out and isinstance(record.args, tuple):
                record.msg, record.args = f"{record.msg} left_out=%d", (*record.args, num_left_out)
        self._num_lines += 1
        return self._num_lines <= self._per_minute


class LineFormatter(logging.Formatter):
    """One line per record; only a traceback, in text format, has more lines, which are indented.

    Untrusted text cannot begin a new line: control characters are escaped.
    """

    converter = time.gmtime

    def __init__(self, log_format: LogFormat = "text") -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._as_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        action = _ACTION.match(text)
        fields = _fields(record)
        if "session" not in fields and (session := _session.get()) is not None:
            fields["session"] = session
            if action:
                text = f"{text} session={session}"
        if "request" not in fields and (request := _request.get()) is not None:
            fields["request"] = request
            if action:
                text = f"{text} request={request}"
        at = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z"
        trace = self._trace(record)
        if not self._as_json:
            line = f"{at} {record.levelname} {record.name} {text}".translate(_UNSAFE)
            return "\n    ".join((line, *trace.translate(_UNSAFE_IN_TRACE).splitlines())) if trace else line
        document: dict[str, Any] = {"at": at, "level": record.levelname.lower(), "logger": record.name}
        document |= {"action": action[0] if action else None}
        document |= {name: _plain(value) for name, value in fields.items() if name not in _OWN}
        document |= {"text": _plain(text)} | ({"exception": _plain(trace)} if trace else {})
        return json.dumps(document, ensure_ascii=True)

    def _trace(self, record: logging.LogRecord) -> str:
        pieces = [self.formatException(record.exc_info)] if record.exc_info else []
        return "\n".join((*pieces, *([self.formatStack(record.stack_info)] if record.stack_info else [])))


_UNSAFE_IN_TRACE = {code: shown for code, shown in _UNSAFE.items() if code != 0x0A}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given: Mapping[str, Any] | None = getattr(record, FIELDS, None)
    if given is not None:
        return {name: value for name, value in given.items() if value is not None}
    args = record.args
    if not isinstance(record.msg, str) or not isinstance(args, tuple):
        return {}
    names = [found[1] for found in _PLACEHOLDER.finditer(record.msg) if not found[0].endswith("%%")]
    return {name: value for name, value in zip(names, args, strict=False) if name}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # JSON has no NaN and no infinity
    return str(value)[:_MAX_VALUE_CHARS]
