"""The standing of a session, and every decision about its next state. Pure: the clock and the lease time are arguments.

Laws, which hold under lost, duplicated and late messages:
- A session ends once; nothing moves it afterwards.
- Each lease has a higher fence than any before it; only the holder of the latest one is accepted.
- A lease under which the agent started costs an attempt, whatever ended it. A node that gives a session back before
  that costs none, so that a session's agent starts at most `max_attempts` times.
- A report that was accepted is accepted again (its answer may have been lost), and changes nothing.
"""

from __future__ import annotations

import msgspec

from gangline.domain.decodable import warm_decoder
from gangline.domain.errors import Failure, LeaseLost
from gangline.domain.lifecycle import Outcome, SessionState, Stage, can_move, may_retry

__all__ = ["Standing", "cancel", "expire", "holds", "lease", "release", "renew", "report", "retry_pause_s", "unheard"]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a session that leasing decides on."""

    state: SessionState = "queued"
    attempt: int = 1
    max_attempts: int
    fence: int = 0
    node_id: str | None = None
    stage: Stage | None = None
    leased_at: float | None = None
    stage_at: float | None = None
    expires_at: float | None = None
    outcome: Outcome | None = None
    failure: Failure | None = None
    """Failure of the last failed attempt; for an ended session, the failure that ended it."""
    reported_fence: int = 0
    """Fence of the last accepted report; 0 before any."""
    ready_at: float | None = None
    """When it may be leased again; None is at any time. Only of queued ones."""

    def moved(self, state: SessionState, **changes: object) -> Standing:
        """Raises: ValueError for a move that the lifecycle's table does not have."""
        if not can_move(self.state, state):
            raise ValueError(f"a session cannot move from {self.state} to {state}")
        return msgspec.structs.replace(self, state=state, **changes)


warm_decoder(Standing)

_RETRY_GROWTH = 4.0
_MAX_RETRY_PAUSE_S = 300.0


def retry_pause_s(attempt: int, *, base_s: float) -> float:
    """Seconds before a session is retried after its `attempt` failed through our fault: longer after each, at most five
    minutes.

    A fault mostly affects all sessions; immediate retries would use up their attempts before it is repaired.
    """
    return min(_MAX_RETRY_PAUSE_S, base_s * _RETRY_GROWTH ** min(attempt - 1, 16))


_NO_LEASE = {"stage": None, "stage_at": None, "expires_at": None}


def lease(standing: Standing, *, node_id: str, now: float, lease_s: float) -> Standing:
    """Give a queued session to a node."""
    return standing.moved(
        "leased",
        fence=standing.fence + 1,
        ready_at=None,
        node_id=node_id,
        stage=None,
        leased_at=now,
        stage_at=None,
        expires_at=now + lease_s,
    )


def holds(standing: Standing, *, fence: int, node_id: str | None = None) -> bool:
    """Whether this fence (of this node) is the live lease. One that ran out lives until it is taken back."""
    same_node = node_id is None or standing.node_id == node_id
    return standing.state == "leased" and standing.fence == fence and same_node


def renew(standing: Standing, *, node_id: str, fence: int, stage: Stage, now: float, lease_s: float) -> Standing | None:
    """A heartbeat named the session. None: the node has lost it."""
    if not holds(standing, fence=fence, node_id=node_id):
        return None
    stage_at = standing.stage_at if stage == standing.stage else now
    return msgspec.structs.replace(standing, stage=stage, stage_at=stage_at, expires_at=now + lease_s)


def release(standing: Standing, *, node_id: str, fence: int, has_run: bool = False) -> Standing:
    """Put back, unharmed unless its agent has started: then the attempt is spent. Raises: LeaseLost."""
    if not holds(standing, fence=fence, node_id=node_id):
        raise _lost(standing, fence)
    if has_run:
        why = f"node {node_id} gave the session back while it ran (attempt {standing.attempt})"
        return _again_or(standing, "infra_error", _of_node("given_back", why))
    return standing.moved("queued", **_NO_LEASE)


def unheard(standing: Standing) -> Standing:
    """Put back a lease that its node has never named, as one whose answer was lost.

    That is believed once: from a node that loses what it is given, a session would come back without end.
    """
    if standing.fence == standing.attempt:  # no lease of it was free yet
        return standing.moved("queued", **_NO_LEASE)
    why = f"node {standing.node_id} never named the session that it was given (attempt {standing.attempt})"
    return _again_or(standing, "infra_error", _of_node("lease_unheard", why))


def expire(standing: Standing, *, now: float) -> Standing | None:
    """Take back a lease that ran out; past the last attempt the session ends. None: nothing ran out."""
    if standing.state != "leased" or standing.expires_at is None or standing.expires_at > now:
        return None
    why = f"node {standing.node_id} stopped renewing its lease (attempt {standing.attempt})"
    return _again_or(standing, "infra_error", _of_node("lease_expired", why))


def report(
    standing: Standing, *, fence: int, outcome: Outcome, failure: Failure | None, ready_at: float | None = None
) -> Standing:
    """A node reported the end of an attempt; `standing` itself when that report had been accepted before.

    ready_at: when it may be leased again, should it go round again.
    Raises: LeaseLost when the session is not the node's any more.
    """
    if fence > 0 and standing.reported_fence == fence:
        return standing
    if not holds(standing, fence=fence):
        raise _lost(standing, fence)
    reported = msgspec.structs.replace(standing, reported_fence=fence)
    if outcome == "infra_error" and failure is not None:
        return _again_or(reported, outcome, failure, ready_at)
    return reported.moved("ended", outcome=outcome, failure=failure, **_NO_LEASE)


def cancel(standing: Standing) -> Standing | None:
    """End at once; the node that holds it hears so at its next heartbeat. None: it had ended before."""
    if standing.state == "ended":
        return None
    return standing.moved("ended", outcome="cancelled", failure=None, ready_at=None, **_NO_LEASE)


def _again_or(standing: Standing, outcome: Outcome, failure: Failure, ready_at: float | None = None) -> Standing:
    if may_retry(failure, standing.attempt, standing.max_attempts):
        attempt = standing.attempt + 1
        return standing.moved("queued", attempt=attempt, failure=failure, ready_at=ready_at, **_NO_LEASE)
    return standing.moved("ended", outcome=outcome, failure=failure, **_NO_LEASE)


def _of_node(code: str, message: str) -> Failure:
    return Failure(boundary="node", code=code, message=message, retryable=True)


def _lost(standing: Standing, fence: int) -> LeaseLost:
    return LeaseLost(
        f"fence {fence} does not hold this session: it is {standing.state} with fence {standing.fence}; "
        "drop it, the server decides what follows.",
        state=standing.state,
        fence=standing.fence,
    )
