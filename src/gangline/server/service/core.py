"""The rollout service, without HTTP: admission, leases, results, cancellation, and reclaiming expired leases.

Long polls wait on a notifier that is triggered by durable events; `store.sql.leasing` decides on transitions.

Nodes send heartbeats less often the more nodes there are, because each one costs a database write.

Heartbeats that the database refused, for example on a full disk, are kept in memory and still appear in the status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from gangline.domain.errors import Conflict, LimitExceeded, StoreError
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tenancy import DEFAULT_TENANT
from gangline.domain.unshown import why_hidden
from gangline.domain.views import (
    HEARTBEAT_REFUSED,
    SILENT_AFTER_S,
    Event,
    NodeView,
    ResultReceipt,
    ResultReference,
    ServiceStatus,
    SessionView,
    Submitted,
    TaskView,
)
from gangline.machine.telemetry.logs import FIELDS
from gangline.server.service.durable_turns import DurableTurns, TurnRecords
from gangline.server.service.known_tokens import KnownTokens
from gangline.server.service.metrics import ServerMetrics
from gangline.server.service.notifier import LeaseTurns, Notifier
from gangline.server.service.receivers import check_receiver
from gangline.settings import plugins
from gangline.settings.machine import read_task_secret
from gangline.store.results.files import Reports, Results
from gangline.store.sql.moving import CALLBACK
from gangline.store.sql.reader import result_of
from gangline.store.sql.tasks import TaskStore

log = logging.getLogger("gangline.server")

MAX_SESSIONS_AT_ONCE = 100_000

WORK, EVENTS, CALLS, CALLBACKS, NODES = "work", "events", "calls", "callbacks", "nodes"

_TOPICS_OF: dict[str, tuple[str, ...]] = {
    "task.submitted": (WORK,),
    "session.requeued": (WORK,),
    "session.released": (WORK,),
    "node.joined": (NODES,),
    "node.offer": (WORK,),
}

_MAX_PER_S = 100.0
"""Total heartbeats per second that a server requests."""
_WINDOW_S = 30.0


class HeartbeatRate:
    """Counts the nodes that send heartbeats to this server. Bound to one event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now: set[str] = set()
        self._before: set[str] = set()
        self._since = monotonic()

    def every_s(self, node_id: str, lease_s: float) -> float:
        """Seconds until the node's next heartbeat, if its own interval is shorter. At most a third of a lease, so that
        two may be lost.
        """
        now = self._monotonic()
        if now - self._since > _WINDOW_S:
            self._before, self._now, self._since = self._now, set(), now
        self._now.add(node_id)
        return min(max(len(self._now), len(self._before)) / _MAX_PER_S, lease_s / 3)


class RefusedHeartbeats:
    """The newest refused heartbeat of each node that is not silent. Bound to one event loop."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._refused: dict[str, tuple[Heartbeat, float, StoreError]] = {}

    @contextmanager
    def noted(self, beat: Heartbeat) -> Generator[None]:
        """Wraps the storing of a heartbeat. Raises: the errors of the block."""
        try:
            yield
        except StoreError as error:
            self._forget_silent()
            self._refused[beat.node_id] = beat, self._now(), error
            raise
        self._refused.pop(beat.node_id, None)

    def _forget_silent(self) -> None:
        since = self._now() - SILENT_AFTER_S
        self._refused = {node_id: told for node_id, told in self._refused.items() if told[1] >= since}

    def shown_in(self, status: ServiceStatus) -> ServiceStatus:
        self._forget_silent()
        if not self._refused:
            return status
        known = {node.node_id: node for node in status.nodes}
        shown = {node_id: self._shown(node_id, known.get(node_id)) for node_id in self._refused}
        return msgspec.structs.replace(status, nodes=tuple((known | shown).values()))

    def _shown(self, node_id: str, node: NodeView | None) -> NodeView:
        """node: as it is stored; None: it joined after the database could store nothing."""
        beat, at, error = self._refused[node_id]
        return NodeView(
            node_id=node_id,
            url=beat.url,
            capacity=beat.capacity,
            draining=beat.draining,
            num_sessions=len(beat.sessions) if node is None else node.num_sessions,
            backends=beat.backends,
            metrics=beat.metrics | {HEARTBEAT_REFUSED + error.code: 1.0},
            first_seen_at=at if node is None else node.first_seen_at,
            last_seen_at=at,
            age_s=max(0.0, self._now() - at),
        )


async def _warned(store: TaskStore, requests: Sequence[TaskRequest], answers: list[Submitted]) -> list[Submitted]:
    """Adds warnings about tools that engines do not show to the models of these tasks."""
    have_tools = await asyncio.to_thread(lambda: [plugins.has_tools(request) for request in requests])
    if not any(have_tools):
        return answers
    backends = await store.query(store.backends)
    warnings = [
        why_hidden(backends, request.agent) if has_some else None
        for request, has_some in zip(requests, have_tools, strict=True)
    ]
    return [
        one if why is None else msgspec.structs.replace(one, warnings=(why,))
        for one, why in zip(answers, warnings, strict=True)
    ]


def _topics(event: Event, turns: LeaseTurns, has_quotas: bool) -> tuple[str, ...]:
    """The topics to notify, except the topics of single tasks."""
    if event.kind == "task.ended":
        return (CALLBACKS,) if CALLBACK in event.data else ()
    frees = event.kind == "session.ended" and (has_quotas or turns.gives_gpus(event.data.get("node") or ""))
    return (WORK,) if frees else _TOPICS_OF.get(event.kind, ())


def task_topic(task_id: str) -> str:
    return f"task:{task_id}"


class RolloutService:
    """The operations of the server. `stop` is idempotent and wakes every long poll. Long because there are many.

    store: the service takes over its `on_events`. turns: store of turn records that survive their node. check_task:
    raises UnknownPlugin or InvalidRequest for a task that no node could run. sweep_every_s: interval of reclaiming
    expired leases. control_token: also that of nodes without one of their own.
    """

    def __init__(
        self,
        store: TaskStore,
        results: Results,
        *,
        turns: TurnRecords,
        check_task: Callable[[TaskRequest], None] = plugins.check_task,
        sweep_every_s: float = 2.0,
        monotonic: Callable[[], float] = time.monotonic,
        control_token: str | None = None,
    ) -> None:
        self.store = store
        self.results = results
        self.notifier = Notifier()
        self.metrics = ServerMetrics()
        self.watchers: list[Callable[[Sequence[Event]], None]] = [self.metrics.saw]
        """Each is called on the event loop with our own durable events, once."""
        on_stored: list[Callable[[SessionResult], None]] = []
        self.turns = DurableTurns(store, turns, self.watchers, on_stored)
        self.stopping = False
        self.tokens = KnownTokens(store, control_token)
        self._lease_turns = LeaseTurns()
        self._heartbeats = HeartbeatRate(monotonic)
        self._refused = RefusedHeartbeats()
        self._check_task = check_task
        self._sweep_every_s = sweep_every_s
        self._monotonic = monotonic
        count = partial(store.run_blocking, store.report)
        self._reports = Reports(results, count, on_stored)

    async def start(self) -> None:
        """Take over the store. Nodes that could not reach us while we were down get a full lease."""
        loop = asyncio.get_running_loop()

        def on_events(events: Sequence[Event]) -> None:
            loop.call_soon_threadsafe(self.announce, events)

        self.store.announce_to(on_events)
        await asyncio.to_thread(self.results.prepare)
        await self.turns.tidy()
        await self.tokens.start()
        held = await self.store.run(self.store.grant_grace)
        log.info("server.started database=%s leases_extended=%d", self.store.database.url.get_backend_name(), held)

    def stop(self) -> None:
        self.stopping = True
        self.notifier.notify_all()

    def close(self) -> None:
        """Blocks until no result is being stored. Later ones are refused."""
        self._reports.close()

    def announce(self, events: Sequence[Event]) -> None:
        """Log durable events and wake waiting callers."""
        for watch in self.watchers:
            watch(events)
        for event in events:
            _log_event(event)
        self.wake(events)

    def wake(self, events: Sequence[Event]) -> None:
        """Notify waiting callers of durable events, from this or another server."""
        for event in events:
            for topic in _topics(event, self._lease_turns, self.store.has_quotas):
                self.notifier.notify(topic)
            if event.kind == "task.ended" and event.task_id is not None:
                self.notifier.notify(task_topic(event.task_id))
        self.notifier.notify(EVENTS)

    # For users.

    async def submit(
        self, requests: Sequence[TaskRequest], tenant: str = DEFAULT_TENANT, *, bound: bool = False
    ) -> list[Submitted]:
        """Accept all tasks or none. bound: see `accept`.

        Raises: as `accept`; LimitExceeded, UnknownPlugin, StoreError, DiskFull.
        """
        if sum(request.num_samples for request in requests) > MAX_SESSIONS_AT_ONCE:
            raise LimitExceeded(f"one request may submit at most {MAX_SESSIONS_AT_ONCE} sessions; send several.")
        await asyncio.to_thread(lambda: [self._check(request, bound) for request in requests])
        return await _warned(self.store, requests, await self.store.run(self.store.submit, requests, tenant, bound))

    def _check(self, request: TaskRequest, bound: bool) -> None:
        self._check_task(request)
        if bound and request.callback_url is not None:
            check_receiver(request.callback_url)
        if request.callback_secret is not None:
            read_task_secret(request.callback_secret)

    async def task(self, task_id: str, wait_s: float = 0.0) -> TaskView:
        """The task now, when it has ended, or after `wait_s`. Raises: NotFound."""
        deadline = self._monotonic() + wait_s
        with self.notifier.listen(task_topic(task_id)) as listener:
            left_s = deadline - self._monotonic()
            if left_s > 0 and not self.stopping and not await self.store.query(self.store.task_ended, task_id):
                await listener.wait(left_s)
        return await self.store.query(self.store.task, task_id)

    async def task_results(self, task_id: str, *, partial: bool) -> tuple[TaskView, list[SessionResult]]:
        """Results by sample index; with `partial`, the available ones.

        Raises: NotFound, Conflict if the task has not ended and `partial` is false.
        """
        task = await self._task_with_results(task_id, partial=partial)
        ended = [session for session in task.sessions if session.state == "ended"]
        return task, await asyncio.to_thread(lambda: [result_of(session, self.results) for session in ended])

    async def _task_with_results(self, task_id: str, *, partial: bool) -> TaskView:
        task = await self.store.query(self.store.task, task_id)
        if not task.ended and not partial:
            raise Conflict(
                f"task {task_id!r} has not ended: {task.num_open} of {task.num_samples} sessions are open; "
                f"wait with GET /v1/tasks/{task_id}?wait_s=60, or ask with ?partial=1 for what there is.",
                num_open=task.num_open,
            )
        return task

    async def task_references(self, task_id: str, *, partial: bool) -> list[ResultReference]:
        """Locations of the results, by sample index. Raises: as `task_results`."""
        task = await self._task_with_results(task_id, partial=partial)
        ended = [session for session in task.sessions if session.state == "ended"]
        return await asyncio.to_thread(lambda: [self._reference(session) for session in ended])

    async def session_reference(self, session_id: str, attempt: int | None = None) -> ResultReference:
        """Location of the session's result, or of one attempt's. Raises: as `session_result`."""
        session = await self._session_with_result(session_id, attempt)
        return await asyncio.to_thread(self._reference, session, attempt)

    def _reference(self, session: SessionView, attempt: int | None = None) -> ResultReference:
        attempt = attempt or session.result_attempt
        url, num_bytes = None, 0
        if attempt is not None:
            url, num_bytes = self.results.locate(session.task_id, session.session_id, attempt)
        return ResultReference(
            session_id=session.session_id,
            attempt=attempt or session.attempt,
            outcome=session.outcome,
            reward=session.reward,
            url=url,
            num_bytes=num_bytes,
        )

    async def session_result(self, session_id: str, attempt: int | None = None) -> SessionResult:
        """The session's result, or one attempt's. Raises: NotFound, Conflict if the session has not ended."""
        session = await self._session_with_result(session_id, attempt)
        if attempt is not None:
            return await asyncio.to_thread(self.results.read, session.task_id, session_id, attempt)
        return await asyncio.to_thread(result_of, session, self.results)

    async def _session_with_result(self, session_id: str, attempt: int | None) -> SessionView:
        session = await self.store.query(self.store.session, session_id)
        if attempt is None and session.state != "ended":
            raise Conflict(
                f"session {session_id!r} has not ended: it is {_state(session)}; wait for its task with "
                f"GET /v1/tasks/{session.task_id}?wait_s=60, or ask for an earlier attempt with ?attempt=1.",
                state=session.state,
            )
        return session

    async def cancel_task(self, task_id: str) -> TaskView:
        return await self.store.run(self.store.cancel_task, task_id)

    async def cancel_session(self, session_id: str) -> SessionView:
        return await self.store.run(self.store.cancel_session, session_id)

    # For nodes.

    async def lease(
        self,
        node_id: str,
        url: str,
        max_sessions: int,
        wait_s: float,
        identity: str = "",
        task_ids: Sequence[str] | None = None,
        key: str = "",
    ) -> list[Lease]:
        """Sessions for a node: at once if some are queued, otherwise when some arrive, or none after `wait_s`.

        task_ids: only sessions of these tasks. key: of the node's token.

        Raises: NodeIdTaken.
        """
        deadline = self._monotonic() + wait_s

        async def take() -> list[Lease]:
            return await self.store.run(self.store.lease, node_id, url, max_sessions, identity, task_ids, key)

        with self.notifier.listen(WORK) as listener:
            leases = await take()
            while not leases and not self.stopping and (left_s := deadline - self._monotonic()) > 0:
                if not await listener.wait(left_s):
                    return await take()
                num_announced = self.notifier.num_notified(WORK)
                leases = await self._lease_turns.taken(node_id, task_ids, num_announced, take)
            return leases

    async def status(self, tenant: str | None = None) -> ServiceStatus:
        """tenant: only of its tasks, and without nodes; None: of the whole service, silent nodes without figures."""
        status = await self.store.query(self.store.status, tenant)
        heard = [
            node if node.age_s <= SILENT_AFTER_S else msgspec.structs.replace(node, backends=(), metrics={})
            for node in status.nodes
        ]
        status = msgspec.structs.replace(status, nodes=tuple(heard))
        return self._refused.shown_in(status) if tenant is None else status

    async def heartbeat(self, beat: Heartbeat, key: str = "") -> HeartbeatReply:
        """key: of the node's token. Raises: NodeIdTaken, StoreError, DiskFull."""
        with self._refused.noted(beat):
            reply = await self.store.run(self.store.heartbeat, beat, key)
        self._lease_turns.heard(beat)
        return msgspec.structs.replace(reply, every_s=self._heartbeats.every_s(beat.node_id, reply.lease_s))

    async def release(self, node_id: str, session_id: str, fence: int, *, has_run: bool = False) -> None:
        """Raises: NotFound, LeaseLost."""
        await self.store.run(self.store.release, node_id, session_id, fence, has_run)

    async def report(self, session_id: str, data: bytes) -> ResultReceipt:
        """Store a node's result (MessagePack of a SessionResult), then record it.

        Raises: msgspec.ValidationError, InvalidRequest, NotFound, LeaseLost, StoreError, DiskFull.
        """
        return await self._reports.take(session_id, data)

    # For the server's own upkeep.

    async def sweep_forever(self) -> None:
        """Reclaim expired leases. After a pause of ours, nodes first get a full lease to send heartbeats again."""
        last = self._monotonic()
        while True:
            await asyncio.sleep(self._sweep_every_s)
            now = self._monotonic()
            try:
                await self.sweep(after_pause=now - last > self._sweep_every_s + self.store.lease_s / 2)
                last = now  # an outage of the database counts as a pause: no heartbeats were stored
            except StoreError as error:
                log.error("server.sweep_failed code=%s message=%s", error.code, error.message)

    async def sweep(self, *, after_pause: bool = False) -> int:
        """Reclaim expired leases, and admit sessions to the queue that waited after a fault. Returns the number
        reclaimed.
        """
        if await self.store.run(self.store.admit_ready):
            self.notifier.notify(WORK)
        if after_pause:
            await self.store.run(self.store.grant_grace)
            return 0
        return await self.store.run(self.store.sweep)


def _state(session: SessionView) -> str:
    return session.state if session.unplaced is None else f"{session.state}, unplaced: {session.unplaced}"


def _log_event(event: Event) -> None:
    fields = {"task": event.task_id, "session": event.session_id, **event.data}
    values = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    log.info("%s %s", event.kind, values, extra={FIELDS: fields})
