"""Memory and processors of a node's sandboxes now, for heartbeats and metrics; and folders that no sandbox has."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from gangline.domain.sandbox import Sandbox
from gangline.domain.usage import Usage
from gangline.domain.views import SANDBOX_CPUS, SANDBOX_MEMORY
from gangline.store.journal.log import AttemptKey

_TOP = 3
_SPAN_S = 2.5
"""Processor time is compared over at least this long."""
_ORPHAN_AFTER_S = 14.0
_ORPHANS_EVERY_S = 5.0
_MAX_ORPHANS = 100


class SandboxesNow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the agents' sandboxes that are measured, and the largest ones."""

    memory_bytes: int = 0
    cpus: float = 0.0
    largest_bytes: int = 0
    top: dict[str, float] = {}
    """`SANDBOX_MEMORY` and a session -> bytes, `SANDBOX_CPUS` and it -> processors, for the few that take the most."""


class SandboxUse:
    """Call `look` every second or so. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cpu_s: dict[AttemptKey, tuple[float, float]] = {}
        """When it was read, and processor time until then."""
        self._cpus: dict[AttemptKey, float] = {}
        self._memory: dict[AttemptKey, int] = {}

    def look(self, taken: Iterable[tuple[AttemptKey, Usage]]) -> None:
        now = self._clock()
        before, cpus = self._cpu_s, self._cpus
        self._cpu_s, self._cpus, self._memory = {}, {}, {}
        for key, usage in taken:
            if usage.memory_bytes is not None:
                self._memory[key] = usage.memory_bytes
            if usage.cpu_s is None:
                continue
            at, cpu_s = before.get(key, (now, usage.cpu_s))
            self._cpu_s[key] = at, cpu_s
            if now - at >= _SPAN_S:
                self._cpu_s[key], self._cpus[key] = (now, usage.cpu_s), max(0.0, usage.cpu_s - cpu_s) / (now - at)
            elif key in cpus:
                self._cpus[key] = cpus[key]

    def now(self) -> SandboxesNow:
        by_memory = sorted(self._memory, key=self._memory.__getitem__, reverse=True)
        by_cpus = sorted(self._cpus, key=self._cpus.__getitem__, reverse=True)
        top: dict[str, float] = {}
        for key in dict.fromkeys((*by_memory[:_TOP], *by_cpus[:_TOP])):
            top[SANDBOX_MEMORY + key.session_id] = float(self._memory.get(key, 0))
            top[SANDBOX_CPUS + key.session_id] = round(self._cpus.get(key, 0.0), 2)
        return SandboxesNow(
            memory_bytes=sum(self._memory.values()),
            cpus=sum(self._cpus.values()),
            largest_bytes=self._memory[by_memory[0]] if by_memory else 0,
            top=top,
        )


class HeldSandboxes:
    """Ids of the sandboxes that a node has: from their start until their objects are garbage."""

    def __init__(self) -> None:
        self._starting = Counter[str]()
        self._started = WeakValueDictionary[str, Sandbox]()

    @asynccontextmanager
    async def starting(self, runtime_id: str) -> AsyncGenerator[None]:
        self._starting[runtime_id] += 1
        try:
            yield
        finally:
            self._starting -= Counter({runtime_id: 1})

    def hold(self, sandbox: Sandbox) -> Sandbox:
        self._started[sandbox.runtime_id] = sandbox
        return sandbox

    def has(self, runtime_id: str) -> bool:
        """Checkpoints are removed with the last layer that needs them, so they count as held."""
        return runtime_id in self._starting or runtime_id in self._started or runtime_id.startswith("checkpoint-")


class Orphans:
    """Finds folders of sandboxes that nobody holds. Run `watch` until cancelled."""

    def __init__(self, folder: Path, held: HeldSandboxes, clock: Callable[[], float] = time.monotonic) -> None:
        """folder: with the folders of all sandboxes. held: the node's sandboxes."""
        self._folder = folder
        self._held = held
        self._clock = clock
        self._seen_at: dict[str, float] = {}

    @property
    def found(self) -> list[str]:
        """Their names; only those seen for a while, since a sandbox that starts or ends is not held for a moment."""
        return sorted(name for name, at in self._seen_at.items() if self._clock() - at >= _ORPHAN_AFTER_S)

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_ORPHANS_EVERY_S)

    async def look(self) -> None:
        now, names = self._clock(), await asyncio.to_thread(_folders_in, self._folder)
        unheld = [name for name in names if not self._held.has(name)][:_MAX_ORPHANS]
        self._seen_at = {name: self._seen_at.get(name, now) for name in unheld}


def _folders_in(folder: Path) -> list[str]:
    """Blocking."""
    try:
        return [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def memory_of_machine() -> tuple[int, int]:
    """(bytes, bytes available), as the kernel counts them; 0 for the second where it is unknown."""
    found = {"MemTotal": 0, "MemAvailable": 0}
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = int(value.split()[0]) << 10
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    return found["MemTotal"], found["MemAvailable"]
