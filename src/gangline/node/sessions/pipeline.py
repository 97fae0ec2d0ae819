"""A node's sessions: leases them while there is room, runs them, delivers results, keeps leases alive and drops
cancelled sessions at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from gangline.domain.errors import Failure, GanglineError, NodeIdTaken, PullPostponed
from gangline.domain.lifecycle import STAGES, Stage
from gangline.domain.node_views import NodeStatus
from gangline.domain.placement import needs_of
from gangline.domain.session import Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.machine.event_loop import is_cancelled, is_fault
from gangline.machine.telemetry.logs import stays_session_in_logs
from gangline.node.health.breaker import Breaker
from gangline.node.health.disk_guard import DiskGuard
from gangline.node.health.metrics import NodeNow
from gangline.node.health.offers import Offers
from gangline.node.health.sandbox_use import Orphans
from gangline.node.health.watchdog import Watchdog
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.leases.delivery import Delivery
from gangline.node.sessions.leases.recovery import Recovery
from gangline.node.sessions.leases.rollout_server import LeaseGiver
from gangline.node.sessions.leases.server_link import ServerLink
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.replay.forks import begins_anew

log = logging.getLogger("gangline.node")

_POSTPONED_S = 10.0
"""Rest of a session whose image is not pulled now, where the server would send it back at once."""
_JOIN_S = 10.0

_LeaseKey = tuple[str, int]
"""(session id, fence): a session that was lost and leased again has another lease."""


@asynccontextmanager
async def one_error() -> AsyncGenerator[None]:
    """Raise the first error of a task group, which cancelled the group's other tasks and is why the node ends."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def _none_is_open() -> None:
    return None


class Pipeline:
    """Run `run()` until cancelled, then `close()`: sessions go back to the server, and use up their attempt if their
    agent has started. After `drain()`, `run` returns when the last session has ended.

    Long because it has everything that happens to a lease.
    """

    def __init__(
        self,
        parts: NodeParts,
        server: LeaseGiver,
        delivery: Delivery,
        *,
        url: str,
        identity: str = "",
        num_external: Callable[[], int] = int,
        external_ended: Callable[[], Awaitable[None]] = _none_is_open,
        breaker: Breaker | None = None,
        watchdog: Watchdog | None = None,
        disk: DiskGuard | None = None,
        offers: Offers | None = None,
        heartbeat_s: float = 3.0,
        lease_wait_s: float = 20.0,
    ) -> None:
        """identity: of the node's data folder.
        num_external: open sessions of agents elsewhere, for the heartbeat. external_ended: waits for their ends.
        """
        self._parts = parts
        self._link = ServerLink(parts, server, url=url, identity=identity, every_s=heartbeat_s)
        self._delivery = delivery
        self._recovery = Recovery(parts.node_id, parts.journal, delivery)
        self._num_external, self._external_ended = num_external, external_ended
        self._breaker = breaker or Breaker()
        self._watchdog = watchdog or Watchdog()
        self._disk = disk or DiskGuard(parts.runtimes_folder)
        self._orphans = Orphans(parts.runtimes_folder, parts.sandboxes)
        self._offers = offers or Offers()
        self._lease_wait_s = lease_wait_s
        self._attempts: dict[_LeaseKey, Attempt] = {}
        self._tasks: dict[_LeaseKey, asyncio.Task[None]] = {}
        self._lost: dict[str, int] = {}
        """session id -> fence, of sessions whose end was not reported to the server."""
        self._room = asyncio.Event()
        self._disk.on_change = self._disk_changed
        self._disk_changed()
        self._num_ended = 0
        self._draining = asyncio.Event()

    async def join(self) -> None:
        """Announce this node to the server, before `adopt` and `run`. A server that is down is informed later.

        Raises: NodeIdTaken when a node with another data folder has its id.
        """
        self._recovery.find()
        try:
            async with asyncio.timeout(_JOIN_S):
                await self._beat_once()
        except TimeoutError:
            log.warning("heartbeat.failed wait_s=%g: the server did not answer", _JOIN_S)

    async def run(self) -> None:
        """Raises: like `join`, when another node took the id while this one was not heard."""
        self._link.renewals.start()
        try:
            await self._run()
        finally:
            await self._link.renewals.stop()
        log.info("node.drained node=%s", self._parts.node_id)

    async def _run(self) -> None:
        async with one_error(), asyncio.TaskGroup() as group:
            recovering = group.create_task(self._recovery.run({attempt.key for attempt in self._attempts.values()}))
            beating = group.create_task(self._beat())
            guarding = group.create_task(self._disk.watch(self._attempts.values))
            offering = group.create_task(self._offers.watch())
            looking = group.create_task(self._orphans.watch())
            pulling = group.create_task(self._pull_after(recovering))
            await self._draining.wait()
            pulling.cancel()
            await asyncio.wait({pulling, recovering})
            while self._tasks:
                await asyncio.wait(self._tasks.values())
            await self._external_ended()
            for task in (beating, guarding, offering, looking):
                task.cancel()

    def drain(self) -> None:
        """Lease no more sessions; current ones continue to their end. Idempotent."""
        if not self._draining.is_set():
            log.info("node.draining node=%s sessions=%d", self._parts.node_id, len(self._attempts))
            self._draining.set()

    def adopt(self, attempts: Iterable[Attempt]) -> None:
        """Continue attempts from before the node's restart. Call before `run`."""
        for attempt in attempts:
            self._begin(attempt)

    async def close(self) -> None:
        """Stop every attempt, give its lease back, and take leave of the server. Idempotent."""
        running = dict(self._tasks)
        log.info("node.stopping sessions=%d: they are given back", len(running))
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.wait(running.values())
        self._link.leaving = True
        with suppress(NodeIdTaken, TimeoutError):
            async with asyncio.timeout(_JOIN_S):
                await self._beat_once()

    def status(self) -> NodeStatus:
        return NodeStatus(
            node_id=self._parts.node_id,
            model=self._parts.model,
            stages=self._num_in_stages(),
            sizes=self._parts.pools.sizes.model_dump(),
            num_ended=self._num_ended,
            draining=self._draining.is_set(),
            breaker=self._breaker.view(),
            stuck=self._watchdog.stuck,
            disk=self._disk.state(),
            pulling=dict(self._parts.images.now().waiting),
            orphans=self._orphans.found,
            num_external_sessions=self._num_external(),
        )

    def _num_in_stages(self) -> dict[Stage, int]:
        stages = [attempt.stage for attempt in self._attempts.values()]
        return {stage: stages.count(stage) for stage in STAGES}

    def now(self) -> NodeNow:
        """Returns the values for metrics and the heartbeat."""
        return NodeNow(
            stages={**self._num_in_stages()},
            sizes=self._parts.pools.sizes.model_dump(),
            num_stuck=len(self._watchdog.stuck),
            breaker=self._breaker.view(),
            disk=self._disk.state(),
            sandboxes=self._disk.sandboxes.now(),
            num_orphans=len(self._orphans.found),
            num_external=self._num_external(),
            num_checkpoints=self._parts.checkpoints.num_kept,
            checkpoint_bytes=self._parts.checkpoints.num_bytes,
            num_warm=0 if self._parts.warm is None else self._parts.warm.num_spare,
            backends=self._parts.backends.views(),
            places=self._parts.backends.policy.places,
            gate=self._parts.gate,
            images=self._parts.images.now(),
        )

    # -- leasing -------------------------------------------------------------------------------------------------

    def _free_places(self) -> int:
        stages = self._num_in_stages()
        if self._disk.is_low:
            return 0
        # Behind INIT they take their place: there must be room for them when their images have come.
        waiting = sum(attempt.waits_for_image for attempt in self._attempts.values())
        free = self._parts.pools.num_free(stages["init"] - waiting, stages["ready"] + waiting, len(self._attempts))
        return self._breaker.allowed(free)

    def _disk_changed(self) -> None:
        self._parts.images.disk_changed(is_low=self._disk.is_low)
        self._room.set()

    async def _until_room(self) -> None:
        """Wait until a session moved to another stage, or the breaker's pause is over."""
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._breaker.wait_s() or None):
                await self._room.wait()

    async def _pull(self) -> None:
        while True:
            while (free := self._free_places()) <= 0:
                await self._until_room()
            try:
                leases = await self._link.lease(free, self._lease_wait_s)
            except GanglineError as error:
                log.warning("lease.failed message=%s", error)
                await asyncio.sleep(1.0)
                continue
            allowed = 0 if self._disk.is_low else self._breaker.allowed(len(leases))  # changed meanwhile
            for lease in leases[:allowed]:
                self._start(lease)
            for lease in leases[allowed:]:
                await self._link.release(lease)

    def _start(self, lease: Lease) -> None:
        log.info("session.leased session=%s attempt=%d", lease.session_id, lease.attempt)
        self._begin(Attempt(lease, self._parts))

    def _begin(self, attempt: Attempt) -> None:
        attempt.stages.on_change = self._room.set
        lease = attempt.lease
        key = (lease.session_id, lease.fence)
        self._breaker.taken(key)
        older = [task for other, task in self._tasks.items() if other[0] == lease.session_id and self._may_end(other)]
        self._attempts[key] = attempt
        self._tasks[key] = asyncio.create_task(self._live(attempt, older), name=f"session.{lease.session_id}")
        self._tasks[key].add_done_callback(lambda done: self._ended(key, done))

    async def _live(self, attempt: Attempt, older: list[asyncio.Task[None]]) -> None:
        """Take one lease to its end, which is reported to the server in every case.

        older: tasks still running under lost leases of the session; they end first.
        """
        stays_session_in_logs(attempt.lease.session_id)
        try:
            for task in older:
                task.cancel()
            await asyncio.gather(*older, return_exceptions=True)
            result = await attempt.live()
            if await _goes_back(result.failure, attempt, self._parts, self._offers):
                self._breaker.ended((attempt.lease.session_id, attempt.lease.fence), result)
                await self._beat_once()  # the server learns first what this node no longer offers
                await self._rest(attempt, result)
                log.warning("session.given_back session=%s attempt=%d", *attempt.key)
                await self._give_back(attempt)
            else:
                await self._report(attempt, result)
        except BaseException as error:
            if is_cancelled() and not attempt.is_done:
                await self._give_back(attempt)
            if attempt.is_done or not is_fault(error):
                raise
            await self._report(attempt, await attempt.broken(error))

    async def _rest(self, attempt: Attempt, result: SessionResult) -> None:
        """Wait with a session whose image is not pulled now, where the server cannot know it and would return it."""
        if result.failure is not None and result.failure.code == PullPostponed.code:
            needs = needs_of(TaskRequest.model_validate(attempt.lease.task))
            if not self._offers.offer.lacks(needs):
                await asyncio.sleep(_POSTPONED_S)

    async def _report(self, attempt: Attempt, result: SessionResult) -> None:
        attempt.is_done = True
        self._breaker.ended((attempt.lease.session_id, attempt.lease.fence), result)
        self._parts.metrics.attempt_ended(result)
        try:
            if self._parts.on_result is not None:
                self._parts.on_result(result)
        except Exception:  # the operator's code
            log.exception("result.callback_failed session=%s attempt=%d", *attempt.key)
        await self._delivery.deliver(result)

    async def _give_back(self, attempt: Attempt) -> None:
        if await self._link.release(attempt.lease, has_run=attempt.has_run):
            await self._parts.journal.close_attempt(attempt.key)  # no longer needed

    def _ended(self, key: _LeaseKey, task: asyncio.Task[None]) -> None:
        del self._attempts[key], self._tasks[key]
        self._num_ended += 1
        self._breaker.ended(key, None)  # if no result was reported
        self._room.set()
        error = None if task.cancelling() else asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._lost[key[0]] = key[1]
            log.error("session.lost session=%s", key[0], exc_info=error)

    # -- keeping leases ------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._watchdog.look(self._attempts.values())
            for attempt in self._attempts.values():
                attempt.tell_spent()
            if self._parts.keeper is not None:
                self._parts.keeper.tell_held()
            await self._beat_once()
            await asyncio.sleep(self._link.every_s)

    async def _beat_once(self) -> None:
        held: dict[str, tuple[int, Stage]] = {name: (fence, "postrun") for name, fence in self._recovery.left.items()}
        # Listed until the server has seen it: a lease that was never reported costs no attempt. Then it expires.
        lost = dict(self._lost)
        held |= {session_id: (fence, "postrun") for session_id, fence in lost.items()}
        held |= {session_id: (fence, attempt.stage) for (session_id, fence), attempt in self._attempts.items()}
        draining, offer = self._draining.is_set(), self._offers.offer
        gone = await self._link.beat(held, self.now(), draining=draining, offer=offer)
        if gone is not None:
            self._lost = {name: fence for name, fence in self._lost.items() if lost.get(name) != fence}
        for session_id in gone or ():
            self._drop((session_id, held[session_id][0]))

    def _may_end(self, key: _LeaseKey) -> bool:
        """Whether an attempt may be cancelled. A late result is refused and set aside; cancelling its delivery would
        leave it behind."""
        return not self._attempts[key].is_done

    def _drop(self, key: _LeaseKey) -> None:
        """End a session that was cancelled or given to another node, and its runtime. One that is being delivered has
        none."""
        if key in self._tasks and self._may_end(key):
            log.info("session.dropped session=%s", key[0])
            self._tasks[key].cancel()

    # -- after a crash -------------------------------------------------------------------------------------------

    async def _pull_after(self, recovering: asyncio.Task[None]) -> None:
        """Lease after recovery has finished: an unfinished session may be leased to this node again, as the same
        attempt."""
        await asyncio.wait({recovering})
        await self._pull()


async def _goes_back(failure: Failure | None, attempt: Attempt, parts: NodeParts, offers: Offers) -> bool:
    """Whether a session failed through no fault of its own, should run again here or elsewhere, and has an attempt
    left."""
    lease = attempt.lease
    if failure is None or not (await begins_anew(failure, lease, parts) or await offers.are_why(failure, lease)):
        return False
    return not attempt.has_run or lease.attempt < TaskRequest.model_validate(lease.task).max_attempts
