"""Sessions of callers that run their agents themselves: opened, awaited, finalized or aborted over HTTP.

Laws
- A session's key is returned once, at creation. Its digest is stored, so that the key still opens the session after a
  restart of the node; with the journal, the same token streams continue.
- The reward that an agent reports is a claim. It becomes the reward only under `reward_policy = "claimed"`.
- Finalizing is idempotent: the first result is stored before it is returned, and is returned again.
- An unused session is aborted after its time to live; an ended one is forgotten after the same time.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from gangline.domain.completion import Completion
from gangline.domain.contracts import Reward
from gangline.domain.errors import (
    Conflict,
    Failure,
    GanglineError,
    InvalidRequest,
    NodeDraining,
    NotFound,
    SessionOver,
    TooMany,
    Unauthorized,
)
from gangline.domain.ids import ID_PATTERN, new_id, new_secret
from gangline.domain.lifecycle import UNGRADED, Outcome
from gangline.domain.node_views import Claim, ExternalView, OpenedSession
from gangline.domain.placement import Allowed
from gangline.domain.session import SessionResult
from gangline.domain.task import BuilderSpec, CaptureSpec
from gangline.domain.tokens import encode_msgpack
from gangline.domain.trajectory import Trajectory
from gangline.node.calls.session import ModelSession, key_digest
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.external.store import ExternalState, ExternalStore
from gangline.rows.chains import built
from gangline.rows.rewards import apply_reward
from gangline.settings import plugins
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal

log = logging.getLogger("gangline.external")

_ATTEMPT = 0
"""These sessions have no lease; attempts of leases begin at 1."""
MAX_STRANGER_BYTES = 64 << 10
MAX_OPEN = 4096
"""Most open sessions of one node."""


def is_external(opened: AttemptOpened) -> bool:
    return opened.attempt == _ATTEMPT


def _that_travels(value: dict[str, Any]) -> dict[str, Any]:
    """Check that a caller's data can be part of a result. Raises: ValueError."""
    try:
        size = len(encode_msgpack(value))
    except OverflowError:
        raise ValueError("whole numbers must fit 64 bits") from None
    if size > MAX_STRANGER_BYTES:
        raise ValueError(f"must not be larger than {MAX_STRANGER_BYTES} bytes")
    return value


class SessionRequest(BaseModel):
    """Body of `POST /v1/sessions` on a node. Every field is optional."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session_id: str | None = Field(default=None, pattern=ID_PATTERN)
    """Chosen by the caller; None: the node chooses."""
    task_id: str | None = Field(default=None, pattern=ID_PATTERN)
    """Task of several attempts: their results contain it, and on a node with affinity they share an engine. None: the
    session's own id."""
    model: str | None = None
    """Name by which the agent will call the model; None: the served model's."""
    builder: BuilderSpec = BuilderSpec()
    """Or just the strategy's name."""
    capture: CaptureSpec = CaptureSpec()
    max_turns: int | None = Field(default=None, gt=0)
    max_repeated_actions: int | None = Field(default=None, ge=2, le=100)
    """Like a task's `agent.max_repeated_actions`."""
    allow_no_model_call: bool = False
    """Like a task's `agent.allow_no_model_call`. Otherwise a session without a model call has no reward, whatever its
    agent claims."""
    reward_policy: Literal["none", "claimed"] = "none"
    """`claimed`: the reward that the agent claims with `/complete` becomes the trajectory's."""
    ttl_s: float = Field(default=86_400.0, gt=0, le=31_536_000)
    """An unused session is aborted after this many seconds; an ended one is forgotten."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The caller's own data, at most 64 KiB; returned, never read."""

    _metadata_travels = field_validator("metadata")(_that_travels)

    @field_validator("builder", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return {"strategy": value} if isinstance(value, str) else value


class ClaimRequest(BaseModel):
    """Body of `/complete`: an agent's own report of its session.

    Source: "Agent Abstractions and Trajectory Gateway for VERL".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: float | None = Field(default=None, allow_inf_nan=False)
    """None: the number `reward` in `reward_info`, if there is one."""
    reward_info: dict[str, Any] = Field(default_factory=dict)
    """At most 64 KiB; returned with each trace."""

    _info_travels = field_validator("reward_info")(_that_travels)

    @property
    def claimed_reward(self) -> float | None:
        found = self.reward_info.get("reward") if self.reward is None else self.reward
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return float(found) if math.isfinite(found) else None


class _Live:
    """One session in memory."""

    def __init__(self, state: ExternalState, session: ModelSession | None) -> None:
        self.state = state
        self.session = session
        """None once the session has ended."""
        self.done = asyncio.Event()
        """Set when the agent has reported that it is done, or the session has ended."""
        self.order = asyncio.Lock()
        self.task_id = self.request.task_id or state.session_id
        if state.status != "open":
            self.done.set()

    @property
    def request(self) -> SessionRequest:
        return SessionRequest.model_validate(self.state.request)


class SessionHost(Protocol):
    """Answers the model calls of open sessions; a node's is `NodeParts`."""

    def serves(self, session_id: str) -> bool:
        """Whether a session with this id is open, of any origin."""
        ...

    def open_session(self, spec: SessionSpec, completions: Sequence[Completion] = ()) -> ModelSession:
        """Raises: Conflict when its id is taken."""
        ...

    def close_session(self, session_id: str) -> None: ...


class ExternalSessions:
    """Caller-owned sessions on one node. Call `restore()` once, `expire()` periodically, `close()` on shutdown."""

    def __init__(
        self,
        *,
        node_id: str,
        store: ExternalStore,
        journal: Journal,
        host: SessionHost,
        max_open: int = MAX_OPEN,
        allowed: Allowed = Allowed(),  # noqa: B008 - it is immutable
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._journal = journal
        self._host = host
        self._max_open = max_open
        self._allowed = allowed
        self._clock = clock
        self._sessions: dict[str, _Live] = {}
        self._takes_more = True
        self._one_ended = asyncio.Event()

    # -- life ----------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Continue the sessions from before a restart of this node. Call it first."""
        for state in await asyncio.to_thread(self._store.load_all):
            session = await self._restored(state) if state.status in ("open", "completed") else None
            self._sessions[state.session_id] = _Live(state, session)
        for opened in self._journal.unclosed():
            if is_external(opened) and self._ended(opened.session_id):
                await self._journal.close_attempt(AttemptKey(opened.session_id, opened.attempt))

    async def _restored(self, state: ExternalState) -> ModelSession:
        completions = await self._journal.read(AttemptKey(state.session_id, _ATTEMPT))
        request = SessionRequest.model_validate(state.request)
        log.info("external.restored session=%s completions=%d", state.session_id, len(completions))
        return self._serve(state.session_id, bytes.fromhex(state.key_digest), request, completions)

    def _ended(self, session_id: str) -> bool:
        live = self._sessions.get(session_id)
        return live is None or live.session is None

    async def expire(self) -> None:
        """Abort sessions that were unused for their time to live, and delete sessions that ended that long ago."""
        now = self._clock()
        for session_id, live in list(self._sessions.items()):
            if now - self._last_used(live) <= live.request.ttl_s:
                continue
            if live.session is not None:
                log.warning("external.expired session=%s", session_id)
                await self.abort(session_id)
            else:
                await asyncio.to_thread(self._store.remove, session_id)
                del self._sessions[session_id]

    @staticmethod
    def _last_used(live: _Live) -> float:
        last = 0.0 if live.session is None else max((call.finished_at for call in live.session.tree), default=0.0)
        return max(last, live.state.created_at, live.state.ended_at)

    async def close(self) -> None:
        """End the calls in flight. The sessions continue after the node's restart. Idempotent."""
        for live in self._sessions.values():
            if live.session is not None:
                await live.session.fence("the node is stopping")

    def close_door(self) -> None:
        """Open no more sessions; open ones continue. Idempotent."""
        self._takes_more = False

    async def all_ended(self) -> None:
        """Return when no session is open."""
        while self.num_open():
            self._one_ended.clear()
            await self._one_ended.wait()

    def num_open(self) -> int:
        return sum(live.session is not None for live in self._sessions.values())

    # -- the owner's side ----------------------------------------------------------------------------------------

    async def create(self, request: SessionRequest, origin: str, model: str) -> OpenedSession:
        """Open a session. `origin`: how the caller reaches the node. `model`: the served one.

        Raises: Conflict when the id is taken, TooMany, UnknownPlugin, InvalidRequest, StoreError, NodeDraining.
        """
        if not self._takes_more:
            raise NodeDraining("this node takes no more sessions: open it on another node.")
        plugins.make_builder(request.builder.strategy, request.builder.config)
        if request.capture.checkpoints != "none":
            raise InvalidRequest("capture.checkpoints needs a sandbox of the node's, and this agent runs elsewhere.")
        self._allowed.check_template(request.capture.template_kwargs)
        session_id = request.session_id or new_id("session")
        if session_id in self._sessions or self._is_leased(session_id):
            raise Conflict(f"session {session_id!r} exists already; its key is returned only once.")
        if self.num_open() >= self._max_open:
            raise TooMany(f"{self._max_open} sessions are open; finalize or abort some.", limit=self._max_open)
        key = new_secret("gls")
        state = ExternalState(
            session_id=session_id,
            key_digest=key_digest(key).hex(),
            request=request.model_dump(mode="json"),
            model=request.model or model,
            created_at=self._clock(),
        )
        self._sessions[session_id] = live = _Live(state, None)  # reserves the id from here on
        try:
            await self._store.save(state)
            await self._journal.open_attempt(AttemptOpened(session_id, _ATTEMPT, live.task_id, 0))
            live.session = self._serve(session_id, key, request, ())
        except BaseException:  # its caller left, or the disk is full: release the id
            del self._sessions[session_id]
            with suppress(GanglineError):
                await self._journal.close_attempt(AttemptKey(session_id, _ATTEMPT))
            await asyncio.to_thread(self._store.remove, session_id)
            raise
        base = f"{origin}/s/{session_id}"
        urls = {"openai": f"{base}/v1", "anthropic": base, "google": base}
        return OpenedSession(
            session_id=session_id,
            node_id=self._node_id,
            api_key=key,
            base_url=f"{origin}/sessions/{session_id}/v1",
            base_urls=urls,
            model=state.model,
        )

    def _is_leased(self, session_id: str) -> bool:
        """Whether it is leased, or was and its result is not delivered yet."""
        in_journal = any(opened.session_id == session_id for opened in self._journal.unclosed())
        return in_journal or self._host.serves(session_id)

    def _serve(
        self, session_id: str, key: str | bytes, request: SessionRequest, completions: Sequence[Completion]
    ) -> ModelSession:
        spec = SessionSpec(
            session_id=session_id,
            task_id=request.task_id or session_id,
            attempt=_ATTEMPT,
            key=key,
            capture=request.capture,
            max_turns=request.max_turns,
            max_repeated_actions=request.max_repeated_actions,
        )
        return self._host.open_session(spec, completions)

    def view(self, session_id: str) -> ExternalView:
        """Raises: NotFound."""
        live = self._live(session_id)
        return ExternalView(
            session_id=session_id,
            task_id=live.task_id,
            status=live.state.status,
            model=live.state.model,
            created_at=live.state.created_at,
            num_calls=0 if live.session is None else live.session.num_calls,
            claim=live.state.claim,
            metadata=live.request.metadata,
        )

    def views(self) -> list[ExternalView]:
        return [self.view(session_id) for session_id in self._sessions]

    async def wait(self, session_id: str, timeout_s: float) -> ExternalView:
        """Returns the session once its agent reported that it is done, it has ended, or `timeout_s` passed.

        Raises: NotFound.
        """
        live = self._live(session_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await live.done.wait()
        return self.view(session_id)

    async def finalize(self, session_id: str) -> SessionResult:
        """Close the session and build its trajectory, with completions. Returns the same result every time.

        Raises: NotFound, Conflict when it was aborted, StoreError.
        """
        live = self._live(session_id)
        async with live.order:
            if live.state.status == "aborted":
                raise Conflict(f"session {session_id!r} was aborted; nothing of it is kept.")
            if live.session is not None:
                await live.session.fence("the session has been finalized")
                completions = await self._journal.read(AttemptKey(session_id, _ATTEMPT))
                result = await _result(self._node_id, live, live.session, completions)
                await self._store.save_result(result)
                await self._end(live, "finalized")
            return await self._store.load_result(session_id)

    async def abort(self, session_id: str) -> ExternalView:
        """Close the session and discard its records. Idempotent. Raises: NotFound, Conflict when it was finalized."""
        live = self._live(session_id)
        async with live.order:
            if live.state.status == "finalized":
                raise Conflict(f"session {session_id!r} was finalized; its result is kept.")
            if live.session is not None:
                await live.session.fence("the session has been aborted")
                await self._end(live, "aborted")
        return self.view(session_id)

    async def _end(self, live: _Live, status: Literal["finalized", "aborted"]) -> None:
        state = msgspec.structs.replace(live.state, status=status, ended_at=self._clock())
        await self._store.save(state)
        live.state, live.session = state, None
        self._host.close_session(state.session_id)
        live.done.set()
        await self._journal.close_attempt(AttemptKey(state.session_id, _ATTEMPT))
        self._one_ended.set()
        log.info("external.%s session=%s", status, state.session_id)

    # -- the agent's side ----------------------------------------------------------------------------------------

    def authorised(self, session_id: str, digest: bytes) -> ModelSession:
        """Raises: Unauthorized, with the same message for a wrong key and an unknown session; SessionOver."""
        live = self._sessions.get(session_id)
        if live is None or not hmac.compare_digest(bytes.fromhex(live.state.key_digest), digest):
            raise Unauthorized("no such session, or the key belongs to another one.")
        if live.session is None:
            raise SessionOver("the session is over")
        return live.session

    async def complete(self, session_id: str, claim: ClaimRequest) -> None:
        """Record that the agent is done, with its first claim. Raises: NotFound, SessionOver, Conflict, StoreError."""
        live = self._live(session_id)
        async with live.order:
            if live.session is None:
                raise SessionOver("the session is over")
            made = Claim(reward=claim.claimed_reward, reward_info=claim.reward_info)
            if live.state.claim is not None:
                if live.state.claim != made:
                    raise Conflict("the session was completed already, with another claim.")
                return
            state = msgspec.structs.replace(live.state, status="completed", claim=made)
            await self._store.save(state)
            live.state = state
            live.done.set()

    def _live(self, session_id: str) -> _Live:
        """Raises: NotFound."""
        live = self._sessions.get(session_id)
        if live is None:
            raise NotFound(f"this node has no session {session_id!r}.")
        return live


async def _result(node_id: str, live: _Live, session: ModelSession, completions: list[Completion]) -> SessionResult:
    session_id, request, claim = live.state.session_id, live.request, live.state.claim
    outcome, failure = _outcome(session, request, completed=claim is not None)
    trajectory: Trajectory | None = None
    try:
        trajectory = await asyncio.to_thread(_build, session_id, live.task_id, request.builder, completions)
    except GanglineError as error:
        outcome, failure = "infra_error", error.failure()
    is_claimed = request.reward_policy == "claimed" and outcome not in UNGRADED
    reward = claim.reward if claim is not None and is_claimed else None
    if trajectory is not None and claim is not None:
        trajectory = _with_claim(trajectory, claim)
    if trajectory is not None and reward is not None:
        trajectory = apply_reward(trajectory, Reward(reward=reward))
    return SessionResult(
        session_id=session_id,
        task_id=live.task_id,
        node_id=node_id,
        attempt=_ATTEMPT,
        fence=0,
        outcome=outcome,
        failure=failure,
        reward=reward if trajectory is not None else None,
        reward_details={} if claim is None else _claimed(claim),
        trajectory=trajectory,
        completions=tuple(completions),
    )


def _outcome(session: ModelSession, request: SessionRequest, *, completed: bool) -> tuple[Outcome, Failure | None]:
    """Returns the outcome as far as a node knows it: an agent that met our failure and never reported completion did
    not complete."""
    broken = session.failures.broken
    has_called = len(session.tree) > 0 or request.allow_no_model_call
    if broken is not None and not (completed and has_called):
        return "infra_error", broken
    if session.limit is None and not has_called:
        return "no_model_call", session.failures.no_model_call()
    return session.limit or "completed", None


def _build(session_id: str, task_id: str, spec: BuilderSpec, completions: list[Completion]) -> Trajectory:
    """Raises: BuilderError."""
    if not completions:
        return Trajectory(session_id=session_id, task_id=task_id, builder=spec.strategy, traces=(), num_completions=0)
    builder = plugins.make_builder(spec.strategy, spec.config)
    return built(builder, completions, session_id=session_id, task_id=task_id)


def _claimed(claim: Claim) -> dict[str, Any]:
    return {"claimed_reward": claim.reward, "reward_info": claim.reward_info}


def _with_claim(trajectory: Trajectory, claim: Claim) -> Trajectory:
    """Add the claim to each trace: the agent's own report, not a reward."""
    traces = tuple(
        msgspec.structs.replace(trace, metadata=trace.metadata | _claimed(claim)) for trace in trajectory.traces
    )
    return msgspec.structs.replace(trajectory, traces=traces)
