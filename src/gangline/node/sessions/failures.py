"""Failures of an attempt as reported in its result."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gangline.domain.completion import Completion
from gangline.domain.errors import Failure, GanglineError
from gangline.domain.lifecycle import Stage
from gangline.domain.open_files import out_of_files
from gangline.domain.plain import plain
from gangline.domain.session import Lease, SessionResult
from gangline.store.journal.log import AttemptKey, AttemptOpened

log = logging.getLogger("gangline.node")


def failure_of(error: BaseException, session_id: str) -> Failure:
    """Returns the failure for an exception. An error from outside Gangline is logged and attributed to the node."""
    known = out_of_files(error) or error
    if isinstance(known, GanglineError):
        return known.failure()
    log.error("session.internal_error session=%s", session_id, exc_info=error)
    return Failure(boundary="node", code="internal_error", message=plain(error), retryable=True)


def unfinished(
    attempt: Lease | AttemptOpened | SessionResult,
    node_id: str,
    failure: Failure,
    completions: Sequence[Completion] = (),
    *,
    held_out: bool,
) -> SessionResult:
    """Returns the result of an attempt that did not end normally."""
    return SessionResult(
        session_id=attempt.session_id,
        task_id=attempt.task_id,
        node_id=node_id,
        attempt=attempt.attempt,
        fence=attempt.fence,
        outcome="infra_error",
        failure=failure,
        completions=tuple(completions),
        held_out=held_out,
    )


def log_failed(key: AttemptKey, stage: Stage, failure: Failure) -> None:
    log.warning(
        "session.failed session=%s attempt=%d stage=%s boundary=%s code=%s message=%s",
        *(*key, stage, failure.boundary, failure.code, failure.message),
    )
