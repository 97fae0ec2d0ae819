"""The pools of a node's stages, their sizes, and how many sessions a node may lease so that none waits for another.

Laws
- A session is leased when INIT can begin with it at once, and when it will find a place behind INIT, in READY or RUN.
  So a full READY stops INIT, no INIT worker is ever held by a prepared runtime, and sessions that this node cannot
  begin yet are left for others.
- Clean runtimes for graders have workers of their own: they never keep an agent's runtime waiting, nor come unbounded.
- POSTRUN has a queue, bounded by the node's total of sessions: evaluations that cannot keep up slow down leasing.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.errors import InvalidRequest

__all__ = ["Pool", "PoolSizes", "Pools"]

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
                f"this process may have {max_files} files open, too few for one session beside "
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
