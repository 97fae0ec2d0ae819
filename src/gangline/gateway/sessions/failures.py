"""Failures of an attempt, as its result reports them."""

from __future__ import annotations

import logging

from gangline.domain.errors import Failure, GanglineError
from gangline.domain.lifecycle import Stage
from gangline.domain.open_files import out_of_files
from gangline.domain.plain import plain
from gangline.store.journal.log import AttemptKey

__all__ = ["failure_of", "log_failed"]

log = logging.getLogger("gangline.node")


def failure_of(error: Exception, session_id: str) -> Failure:
    """The failure that an exception is. One that is none of ours is logged, and is the node's."""
    known = out_of_files(error) or error
    if isinstance(known, GanglineError):
        return known.failure()
    log.error("session.internal_error session=%s", session_id, exc_info=error)
    return Failure(boundary="node", code="internal_error", message=plain(error), retryable=True)


def log_failed(key: AttemptKey, stage: Stage, failure: Failure) -> None:
    log.warning(
        "session.failed session=%s attempt=%d stage=%s boundary=%s code=%s message=%s",
        *(*key, stage, failure.boundary, failure.code, failure.message),
    )
