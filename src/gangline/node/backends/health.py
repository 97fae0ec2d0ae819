"""Health checks: whether backends answer, and whether a backend that recovers still serves the same model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from gangline.domain.errors import EngineError, GanglineError, TooManyFiles
from gangline.domain.node_views import BackendState
from gangline.node.backends.clients import EngineClients, refuse_difference
from gangline.node.backends.engine import Backend

log = logging.getLogger("gangline.backends")


class HealthChecks:
    """Checks a pool's backends periodically. The pool sets their states."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        clients: EngineClients,
        set_state: Callable[[Backend, BackendState, str | None], None],
        on_healthy: Callable[[Backend], Awaitable[None]],
        *,
        every_s: float,
        timeout_s: float,
        max_failures: int,
        clock: Callable[[], float],
    ) -> None:
        """backends: the pool's, by id. set_state: sets a backend's state and error. on_healthy: called after each check
        of the rounds that a backend passes.

        max_failures: consecutive failed checks that make a backend unhealthy; one is enough when a call failed too.
        """
        self._backends = backends
        self._clients = clients
        self._set_state = set_state
        self._on_healthy = on_healthy
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._max_failures = max_failures
        self._clock = clock
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Check periodically from now on. Idempotent."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop the periodic checks. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _run(self) -> None:
        """Run a round every `every_s` until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.round()
            except* Exception:
                log.exception("backend.check_broken")

    async def round(self) -> None:
        """Check all backends once."""
        async with asyncio.TaskGroup() as group:
            for backend in list(self._backends.values()):
                group.create_task(self._check(backend))

    async def check_now(self, backend: Backend) -> None:
        """Check a backend whose call failed: it becomes unhealthy if this check fails too."""
        try:
            await backend.engine.check_health(self._timeout_s)
        except EngineError as error:
            backend.failed_at = self._clock()
            self._set_state(backend, "unhealthy", error.message)

    async def _check(self, backend: Backend) -> None:
        if backend.state == "draining":
            return
        try:
            await backend.engine.check_health(self._timeout_s)
            if backend.state == "unhealthy":
                await self._welcome_back(backend)
            await self._on_healthy(backend)
        except TooManyFiles:
            return  # this node's fault: says nothing about the backend
        except GanglineError as error:
            backend.num_failures += 1
            backend.failed_at = self._clock()
            if backend.state == "unhealthy" or backend.num_failures >= self._max_failures:
                self._set_state(backend, "unhealthy", error.message)
        else:
            backend.num_failures = 0

    async def _welcome_back(self, backend: Backend) -> None:
        """Raises: Conflict when the backend serves something else now; EngineError."""
        capabilities, identity = await self._clients.probe(backend.engine, backend.url)
        refuse_difference(backend.url, identity, backend.identity, "before it failed")
        backend.capabilities, backend.has_page = capabilities, True
        self._set_state(backend, "healthy", None)
