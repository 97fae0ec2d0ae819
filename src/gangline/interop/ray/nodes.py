"""Keeps a number of nodes running on a Ray cluster while this process lives.

- Ray spreads the actors over its machines. It restarts an actor whose process died, on another machine if its own is
  lost, and queues actors for which there is no room.
- A node that fails without dying (its engine does not answer) is placed again after a pause. If no node has been ready
  before, the failure is final: nothing works yet.
- On every exit the actors are stopped, then killed. If this process disappears, Ray kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from gangline.domain.errors import ClusterUnavailable, GanglineError, NodeError
from gangline.interop.ray.actors import NodeActor, NodeWork
from gangline.interop.ray.ray import Needs, is_member

_log = logging.getLogger("gangline.interop.ray")

_TELL_AFTER_S = 15.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class RayNodes:
    def __init__(
        self, work: NodeWork, *, num_nodes: int, needs: Needs, stop_wait_s: float, on_ready: Callable[[], None]
    ) -> None:
        """`on_ready` is called once, for the first node. A node may take `stop_wait_s` to clean up at the end."""
        self._work = work
        self._num_nodes = num_nodes
        self._needs = needs
        self._stop_wait_s = stop_wait_s
        self._on_ready = on_ready
        self._any_ready = False

    async def keep(self) -> None:
        """Run until cancelled.

        Raises: GanglineError if a node failed before any was ready; ClusterUnavailable if this machine left the
        cluster.
        """
        try:
            # A group cancels each task once: a second cancellation would interrupt the clean-up.
            async with asyncio.TaskGroup() as group:
                for index in range(1, self._num_nodes + 1):
                    group.create_task(self._keep(index))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _keep(self, index: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            actor = _Actor(self._work, index, self._needs)
            try:
                await self._watch(actor)
            except GanglineError as error:
                if not self._any_ready:
                    raise
                if not await asyncio.to_thread(is_member):
                    raise ClusterUnavailable("Ray does not run on this machine any more: start it again.") from error
                pause_s = _FIRST_PAUSE_S if actor.was_ready else min(2 * pause_s, _LONGEST_PAUSE_S)
                _log.warning("cluster.node_failed index=%d in_s=%.0f message=%s", index, pause_s, error)
            finally:
                await actor.end(self._stop_wait_s)
            await asyncio.sleep(pause_s)

    async def _watch(self, actor: _Actor) -> None:
        """Watch one actor, including restarts. Raises: GanglineError."""
        running = asyncio.create_task(actor.run())
        ready = asyncio.create_task(actor.ready())
        try:
            if not await _first_of(running, ready, _TELL_AFTER_S):
                needs = self._needs.all()
                _log.warning("cluster.waiting index=%d needs=%s: Ray has no room for it yet", actor.index, needs)
                await _first_of(running, ready, None)
            if ready.done():
                _log.info("cluster.node_ready index=%d url=%s", actor.index, ready.result())
                if not self._any_ready:
                    self._any_ready = True
                    self._on_ready()
            await running
        finally:
            running.cancel()
            ready.cancel()
            await asyncio.gather(running, ready, return_exceptions=True)


async def _first_of(one: asyncio.Task[Any], other: asyncio.Task[Any], timeout_s: float | None) -> bool:
    done, _ = await asyncio.wait({one, other}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


class _Actor:
    """A handle of one actor that converts Ray's errors to ours."""

    def __init__(self, work: NodeWork, index: int, needs: Needs) -> None:
        self.index = index
        self.was_ready = False
        placed: Any = ray.remote(NodeActor).options(
            num_cpus=needs.cpus,
            resources=needs.resources,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=-1,
        )
        self._handle: Any = placed.remote(work, index)

    async def run(self) -> None:
        """Raises: NodeError if it cannot be kept running; errors of the node's work."""
        with _our_errors(self.index):
            await self._handle.run.remote()

    async def ready(self) -> str:
        with _our_errors(self.index):
            url = await self._handle.ready.remote()
        self.was_ready = True
        return str(url)

    async def end(self, wait_s: float) -> None:
        """An actor that was never ready has no sessions to give back, and may not be on a machine yet, so it is only
        killed.
        """
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
