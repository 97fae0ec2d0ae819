"""Stages of one attempt: the present one, its budget, and the times of those that are over.

The pools of a node's stages, their sizes, and how many sessions a node may lease so that none waits for another.

Laws
- A session is leased when INIT can begin with it at once, and when it will find a place behind INIT, in READY or RUN.
  So a full READY stops INIT, no INIT worker is ever held by a prepared runtime, and sessions that this node cannot
  begin yet are left for others.
- Clean runtimes for graders have their own workers: they never keep an agent's runtime waiting, nor come unbounded.
- POSTRUN has a queue, bounded by the node's total of sessions: evaluations that cannot keep up slow down leasing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType

from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.errors import InvalidRequest
from gangline.domain.lifecycle import Stage
from gangline.domain.session import StageTiming
from gangline.store.journal.log import AttemptKey

log = logging.getLogger("gangline.node")

_FILES_OF_NODE = 128
"""Its listeners, journal, engines and libraries."""
_FILES_OF_SESSION = 16
"""About eight of its sandbox, and its connections to the proxy and from there to the engine."""


class PoolSizes(BaseModel):
    """How many sessions of a node may be in each stage at once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    init_workers: int = Field(default=4, ge=1)
    """Runtimes of agents that are started and prepared at once."""
    ready_slots: int = Field(default=8, ge=0)
    """Prepared runtimes that wait for a place in RUN; with 0, INIT begins only when there is one."""
    run_slots: int = Field(default=16, ge=1)
    prewarm_workers: int = Field(default=2, ge=0)
    """Clean runtimes for graders that are prepared at once, while their agents run; with 0 each is prepared when its
    agent has ended, which takes longer and less memory."""
    postrun_workers: int = Field(default=4, ge=1)

    @property
    def capacity(self) -> int:
        """Sessions that the node holds at most, in all stages."""
        return self.ready_slots + self.run_slots + self.postrun_workers

    def fitted(self, max_files: int) -> PoolSizes:
        """The same, with fewer slots where the process may not have enough files open for all of their sessions.

        Raises: InvalidRequest when there is no room for one session.
        """
        room = (max_files - _FILES_OF_NODE) // _FILES_OF_SESSION - self.postrun_workers
        if room < 1:
            raise InvalidRequest(
                f"this process may have {max_files} files open, too few for one session alongside "
                f"{self.postrun_workers} that are graded. Raise the limit (`ulimit -Hn`, LimitNOFILE), or lower "
                "--postrun-workers."
            )
        run_slots = min(self.run_slots, room)
        return self.model_copy(update={"run_slots": run_slots, "ready_slots": min(self.ready_slots, room - run_slots)})


class Pool:
    """So many places, taken in turn: `async with` waits for one and keeps it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_taken = 0
        self._places = asyncio.Semaphore(size)

    @property
    def num_free(self) -> int:
        return self.size - self.num_taken

    async def __aenter__(self) -> None:
        await self._places.acquire()
        self.num_taken += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.num_taken -= 1
        self._places.release()


class Pools:
    """One pool a stage, so that the stages of different sessions overlap and none blocks another."""

    def __init__(self, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self.init = Pool(sizes.init_workers)
        self.run = Pool(sizes.run_slots)
        self.prewarm = Pool(sizes.prewarm_workers)
        self.postrun = Pool(sizes.postrun_workers)

    def num_free(self, num_init: int, num_ready: int, num_held: int) -> int:
        """How many sessions may be leased now.

        num_init, num_ready: sessions in these stages. num_held: sessions in all stages.
        """
        sizes = self.sizes
        behind_init = sizes.ready_slots + self.run.num_free - num_ready
        return max(0, min(sizes.init_workers - num_init, behind_init - num_init, sizes.capacity - num_held))


class StageClock:
    """Budgets count a stage's own work: while an attempt waits its turn, it has none."""

    def __init__(self, key: AttemptKey, clock: Callable[[], float] = time.time) -> None:
        self.stage: Stage = "init"
        self.since = clock()
        """When the attempt came to this stage, or began to work at it. Unix time, UTC, seconds."""
        self.timings: tuple[StageTiming, ...] = ()
        """Timings of the stages that are over."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the attempt is in another stage."""
        self.now = clock
        """Unix time, UTC, seconds."""
        self._key = key
        self._budget_ends_at: float | None = None

    def go_on(self, stage: Stage, since: float, timings: tuple[StageTiming, ...]) -> None:
        """Continue where an earlier life of the node was."""
        self.stage, self.since, self.timings = stage, since, timings

    def move(self, stage: Stage, budget_s: float | None = None) -> None:
        """Enter another stage, or another part of it; `budget_s` is None where the attempt waits its turn."""
        self.stage, self.since = stage, self.now()
        self.allow(budget_s)
        self.on_change()

    def allow(self, budget_s: float | None) -> None:
        """Give the work that begins now this budget."""
        self._budget_ends_at = None if budget_s is None else time.monotonic() + budget_s

    def overdue_s(self, held_s: float) -> float | None:
        """Seconds since the present work's budget ended, without the `held_s` that the gate held it; None without a
        budget."""
        if self._budget_ends_at is None:
            return None
        return max(0.0, time.monotonic() - self._budget_ends_at - held_s)

    def add(self, timing: StageTiming) -> None:
        self.timings = (*self.timings, timing)

    @contextmanager
    def within(self, stage: Stage, budget_s: float | None = None, since: float | None = None) -> Generator[None]:
        """Be in a stage, and add its times at the end. `since`: when an earlier life of the node entered it."""
        self.move(stage, budget_s)
        self.since = self.since if since is None else since
        log.info("session.%s session=%s attempt=%d", stage, *self._key)
        try:
            yield
        finally:
            self.add(StageTiming(stage, self.since, self.now()))
