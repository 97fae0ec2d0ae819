"""The state of a session, and every decision about its next state. Pure: the clock and the lease time are arguments.

Laws, which hold even if messages are lost, duplicated or late:
- A session ends once and never changes afterwards.
- Each lease has a higher fence than all earlier ones, and only the holder of the latest lease is accepted.
- A lease under which the agent started costs an attempt, whatever ended it. A node that returns a session earlier costs
  nothing, so a session's agent starts at most `max_attempts` times.
- An accepted report is accepted again (its response may have been lost), without any change.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.decodable import warm_decoder
from gangline.domain.errors import Failure, LeaseLost
from gangline.domain.lifecycle import Outcome, SessionState, Stage, can_move, may_retry


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
    """Fence of the last accepted report; 0 if there was none."""
    ready_at: float | None = None
    """When it may be leased again; None means at any time. Only for queued sessions."""

    def moved(self, state: SessionState, **changes: object) -> Standing:
        """Raises: ValueError for a move that the lifecycle does not allow."""
        if not can_move(self.state, state):
            raise ValueError(f"a session cannot move from {self.state} to {state}")
        return msgspec.structs.replace(self, state=state, **changes)


warm_decoder(Standing)

_RETRY_GROWTH = 4.0
_MAX_RETRY_PAUSE_S = 300.0


def retry_pause_s(attempt: int, *, base_s: float) -> float:
    """Seconds before a session is retried after its `attempt` failed through our fault. Grows with each attempt, up to
    five minutes.

    A fault usually affects all sessions, and immediate retries would use up their attempts before it is repaired.
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
    """Whether this fence (of this node) is the live lease. An expired lease stays live until it is reclaimed."""
    same_node = node_id is None or standing.node_id == node_id
    return standing.state == "leased" and standing.fence == fence and same_node


def renew(standing: Standing, *, node_id: str, fence: int, stage: Stage, now: float, lease_s: float) -> Standing | None:
    """Renew a lease named by a heartbeat. None if the node has lost it."""
    if not holds(standing, fence=fence, node_id=node_id):
        return None
    stage_at = standing.stage_at if stage == standing.stage else now
    return msgspec.structs.replace(standing, stage=stage, stage_at=stage_at, expires_at=now + lease_s)


def release(standing: Standing, *, node_id: str, fence: int, has_run: bool = False) -> Standing:
    """Return a session to the queue. If its agent has started, the attempt is used up. Raises: LeaseLost."""
    if not holds(standing, fence=fence, node_id=node_id):
        raise _lost(standing, fence)
    if has_run:
        why = f"node {node_id} gave the session back while it ran (attempt {standing.attempt})"
        return _again_or(standing, "infra_error", _of_node("given_back", why))
    return standing.moved("queued", **_NO_LEASE)


def unheard(standing: Standing) -> Standing:
    """Return a session to the queue that its node never named, because the response with the lease was lost.

    This is assumed only once: otherwise a node that loses its leases would get the session forever.
    """
    if standing.fence == standing.attempt:  # no lost lease was forgiven before
        return standing.moved("queued", **_NO_LEASE)
    why = f"node {standing.node_id} never named the session that it was given (attempt {standing.attempt})"
    return _again_or(standing, "infra_error", _of_node("lease_unheard", why))


def expire(standing: Standing, *, now: float) -> Standing | None:
    """Reclaim an expired lease; after the last attempt the session ends. None if it has not expired."""
    if standing.state != "leased" or standing.expires_at is None or standing.expires_at > now:
        return None
    why = f"node {standing.node_id} stopped renewing its lease (attempt {standing.attempt})"
    return _again_or(standing, "infra_error", _of_node("lease_expired", why))


def report(
    standing: Standing, *, fence: int, outcome: Outcome, failure: Failure | None, ready_at: float | None = None
) -> Standing:
    """A node reported the end of an attempt. Returns `standing` itself if that report was accepted before.

    ready_at: when it may be leased again, if it is retried. Raises: LeaseLost if the node no longer holds the session.
    """
    if fence > 0 and standing.reported_fence == fence:
        return standing
    if not holds(standing, fence=fence):
        raise _lost(standing, fence)
    if (fault := fault_of(outcome, failure)) is not None:
        return _again_or(msgspec.structs.replace(standing, reported_fence=fence), outcome, fault, ready_at)
    return standing.moved(**reported_end(fence, outcome, failure))


def fault_of(outcome: Outcome, failure: Failure | None) -> Failure | None:
    """A failure of ours, after which it depends on the session's standing whether it is tried again."""
    return failure if outcome == "infra_error" else None


def reported_end(fence: int, outcome: Outcome, failure: Failure | None) -> dict[str, Any]:
    """What any other report changes in the session that this fence holds."""
    return {"state": "ended", "reported_fence": fence, "outcome": outcome, "failure": failure, **_NO_LEASE}


def cancel(standing: Standing) -> Standing | None:
    """End the session at once; its node is notified at the next heartbeat. None if it had already ended."""
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
