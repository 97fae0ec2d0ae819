"""The messages about a session between server and node."""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.decodable import warm_decoder
from gangline.domain.errors import Failure
from gangline.domain.lifecycle import STOPPED_BY_LIMIT, Outcome, Stage
from gangline.domain.placement import Offer
from gangline.domain.trajectory import Trajectory
from gangline.domain.usage import SessionUsage


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A node's timed claim on a session."""

    session_id: str
    task_id: str
    sample_index: int
    attempt: int
    """1 for the first."""
    fence: int
    """Grows with every lease of the session; a result with an older fence is refused."""
    expires_at: float
    """Unix time, UTC, seconds, on the server's clock."""
    lease_s: float
    """How long a renewal lasts."""
    task: dict[str, Any]
    """The `TaskRequest`, as JSON data."""


class StageTiming(msgspec.Struct, frozen=True):
    """When a session was in a stage. Unix times, UTC, seconds."""

    stage: Stage
    started_at: float
    ended_at: float


class HarnessExit(msgspec.Struct, frozen=True, kw_only=True):
    """How the harness's process ended."""

    exit_code: int | None
    """None when a signal or the budget ended it."""
    signal: int | None = None
    timed_out: bool = False


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node's report after a session's attempt ended; stored before it is announced."""

    session_id: str
    task_id: str
    node_id: str
    attempt: int
    fence: int
    outcome: Outcome
    run_outcome: Outcome | None = None
    """Outcome of RUN if grading changed it; None if it is `outcome`."""
    failure: Failure | None = None
    reward: float | None = None
    reward_details: dict[str, Any] = {}
    harness_exit: HarnessExit | None = None
    trajectory: Trajectory | None = None
    completions: tuple[Completion, ...] = ()
    """Every completion of this attempt, as in the journal."""
    timings: tuple[StageTiming, ...] = ()
    artifacts: dict[str, bytes] = {}
    """Small files by name: logs of the harness and of the evaluator, limited in size."""
    limits: dict[str, str] = {}
    """Limits that the runtime actually enforced, and how."""
    images: dict[str, str] = {}
    """Image, as the task names it -> digest of the image that its sandboxes had; without paths, and empty on nodes
    that pull no images."""
    usage: SessionUsage | None = None
    """Resource use of the attempt's sandboxes; None without any."""
    held_out: bool = False
    """Copied from its task, so that it survives the task: the session is for evaluation and never trained on."""


def is_usable(session: SessionResult) -> bool:
    """Whether it finished its work and has tokens to train on, as `enough_sessions` counts."""
    traces = () if session.trajectory is None else session.trajectory.traces
    has_ended = session.outcome == "completed" or session.outcome in STOPPED_BY_LIMIT
    return has_ended and any(trace.untrainable is None and bool(trace.loss_mask.any()) for trace in traces)


def made_no_call(session: SessionResult) -> bool:
    """Whether no model call was answered, so that it does not measure the model."""
    has_traces = session.trajectory is not None and bool(session.trajectory.traces)
    return not has_traces and not any(completion.status == "complete" for completion in session.completions)


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a leased session's model calls, sent off the node while it runs: see `CaptureSpec.durable`."""

    session_id: str
    fence: int
    first: int
    """How many calls of this lease were sent before these."""
    calls: tuple[msgspec.Raw, ...]
    """The journal's entry of each call, `Appended`, as MessagePack: neither node nor server encodes it again."""


class KeptTurns(msgspec.Struct, frozen=True, kw_only=True):
    """The server's records of a session's earlier lease, the one with the most records."""

    fence: int = 0
    """0: there are none."""
    completions: tuple[Completion, ...] = ()


class GradingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recorded session that a node should grade again."""

    task: dict[str, Any]
    """The `TaskRequest`, as JSON data, with the evaluator to use."""
    result: SessionResult
    """The recorded result; its completions are not needed."""


class Grading(msgspec.Struct, frozen=True, kw_only=True):
    """The grading of a session that was recorded earlier."""

    session_id: str
    task_id: str
    attempt: int
    outcome: Outcome
    """`infra_error` if it could not be graded: `failure` has the reason."""
    failure: Failure | None = None
    reward: float | None = None
    trace_rewards: dict[str, float] = {}
    """trace id -> reward."""
    turn_scores: dict[str, float] = {}
    """completion id -> score."""
    details: dict[str, Any] = {}
    """The evaluator's details about its reward."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by a node every few seconds; renews the leases it names."""

    node_id: str
    url: str
    """Where the node's proxy and control routes answer."""
    sessions: dict[str, tuple[int, Stage]]
    """session id -> (fence, stage)."""
    capacity: int
    """Most sessions that the node would hold in all."""
    draining: bool = False
    backends: tuple[dict[str, Any], ...] = ()
    metrics: dict[str, float] = {}
    """`NodeNumbers`."""
    identity: str = ""
    """Identity of its data folder: unchanged by restarts, different for another node with the same id."""
    offer: Offer | None = None
    """Its capabilities; None: not reported, and the node gets every session."""
    leaving: bool = False
    """Whether it is the last of a node that ends in order: it is listed no longer, unless a lease is left."""


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    renewed: tuple[str, ...]
    lost: tuple[str, ...]
    """Sessions that this node must drop at once: cancelled, or leased to another node."""
    lease_s: float
    every_s: float = 0.0
    """Seconds until the next heartbeat, if the node's own interval is shorter: a server of many nodes asks for
    fewer."""


warm_decoder(SessionResult, KeptTurns)
