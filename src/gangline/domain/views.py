"""The rollout server's answers: tasks, sessions, nodes and events, as its clients see them.

Plain records without I/O. The store fills them, the server sends them as JSON, and the client reads them back. All
times are Unix times, UTC, seconds, on the server's clock.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gangline.domain.decodable import warm_decoder
from gangline.domain.errors import Failure
from gangline.domain.lifecycle import Outcome, SessionState, Stage, TaskState
from gangline.domain.tenancy import DEFAULT_TENANT

Verdict = Literal["good", "bad", "unsure"]

HEARTBEAT_REFUSED = "heartbeat_refused_"
"""Prefix of a metric, followed by an error's code: the server could not store the node's newest heartbeat."""

SANDBOX_MEMORY = "takes_bytes_"
SANDBOX_CPUS = "takes_cpus_"
"""Prefixes of metrics, followed by a session's id: the bytes and the processors that its sandbox takes now, for the few
that take the most."""

PULLING = "pulling_"
"""Prefix of a metric, followed by an image's full name: how many of the node's sessions wait for its pull."""


SILENT_AFTER_S = 30.0
"""A node that was not heard for so long counts as silent, and its figures as out of date."""


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a submit."""

    task_id: str
    session_ids: tuple[str, ...]
    created: bool
    """False when the same task had been submitted before."""
    unplaced: str | None = None
    """Why no current node can run it: its sessions wait for a suitable one. None: one can, or there are no nodes."""
    warnings: tuple[str, ...] = ()
    """Certain problems of its sessions, such as tools that no engine shows to its model."""


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """One session, as the server knows it."""

    session_id: str
    task_id: str
    sample_index: int
    state: SessionState
    attempt: int
    """1 for the first: the attempt in progress, or the next one while queued, or the last one when ended."""
    max_attempts: int
    fence: int
    """0 before the first lease."""
    node_id: str | None = None
    """The node that holds it, or held it last."""
    stage: Stage | None = None
    """From the node's last heartbeat; None unless leased."""
    model: str | None = None
    """The model of its last call, as the engine names it; None without a stored result."""
    num_sampled_tokens: int | None = None
    """By all calls of the stored result; None without one."""
    outcome: Outcome | None = None
    failure: Failure | None = None
    """Failure of the last failed attempt; for an ended session, the failure that ended it."""
    reward: float | None = None
    result_attempt: int | None = None
    """The attempt whose stored result is the session's; None when no node reported its end."""
    created_at: float
    leased_at: float | None = None
    stage_at: float | None = None
    expires_at: float | None = None
    ended_at: float | None = None
    ready_at: float | None = None
    """When it may be leased again after an infrastructure fault; None: at any time."""
    position: int = 0
    """Grows with every session; the cursor of a page."""
    unplaced: str | None = None
    """While queued, why no current node can run it. None: one can, or there are no nodes."""
    waits_for: str | None = None
    """While leased, the image that its start waits for on its node, as a sentence; None if it waits for no image."""


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions, newest first."""

    sessions: tuple[SessionView, ...]
    next: int | None = None
    """Pass as `before` to get the following page; None when there is none."""


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row in a list of tasks."""

    task_id: str
    status: TaskState
    num_samples: int
    num_open: int
    """Sessions that have not ended."""
    position: int
    """Grows with every task; the cursor of a page."""
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    submitter: str = ""
    """Empty when the request has no submitter."""
    tenant: str = DEFAULT_TENANT
    run: str = ""
    """The training run or evaluation that the task is of, by its id; empty for others."""
    harness: str = ""
    model: str | None = None
    """As in its sessions."""
    num_sampled_tokens: int | None = None
    """Sum over its ended sessions."""
    mean_session_s: float | None = None
    """Mean time from the last lease of a session to its end."""
    priority: int = 0
    result_bytes: int = 0
    """Bytes of all stored results of its sessions, including failed attempts."""
    outcomes: dict[str, int] = {}
    """outcome -> number of ended sessions."""
    mean_reward: float | None = None
    """Over the sessions that have a reward; None without any."""


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks, newest first."""

    tasks: tuple[TaskSummary, ...]
    next: int | None = None
    """Pass as `before` to get the following page; None when there is none."""


class TaskView(TaskSummary, frozen=True, kw_only=True):
    """One task and its group."""

    states: dict[str, int]
    """session state -> number of sessions."""
    rewards: tuple[float | None, ...]
    """[num_samples], by sample index; None without a reward (yet)."""
    sessions: tuple[SessionView, ...]
    request: dict[str, Any]
    """The `TaskRequest`, as JSON data."""

    @property
    def ended(self) -> bool:
        return self.ended_at is not None


class ForkNode(msgspec.Struct, frozen=True, kw_only=True):
    """A session in a tree of forks."""

    session_id: str
    task_id: str
    parent: str | None
    """The session that it forks; None for the tree's root."""
    depth: int
    """Number of forks between it and the root."""
    turn: int | None = None
    """The parent's last model call that it repeats."""
    edit: str | None = None
    """The fork's edit, at most 2,000 characters of it."""
    state: SessionState
    outcome: Outcome | None = None
    reward: float | None = None


class ForkTree(msgspec.Struct, frozen=True, kw_only=True):
    """A session's forks, their forks, and its own ancestors."""

    nodes: tuple[ForkNode, ...]
    """Each after its parent. The first is not a fork, or its parent was deleted."""
    is_whole: bool
    """False if there are more than were read."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as of its last heartbeat or lease call."""

    node_id: str
    url: str
    capacity: int
    draining: bool
    num_sessions: int
    """Sessions it holds a lease on."""
    backends: tuple[dict[str, Any], ...] = ()
    metrics: dict[str, float] = {}
    """Its figures: `NodeNumbers`, if it runs Gangline's own node."""
    first_seen_at: float
    last_seen_at: float
    age_s: float
    """Seconds since it was last heard."""
    key: str = ""
    """Id and number of its token; empty: the control token."""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole service at a glance."""

    version: str
    at: float
    tasks: dict[str, int]
    """task state -> number of tasks."""
    sessions: dict[str, int]
    """session state -> number of sessions."""
    stages: dict[str, int]
    """stage -> leased sessions in it; `leased` counts sessions whose node has not reported a stage yet."""
    oldest_queued_s: float | None
    """Age of the next session in the queue; None when the queue is empty."""
    oldest_queued: SessionView | None = None
    """The session that has waited longest, of the next one in the queue and the next one that rests after a fault."""
    callbacks: dict[str, int]
    """callback state (pending, delivered, expired) -> number of callbacks."""
    nodes: tuple[NodeView, ...]
    stage_ages_s: dict[str, float] = {}
    """stage -> how long its longest-waiting session has been in it; stages as in `stages`."""
    queued: dict[str, int] = {}
    """submitter -> queued sessions; the empty name is for requests without one."""
    unplaced: dict[str, int] = {}
    """Why no current node can run them -> queued sessions."""
    demand: int = 0
    """Sessions for which there should be nodes that take more: queued ones, and leased ones except on draining nodes.
    Queued ones that no current node can run count as one, which keeps a node that tells why."""
    num_waiting: int = 0
    """Queued sessions that wait after an infrastructure fault."""
    result_bytes: int = 0
    """Bytes of all stored results."""
    tenant: str = ""
    """Whose tasks alone it shows, without nodes and callbacks; empty: the whole service."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, in the order in which it became durable."""

    seq: int
    """Grows with every event; the id to resume after."""
    at: float
    kind: str
    """task.submitted, task.started, task.ended, session.leased, session.stage, session.requeued, session.released,
    session.ended, node.joined, node.offer, callback.delivered, callback.expired, task.unplaced. Failures have
    `boundary`, `code` and `message` in `data`."""
    task_id: str | None = None
    session_id: str | None = None
    data: dict[str, Any] = {}


class PageLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that signs one browser in, once."""

    path: str
    """To append to the server's address."""
    read_only: bool
    expires_at: float
    """Unix time, UTC, seconds."""


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """A person's comment or verdict on a session."""

    session_id: str
    task_id: str
    call: int | None = None
    """Number of the call that it is about; None: the whole session."""
    verdict: Verdict | None = None
    note: str = ""
    dataset: str = ""
    """Name of the set of sessions that it belongs to; empty: none."""
    by: str
    """Its author, as in the log of actions."""
    at: float
    position: int
    """Grows with every annotation; the cursor of a page."""


class AnnotationPage(msgspec.Struct, frozen=True, kw_only=True):
    """Annotations, newest first."""

    annotations: tuple[Annotation, ...]
    next: int | None = None
    """Pass as `before` to get the following page; None when there is none."""


class ResultReference(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session's stored result is, for readers that fetch large ones themselves."""

    session_id: str
    attempt: int
    outcome: Outcome | None
    reward: float | None
    url: str | None
    """`file://`, or the server's URL for results; the content is the MessagePack of a `SessionResult`. None when no
    node reported the session's end."""
    num_bytes: int


class ResultReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a node's report."""

    accepted: bool
    state: SessionState
    """`ended`, or `queued` if the session is retried."""


class TurnsReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to records of turns. Records of sessions other than the lost ones are stored."""

    lost: tuple[str, ...]
    """Sessions that are no longer leased to this node with that fence."""


warm_decoder(SessionView)
