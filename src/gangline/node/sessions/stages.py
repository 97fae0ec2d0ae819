"""The stages of one attempt with their budgets and times, and the pools of a node's stages with their sizes.

Pools limit how many sessions a node may lease, so that no session waits for another.

Laws
- A session is leased when INIT can begin at once and there will be a slot after it, in READY or RUN. So a full READY
  stops INIT, a prepared runtime never holds an INIT worker, and sessions that this node cannot begin yet are left for
  others. Sessions that wait for an image hold no INIT worker, but their slot behind INIT is kept.
- Clean runtimes for graders have their own workers: they never delay an agent's runtime, and their number is limited.
- POSTRUN has a queue, limited by the node's total of sessions: slow evaluations slow down leasing.
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
"""For the node's listeners, journal, engines and libraries."""
_FILES_OF_SESSION = 16
"""About eight for its sandbox, and its connections to the proxy and from there to the engine."""


class PoolSizes(BaseModel):
    """How many sessions of a node may be in each stage at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    init_workers: int = Field(default=4, ge=1)
    """Agents' runtimes that are started and prepared at once."""
    ready_slots: int = Field(default=8, ge=0)
    """Prepared runtimes that wait for a slot in RUN; with 0, INIT begins only when there is one."""
    run_slots: int = Field(default=16, ge=1)
    prewarm_workers: int = Field(default=2, ge=0)
    """Clean runtimes for graders that are prepared at once while their agents run. With 0 each is prepared after its
    agent has ended, which takes longer and uses less memory."""
    postrun_workers: int = Field(default=4, ge=1)

    @property
    def capacity(self) -> int:
        """Most sessions that the node holds, in all stages."""
        return self.ready_slots + self.run_slots + self.postrun_workers

    def fitted(self, max_files: int) -> PoolSizes:
        """Returns the sizes, with fewer slots if the process may not open enough files for all of their sessions.

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
    """A number of slots: `async with` waits for one and holds it."""

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
    """One pool per stage, so that the stages of different sessions overlap and none blocks another."""

    def __init__(self, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self.init = Pool(sizes.init_workers)
        self.run = Pool(sizes.run_slots)
        self.prewarm = Pool(sizes.prewarm_workers)
        self.postrun = Pool(sizes.postrun_workers)

    def num_free(self, num_init: int, num_ready: int, num_held: int) -> int:
        """Returns how many sessions may be leased now.

        num_init, num_ready: sessions in these stages. num_held: sessions in all stages.
        """
        sizes = self.sizes
        behind_init = sizes.ready_slots + self.run.num_free - num_ready
        return max(0, min(sizes.init_workers - num_init, behind_init - num_init, sizes.capacity - num_held))


class StageClock:
    """Tracks an attempt's stage. A budget counts the stage's own work: a waiting attempt has none."""

    def __init__(self, key: AttemptKey, clock: Callable[[], float] = time.time) -> None:
        self.stage: Stage = "init"
        self.since = clock()
        """When the attempt entered this stage, or began working in it. Unix time, UTC, seconds."""
        self.timings: tuple[StageTiming, ...] = ()
        """Timings of the stages that have ended."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the attempt enters another stage."""
        self.now = clock
        """Unix time, UTC, seconds."""
        self._key = key
        self._budget_ends_at: float | None = None

    def go_on(self, stage: Stage, since: float, timings: tuple[StageTiming, ...]) -> None:
        """Continue at the stage from before the node's restart."""
        self.stage, self.since, self.timings = stage, since, timings

    def move(self, stage: Stage, budget_s: float | None = None) -> None:
        """Enter another stage, or another part of it; `budget_s` is None while the attempt waits."""
        self.stage, self.since = stage, self.now()
        self.allow(budget_s)
        self.on_change()

    def allow(self, budget_s: float | None) -> None:
        """Set the budget of the work that begins now."""
        self._budget_ends_at = None if budget_s is None else time.monotonic() + budget_s

    def overdue_s(self, held_s: float) -> float | None:
        """Seconds by which the current work exceeds its budget, without the `held_s` that the gate held it; None
        without a budget."""
        if self._budget_ends_at is None:
            return None
        return max(0.0, time.monotonic() - self._budget_ends_at - held_s)

    def add(self, timing: StageTiming) -> None:
        self.timings = (*self.timings, timing)

    @contextmanager
    def within(self, stage: Stage, budget_s: float | None = None, since: float | None = None) -> Generator[None]:
        """Enter a stage, and record its times at the end. `since`: when it was entered before a restart of the node."""
        self.move(stage, budget_s)
        self.since = self.since if since is None else since
        log.info("session.%s session=%s attempt=%d", stage, *self._key)
        try:
            yield
        finally:
            self.add(StageTiming(stage, self.since, self.now()))
