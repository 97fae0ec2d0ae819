"""The lifecycle of a session as tables: the allowed transitions, and the states that allow another attempt.

                 lease             start            launch            end
    queued ────────────▶ init ──────────▶ ready ─────────▶ run ─────────▶ postrun ──▶ ended
      ▲                    │                │                │                │
      └────────────────────┴── lease lost, or infrastructure fault with attempts left ──┘

Between `queued` and `ended` the server tracks a session by its lease. The four stages are the node's, which reports
them with heartbeats.
"""

from __future__ import annotations

from typing import Literal, get_args

from gangline.domain.errors import Failure

Stage = Literal["init", "ready", "run", "postrun"]
STAGES: tuple[Stage, ...] = ("init", "ready", "run", "postrun")

SessionState = Literal["queued", "leased", "ended"]
TaskState = Literal["queued", "running", "ended", "cancelled"]

CallLimit = Literal["turn_limit", "token_limit", "agent_loop"]
STOPPED_BY_LIMIT: tuple[CallLimit, ...] = get_args(CallLimit)
"""Outcomes of sessions whose next model call was refused: by a limit that their task sets, or, as `token_limit`,
because the model's context is full."""

Outcome = Literal[
    "completed",
    "agent_timeout",
    "turn_limit",
    "token_limit",
    "agent_loop",
    "memory_limit",
    "agent_error",
    "no_model_call",
    "infra_error",
    "cancelled",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

UNGRADED: tuple[Outcome, ...] = ("no_model_call", "infra_error", "cancelled")
"""Outcomes of sessions that do not measure the model. They are not graded, and their reward is None."""

_MOVES: dict[SessionState, frozenset[SessionState]] = {
    "queued": frozenset({"leased", "ended"}),
    "leased": frozenset({"queued", "ended"}),
    "ended": frozenset(),
}


def can_move(before: SessionState, after: SessionState) -> bool:
    return after in _MOVES[before]


def is_infrastructure_fault(failure: Failure) -> bool:
    """Whether *we* broke. The agent's own failures are outcomes to train on."""
    return failure.boundary not in ("harness", "caller")


def may_retry(failure: Failure, attempt: int, max_attempts: int) -> bool:
    """Whether a session that failed at its `attempt` (1 is the first) is retried."""
    return failure.retryable and is_infrastructure_fault(failure) and attempt < max_attempts
