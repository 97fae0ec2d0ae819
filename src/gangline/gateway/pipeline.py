"""A node's sessions: leased while there is room, run, delivered; leases kept alive, cancelled ones dropped at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from gangline.client import ServerClient
from gangline.domain.errors import Failure, GanglineError
from gangline.domain.lifecycle import Stage
from gangline.domain.session import Heartbeat, Lease, SessionResult
from gangline.gateway.attempt import Attempt, NodeParts
from gangline.gateway.delivery import Delivery
from gangline.gateway.external import is_external
from gangline.gateway.metrics import NodeNow
from gangline.store.journal import AttemptKey, AttemptOpened
from gangline.telemetry.logs import stays_session_in_logs

__all__ = ["Pipeline"]

log = logging.getLogger("gangline.node")

_LeaseKey = tuple[str, int]
"""(session id, fence): a session that was lost and leased again is another lease."""


class Pipeline:
    """`run()` until cancelled, then `close()`: what still ran goes back to the server unharmed."""

    def __init__(
        self,
        parts: NodeParts,
        client: ServerClient,
        delivery: Delivery,
        *,
        url: str,
        num_external: Callable[[], int] = int,
        heartbeat_s: float = 3.0,
        lease_wait_s: float = 20.0,
    ) -> None:
        """`num_external`: open sessions of agents elsewhere, for the heartbeat."""
        self._parts = parts
        self._client = client
        self._delivery = delivery
        self._url = url
        self._num_external = num_external
        self._heartbeat_s = heartbeat_s
        self._lease_wait_s = lease_wait_s
        self._attempts: dict[_LeaseKey, Attempt] = {}
        self._tasks: dict[_LeaseKey, asyncio.Task[None]] = {}
        self._left: dict[str, int] = {}
        """session id -> fence, of an earlier life's attempts that the server has not heard the end of."""
        self._room = asyncio.Event()
        self._num_ended = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._recover_and_pull())
            group.create_task(self._beat())

    async def close(self) -> None:
        """Stop every attempt and give its lease back. Idempotent."""
        running = dict(self._tasks)
        log.info("node.stopping sessions=%d: they are given back", len(running))
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.wait(running.values())

    def status(self) -> dict[str, Any]:
        """For people and for the heartbeat."""
        stages = [attempt.stage for attempt in self._attempts.values()]
        return {
            "node_id": self._parts.node_id,
            "model": self._parts.model,
            "stages": {stage: stages.count(stage) for stage in ("init", "ready", "run", "postrun")},
            "sizes": self._parts.pools.sizes.model_dump(),
            "num_ended": self._num_ended,
        }

    def now(self) -> NodeNow:
        """For metrics and for the heartbeat."""
        told = self.status()
        return NodeNow(
            stages=told["stages"],
            sizes=told["sizes"],
            num_external=self._num_external(),
            backends=self._parts.backends.views(),
            gate=self._parts.gate,
        )

    # -- leasing -------------------------------------------------------------------------------------------------

    def _free_places(self) -> int:
        before_run = sum(not attempt.entered_run.is_set() for attempt in self._attempts.values())
        sizes = self._parts.pools.sizes
        return min(sizes.ready_slots - before_run, sizes.capacity - len(self._attempts))

    async def _pull(self) -> None:
        while True:
            while (free := self._free_places()) <= 0:
                self._room.clear()
                await self._room.wait()
            try:
                leases = await self._client.lease(
                    self._parts.node_id, url=self._url, max_sessions=free, wait_s=self._lease_wait_s
                )
            except GanglineError as error:
                log.warning("lease.failed message=%s", error)
                await asyncio.sleep(1.0)
                continue
            for lease in leases:
                self._start(lease)

    def _start(self, lease: Lease) -> None:
        log.info("session.leased session=%s attempt=%d", lease.session_id, lease.attempt)
        attempt = Attempt(lease, self._parts)
        key = (lease.session_id, lease.fence)
        older = [task for (session_id, _), task in self._tasks.items() if session_id == lease.session_id]
        self._attempts[key] = attempt
        self._tasks[key] = asyncio.create_task(self._live(attempt, older), name=f"session.{lease.session_id}")
        self._tasks[key].add_done_callback(lambda done: self._ended(key, done))

    async def _live(self, attempt: Attempt, older: list[asyncio.Task[None]]) -> None:
        """One lease to its end. `older`: what still runs under lost leases of the session; it goes first."""
        stays_session_in_logs(attempt.lease.session_id)
        waiting_for_run = asyncio.create_task(attempt.entered_run.wait())
        waiting_for_run.add_done_callback(lambda _: self._room.set())
        try:
            for task in older:
                task.cancel()
            await asyncio.gather(*older, return_exceptions=True)
            result = await attempt.live()
        except asyncio.CancelledError:
            await self._release(attempt.lease)
            raise
        finally:
            waiting_for_run.cancel()
        self._parts.metrics.attempt_ended(result)
        if self._parts.on_result is not None:
            self._parts.on_result(result)
        await self._delivery.deliver(result)

    async def _release(self, lease: Lease) -> None:
        try:
            await self._client.release(self._parts.node_id, session_id=lease.session_id, fence=lease.fence)
        except GanglineError as error:  # then the lease runs out by itself
            log.warning("lease.not_released session=%s message=%s", lease.session_id, error)

    def _ended(self, key: _LeaseKey, task: asyncio.Task[None]) -> None:
        del self._attempts[key], self._tasks[key]
        self._num_ended += 1
        self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session.lost session=%s", key[0], exc_info=error)

    # -- leases kept ---------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            held: dict[str, tuple[int, Stage]] = {name: (fence, "postrun") for name, fence in self._left.items()}
            held |= {session_id: (fence, attempt.stage) for (session_id, fence), attempt in self._attempts.items()}
            now = self.now()
            beat = Heartbeat(
                node_id=self._parts.node_id,
                url=self._url,
                sessions=held,
                capacity=self._parts.pools.sizes.capacity,
                backends=tuple(msgspec.to_builtins(view) for view in now.backends),
                metrics=self._parts.metrics.numbers(now).as_metrics(),
            )
            try:
                reply = await self._client.heartbeat(beat)
            except GanglineError as error:
                log.warning("heartbeat.failed message=%s", error)
            else:
                for session_id in reply.lost:
                    self._drop((session_id, held[session_id][0]))
            await asyncio.sleep(self._heartbeat_s)

    def _drop(self, key: _LeaseKey) -> None:
        """Cancelled, or given to another node: its runtime dies now."""
        if key in self._tasks:
            log.info("session.dropped session=%s", key[0])
            self._tasks[key].cancel()

    # -- after a crash -------------------------------------------------------------------------------------------

    async def _recover_and_pull(self) -> None:
        """One after the other: a session that is left may be leased again, as the same attempt, to this node."""
        await self._recover()
        await self._pull()

    async def _recover(self) -> None:
        """Deliver what an earlier life of this node finished, and say what it left unfinished."""
        unclosed = [opened for opened in self._parts.journal.unclosed() if not is_external(opened)]
        self._left = {opened.session_id: opened.fence for opened in unclosed}
        finished = self._delivery.leftover()
        for key in finished:
            await self._delivery.deliver_leftover(key)
        for opened in unclosed:
            if (opened.session_id, opened.attempt) not in finished:
                await self._delivery.deliver(await self._interrupted(opened))
        self._left = {}

    async def _interrupted(self, opened: AttemptOpened) -> SessionResult:
        """The completed calls of an attempt that died with the node, so that they are kept with the session."""
        completions = await self._parts.journal.read(AttemptKey(opened.session_id, opened.attempt))
        return SessionResult(
            session_id=opened.session_id,
            task_id=opened.task_id,
            node_id=self._parts.node_id,
            attempt=opened.attempt,
            fence=opened.fence,
            outcome="infra_error",
            failure=Failure(
                boundary="node",
                code="node_restarted",
                message="the node died while the session ran; its completed calls are kept here",
                retryable=True,
            ),
            completions=tuple(completions),
        )
