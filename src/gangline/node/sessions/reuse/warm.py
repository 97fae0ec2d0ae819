"""Sandboxes that are started and prepared before any session asks for them.

Laws
- A warm sandbox was never used: it is given to one session, and dies with it. Nothing is ever used twice.
- It is given only for the very same specification, prepare actions included, and the same submitter.
- Those that nobody took in time are stopped, and so are the oldest beyond the node's count and memory.
- Spare ones are started one after another, so that they take little from the sessions that run.

Everything of a session's own comes later: its key and its environment are those of its commands, and its user, its
network and its folder are the sandbox's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from gangline.domain.errors import GanglineError
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import RuntimeSpec

log = logging.getLogger("gangline.node")


class WarmSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a node's warm sandboxes."""

    count: int
    """All together."""
    memory_bytes: int = 16 << 30
    """The sum of their limits. One without a limit counts as nothing."""
    age_s: float = 300.0
    """How long one waits for a session."""


class WarmKey(NamedTuple):
    """Sandboxes of equal keys are interchangeable."""

    submitter: str
    spec: str
    """The whole `RuntimeSpec`, as JSON."""

    @classmethod
    def of(cls, spec: RuntimeSpec, submitter: str | None) -> WarmKey:
        return cls(submitter or "", spec.model_dump_json())


class _Spare(NamedTuple):
    key: WarmKey
    handle: Sandbox
    memory_bytes: int
    started_at: float
    """On the loop's clock."""


class WarmPool:
    """`close` it at the end."""

    def __init__(self, start: Callable[[RuntimeSpec, str], Awaitable[Sandbox]], sizes: WarmSizes) -> None:
        """`start`: start and prepare a sandbox with this id; one that fails leaves nothing."""
        self._start = start
        self._sizes = sizes
        self._spares: list[_Spare] = []
        """Oldest first."""
        self._wanted: deque[tuple[WarmKey, RuntimeSpec]] = deque(maxlen=sizes.count)
        """To be started: one for each that was asked for."""
        self._filling: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_spare(self) -> int:
        return len(self._spares)

    @property
    def is_starting(self) -> bool:
        """Whether any is being started."""
        return self._filling is not None

    async def take(self, spec: RuntimeSpec, submitter: str | None) -> Sandbox | None:
        """A warm sandbox, from now on the caller's; None when there is none. Another one is then started for the next
        session of the kind."""
        if spec.gpus:  # a spare would keep GPUs from those that need them
            return None
        key = WarmKey.of(spec, submitter)
        taken: Sandbox | None = None
        while taken is None and (spare := next((one for one in self._spares if one.key == key), None)) is not None:
            self._spares.remove(spare)
            with suppress(GanglineError):  # it is gone, such as with the keeper
                await spare.handle.usage()
                taken = spare.handle
            if taken is None:
                self._drop(spare)
        self._wanted.append((key, spec))
        if self._filling is None:
            self._filling = asyncio.create_task(self._fill(), name="warm")
        return taken

    async def close(self) -> None:
        """Stop all. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait({self._filling})
        for spare in self._spares:
            self._drop(spare)
        self._spares = []
        await asyncio.gather(*self._stopping)

    async def _fill(self) -> None:
        try:
            while self._wanted:
                key, spec = self._wanted.popleft()
                memory = (spec.limits.memory_bytes or 0) * (1 + len(spec.services))
                if memory <= self._sizes.memory_bytes:
                    await self._add(key, spec, memory)
        finally:
            self._filling = None

    async def _add(self, key: WarmKey, spec: RuntimeSpec, memory_bytes: int) -> None:
        try:
            handle = await self._start(spec, new_id("warm"))
        except GanglineError as error:  # its session will meet the same error, and report it
            log.warning("warm.failed backend=%s message=%s", spec.backend, error)
            return
        self._spares.append(_Spare(key, handle, memory_bytes, asyncio.get_running_loop().time()))
        self._trim()

    def _trim(self) -> None:
        """Stop those that are too many, too large together, or too old."""
        loop, sizes = asyncio.get_running_loop(), self._sizes
        while self._spares and (
            len(self._spares) > sizes.count
            or sum(spare.memory_bytes for spare in self._spares) > sizes.memory_bytes
            or self._spares[0].started_at + sizes.age_s <= loop.time()
        ):
            self._drop(self._spares.pop(0))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._spares:
            self._timer = loop.call_at(self._spares[0].started_at + sizes.age_s, self._trim)

    def _drop(self, spare: _Spare) -> None:
        task = asyncio.create_task(_stopped(spare.handle))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


async def _stopped(handle: Sandbox) -> None:
    try:
        await handle.stop()
    except GanglineError as error:
        log.error("runtime.stop_failed runtime=%s message=%s", handle.runtime_id, error)
