"""Keeps nodes running on a Ray cluster while this process lives, as many as `sizes` says.

- Ray spreads the actors over its machines. It restarts an actor whose process died, on another machine if its own is
  lost, and queues actors for which there is no room.
- A node that fails without dying (its engine does not answer) is placed again after a pause. If no node has been ready
  before, the failure is final: nothing works yet.
- A node that was drained, by us or by its operator, is not placed again.
- On every exit the actors are stopped, then killed. If this process disappears, Ray kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gangline.domain.errors import ClusterUnavailable, GanglineError, NodeError
from gangline.interop.ray.actors import NodeActor, NodeWork
from gangline.interop.ray.ray import Machine, Needs, is_member

_log = logging.getLogger("gangline.interop.ray")

_TELL_AFTER_S = 15.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LOOK_EVERY_S = 2.0


class Size(Protocol):
    """How many nodes there are, and where."""

    least: int
    """0: the first node may come at any time, or never."""

    async def look(self, nodes: RayNodes) -> None:
        """Called every two seconds: adds nodes, drains them, lets them go."""
        ...


class RayNodes:
    def __init__(
        self, work: NodeWork, *, size: Size, needs: Needs, stop_wait_s: float, on_ready: Callable[[], None]
    ) -> None:
        """`on_ready` is called once, for the first node. A node may take `stop_wait_s` to clean up at the end."""
        self._work = work
        self._size = size
        self._needs = needs
        self._stop_wait_s = stop_wait_s
        self._on_ready = on_ready
        self._any_ready = False
        self._group = asyncio.TaskGroup()
        self._nodes: dict[int, RayNode] = {}
        """By number."""

    async def keep(self) -> None:
        """Run until cancelled.

        Raises: GanglineError if a node failed before any was ready; ClusterUnavailable if this machine left the
        cluster.
        """
        if not self._size.least:
            self._is_ready()
        try:
            # A group cancels each task once: a second cancellation would interrupt the clean-up.
            async with self._group:
                self._group.create_task(self._look())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _look(self) -> None:
        while True:
            await self._check_member()
            await self._size.look(self)
            await asyncio.sleep(_LOOK_EVERY_S)

    @property
    def all(self) -> list[RayNode]:
        """Wanted and draining nodes."""
        return list(self._nodes.values())

    def add(self, machine: Machine | None = None) -> None:
        """Want one more node: on this machine and no other, or where Ray has room."""
        index = next(number for number in range(1, len(self._nodes) + 2) if number not in self._nodes)
        self._nodes[index] = node = RayNode(index, machine)
        self._group.create_task(self._keep(node))

    async def _keep(self, node: RayNode) -> None:
        try:
            await self._keep_until_let_go(node)
        finally:
            del self._nodes[node.index]

    async def _keep_until_let_go(self, node: RayNode) -> None:
        pause_s = _FIRST_PAUSE_S
        while not node.is_let_go.is_set():
            node.actor = actor = _Actor(self._work, node, self._needs)
            try:
                await self._watch(node, actor)
                return
            except GanglineError as error:
                if not self._any_ready:
                    raise
                await self._check_member()
                pause_s = _FIRST_PAUSE_S if actor.was_ready else min(2 * pause_s, _LONGEST_PAUSE_S)
                _log.warning("cluster.node_failed index=%d in_s=%.0f message=%s", node.index, pause_s, error)
            finally:
                node.actor = None
                await actor.end(self._stop_wait_s)
            if node.is_draining:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.is_let_go.wait(), pause_s)

    async def _check_member(self) -> None:
        """Raises: ClusterUnavailable."""
        if not await asyncio.to_thread(is_member):
            raise ClusterUnavailable("Ray does not run on this machine any more: start it again.")

    async def _watch(self, node: RayNode, actor: _Actor) -> None:
        """Watch one actor, including restarts, until its node has drained or is let go. Raises: GanglineError."""
        running = asyncio.create_task(actor.run())
        ready = asyncio.create_task(actor.ready())
        let_go = asyncio.create_task(node.is_let_go.wait())
        try:
            if not await _first_of({running, ready, let_go}, _TELL_AFTER_S):
                needs = self._needs.all()
                _log.warning("cluster.waiting index=%d needs=%s: Ray has no room for it yet", actor.index, needs)
                await _first_of({running, ready, let_go}, None)
            if ready.done():
                _log.info("cluster.node_ready index=%d url=%s", actor.index, ready.result())
                self._is_ready()
                await _first_of({running, let_go}, None)
            if running.done():
                running.result()
                _log.info("cluster.node_drained index=%d", actor.index)
        finally:
            for task in (running, ready, let_go):
                task.cancel()
            await asyncio.gather(running, ready, let_go, return_exceptions=True)

    def _is_ready(self) -> None:
        if not self._any_ready:
            self._any_ready = True
            self._on_ready()


async def _first_of(tasks: set[asyncio.Task[Any]], timeout_s: float | None) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


class RayNode:
    """A node that is wanted until it has drained or is let go."""

    def __init__(self, index: int, machine: Machine | None) -> None:
        self.index = index
        self.machine = machine
        """The only one on which it may run."""
        self.actor: _Actor | None = None
        self.is_let_go = asyncio.Event()
        self.is_draining = False

    async def url(self, wait_s: float) -> str | None:
        """Where it answers now; None if it does not run, or was not known within `wait_s`."""
        return None if self.actor is None else await self.actor.url(wait_s)

    def drain(self) -> None:
        """Do not place it again. Its sessions end, which the caller asks it for; one that was never ready has none."""
        self.is_draining = True
        if self.actor is None or not self.actor.was_ready:
            self.let_go()

    def let_go(self) -> None:
        """Stop it now: sessions that it runs go back to the queue."""
        self.is_let_go.set()


class _Actor:
    """A handle of one actor that converts Ray's errors to ours."""

    def __init__(self, work: NodeWork, node: RayNode, needs: Needs) -> None:
        self.index = node.index
        self.was_ready = False
        machine = node.machine
        placed: Any = ray.remote(NodeActor).options(
            num_cpus=needs.cpus,
            resources=needs.resources,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.ray_id, soft=False) if machine else "SPREAD",
            max_restarts=-1,
            max_task_retries=-1,
        )
        self._handle: Any = placed.remote(work, node.index)
        self._asked: asyncio.Task[str] | None = None

    async def run(self) -> None:
        """Returns when its node has drained. Raises: NodeError if it cannot be kept running; errors of the work."""
        with _our_errors(self.index):
            await self._handle.run.remote()

    async def ready(self) -> str:
        with _our_errors(self.index):
            url = await self._handle.ready.remote()
        self.was_ready = True
        return str(url)

    async def url(self, wait_s: float) -> str | None:
        """See `RayNode.url`. One question at a time: an actor that Ray places anew may have to wait for a machine."""
        if not self.was_ready:
            return None
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self.ready())
        await asyncio.wait({self._asked}, timeout=wait_s)
        return None if not self._asked.done() or self._asked.exception() else self._asked.result()

    async def end(self, wait_s: float) -> None:
        """An actor that was never ready has no sessions to give back, and may not be on a machine yet, so it is only
        killed.
        """
        if self._asked is not None:
            self._asked.cancel()
        if self.was_ready:
            with contextlib.suppress(TimeoutError, RayError):
                async with asyncio.timeout(wait_s):
                    await self._handle.stop.options(max_task_retries=0).remote()
        with contextlib.suppress(ValueError, RayError):
            ray.kill(self._handle, no_restart=True)


@contextlib.contextmanager
def _our_errors(index: int) -> Any:
    try:
        yield
    except RayTaskError as error:
        if isinstance(cause := error.cause, GanglineError):
            raise cause from error
        raise NodeError(f"node {index} on Ray met a defect: {error}") from error
    except RayError as error:
        raise NodeError(f"Ray could not keep node {index}: {error}") from error
