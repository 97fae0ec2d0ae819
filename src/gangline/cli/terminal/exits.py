"""Exit codes, and the one-line report of an error.

The codes are a promise to scripts: `docs/reference/cli.md` lists them.
"""

from __future__ import annotations

import sys
from enum import IntEnum

import msgspec

from gangline.domain.errors import (
    CallerError,
    ClusterUnavailable,
    Conflict,
    EngineUnavailable,
    GanglineError,
    InvalidRequest,
    NotFound,
    ServerUnavailable,
    Unauthorized,
    UnknownPlugin,
)


class Exit(IntEnum):
    """Meanings of exit codes; the docstrings are the documentation."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNAUTHORIZED = 6
    INTERRUPTED = 130
    TERMINATED = 143


EXPLAINED: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FAILED: "the command failed: a port in use, an audit violation, a session lost to the infrastructure",
    Exit.USAGE: "wrong arguments or an invalid task; nothing was started",
    Exit.UNREACHABLE: "no service is running, or the server, the engine or the Ray cluster does not answer",
    Exit.NOT_FOUND: "no such task or session",
    Exit.CONFLICT: "a task's id, a node's id or a data folder is already in use",
    Exit.UNAUTHORIZED: "the token is missing, wrong, expired or revoked",
    Exit.INTERRUPTED: "ended by Ctrl-C",
    Exit.TERMINATED: "ended by SIGTERM or SIGHUP",
}
"""One line for each code; the generated reference prints them."""

_BY_TYPE: tuple[tuple[type[GanglineError], Exit], ...] = (
    (Unauthorized, Exit.UNAUTHORIZED),
    (NotFound, Exit.NOT_FOUND),
    (Conflict, Exit.CONFLICT),
    (InvalidRequest, Exit.USAGE),
    (UnknownPlugin, Exit.USAGE),
    (ServerUnavailable, Exit.UNREACHABLE),
    (ClusterUnavailable, Exit.UNREACHABLE),
    (EngineUnavailable, Exit.UNREACHABLE),
    (CallerError, Exit.FAILED),
)


_TOKEN = (
    "the token is missing, wrong, expired or revoked. Set GANGLINE_TOKEN to one of the service (a node takes only "
    "the one that it was started with), or name the data folder of the service with --data."
)
"""Replaces the server's message for HTTP clients."""


def exit_code(error: GanglineError) -> Exit:
    return next((code for kind, code in _BY_TYPE if isinstance(error, kind)), Exit.FAILED)


def report(error: GanglineError, *, as_json: bool) -> Exit:
    """Report the error on stderr, and with `--json` as `{"error": {...}}` on stdout too."""
    message = _TOKEN if isinstance(error, Unauthorized) else error.message
    sys.stderr.write(f"gangline: {message}\n")
    if as_json:
        body = {"error": {"code": error.code, "message": message, "retryable": error.retryable}}
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
        sys.stdout.flush()
    return exit_code(error)
