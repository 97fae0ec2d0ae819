"""Sandboxes that are started and prepared before a session needs them.

Laws
- A warm sandbox is unused: it is given to one session and ends with it. Nothing is used twice.
- It is given only for exactly the same specification, including prepare actions, and the same submitter.
- Sandboxes that are not taken in time are stopped, and so are the oldest beyond the node's count and memory.
- Spares are started one after another, so that they take little from running sessions.

Everything specific to a session comes later: its key and its environment belong to its commands, while user, network
and folder belong to the sandbox.
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
    """Limits of a node's warm sandboxes."""

    count: int
    """All together."""
    memory_bytes: int = 16 << 30
    """The sum of their memory limits. A sandbox without a limit counts as 0."""
    age_s: float = 300.0
    """How long a sandbox waits for a session."""


class WarmKey(NamedTuple):
    """Sandboxes with equal keys are interchangeable."""

    submitter: str
    spec: str
    """The whole `RuntimeSpec`, as JSON."""

    @classmethod
    def of(cls, spec: RuntimeSpec, submitter: str | None) -> WarmKey:
        return cls(submitter or "", spec.model_dump_json())


class _Spare(NamedTuple):
    key: WarmKey
    sandbox: Sandbox
    memory_bytes: int
    started_at: float
    """On the loop's clock."""


class WarmPool:
    """Call `close` at the end."""

    def __init__(self, start: Callable[[RuntimeSpec, str], Awaitable[Sandbox]], sizes: WarmSizes) -> None:
        """`start`: starts and prepares a sandbox with this id, and leaves nothing behind if it fails."""
        self._start = start
        self._sizes = sizes
        self._spares: list[_Spare] = []
        """Oldest first."""
        self._wanted: deque[tuple[WarmKey, RuntimeSpec]] = deque(maxlen=sizes.count)
        """Sandboxes to start: one for each that was asked for."""
        self._filling: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_spare(self) -> int:
        return len(self._spares)

    @property
    def is_starting(self) -> bool:
        """Whether a sandbox is being started."""
        return self._filling is not None

    async def take(self, spec: RuntimeSpec, submitter: str | None) -> Sandbox | None:
        """Returns a warm sandbox, which then belongs to the caller; None if there is none. Another one is started for
        the next session of the same kind."""
        if spec.gpus:  # a spare would keep GPUs from other sessions
            return None
        key = WarmKey.of(spec, submitter)
        taken: Sandbox | None = None
        while taken is None and (spare := next((one for one in self._spares if one.key == key), None)) is not None:
            self._spares.remove(spare)
            with suppress(GanglineError):  # already gone, for instance with the keeper
                await spare.sandbox.usage()
                taken = spare.sandbox
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
            sandbox = await self._start(spec, new_id("warm"))
        except GanglineError as error:  # its session will get the same error and report it
            log.warning("warm.failed backend=%s message=%s", spec.backend, error)
            return
        self._spares.append(_Spare(key, sandbox, memory_bytes, asyncio.get_running_loop().time()))
        self._trim()

    def _trim(self) -> None:
        """Stop sandboxes beyond the count, the memory or the age limit."""
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
        task = asyncio.create_task(_stopped(spare.sandbox))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


async def _stopped(sandbox: Sandbox) -> None:
    try:
        await sandbox.stop()
    except GanglineError as error:
        log.error("runtime.stop_failed runtime=%s message=%s", sandbox.runtime_id, error)
