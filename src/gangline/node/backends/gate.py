"""The gate in front of the engines: closed while a trainer pushes new weights, and never for longer than its lease.

While it is closed, new calls wait. Calls in flight either end first (`drain`) or are kept (`keep`: the engine holds
them and continues under the new weights). Waiting calls lose nothing: the proxy keeps their streams alive, and a
session's budget is paused while one of its calls is held (`GateMeter`). A trainer that dies while the gate is closed
cannot freeze the service: the lease expires and the gate opens. A trainer that disconnects before the drain is done has
`ABANDONED_S` to ask again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

from gangline.domain.errors import InvalidRequest
from gangline.domain.node_views import GateMode, GateState
from gangline.node.backends.gate_updates import GateUpdates

_log = logging.getLogger("gangline.gate")

ABANDONED_S = 30.0
"""Longest remaining lease of a gate after its drain was abandoned."""


class GateMeter:
    """Measures how long the gate held one session. Calls of one session that are held at the same time count once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_waiting = 0
        self._num_passing = 0
        self._is_frozen = False
        self._held_since: float | None = None
        self._held_before_s = 0.0
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def held_s(self) -> float:
        """Total so far, including a hold that is still in progress."""
        return self._held_before_s + (0.0 if self._held_since is None else self._clock() - self._held_since)

    async def elapse(self, budget_s: float) -> None:
        """Return after `budget_s`, not counting the time during which the session was held."""
        began, held_before_s = self._clock(), self.held_s
        while (left_s := budget_s + self.held_s - held_before_s - (self._clock() - began)) > 0:
            await self._runs.wait()
            await asyncio.sleep(left_s)
        await self._runs.wait()

    def waits(self, change: int) -> None:
        self._num_waiting += change
        self._judge()

    def passes(self, change: int, *, is_frozen: bool) -> None:
        self._num_passing += change
        self.freeze(is_frozen)

    def freeze(self, is_frozen: bool) -> None:
        """While frozen, calls that passed the gate count as held too: the engine keeps them as they are."""
        self._is_frozen = is_frozen
        self._judge()

    @property
    def is_idle(self) -> bool:
        return self._num_passing == 0

    def _judge(self) -> None:
        is_held = self._num_waiting > 0 or (self._is_frozen and self._num_passing > 0)
        if is_held and self._held_since is None:
            self._held_since = self._clock()
            self._runs.clear()
        elif not is_held and self._held_since is not None:
            self._held_before_s, self._held_since = self.held_s, None
            self._runs.set()


class Gate:
    """One per node. Call all methods on the node's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._version: int | None = None
        self._mode: GateMode | None = None
        self._lease_ends_at = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self._num_waiting = 0
        self._num_in_flight = 0
        self._num_expired = 0
        self._num_pauses = 0
        self._opened: asyncio.Event | None = None
        self._settled: asyncio.Event = asyncio.Event()
        """Set while no call is in flight or the gate is open; a drain waits for it."""
        self._passing: set[GateMeter] = set()
        self.on_expired: Callable[[], None] | None = None
        """Called when a lease expires, before the gate opens."""
        self.updates = GateUpdates(clock)
        self._waited_s = 0.0

    @property
    def state(self) -> GateState:
        is_paused = self._mode is not None
        return GateState(
            is_paused=is_paused,
            mode=self._mode,
            version=self._version,
            lease_left_s=max(self._lease_ends_at - self._clock(), 0.0) if is_paused else None,
            num_waiting=self._num_waiting,
            num_in_flight=self._num_in_flight,
            is_drained=is_paused and self._num_in_flight == 0,
            num_expired_leases=self._num_expired,
        )

    @property
    def closed_s(self) -> float:
        """Total time that it was closed, in seconds, until now."""
        return sum(self.updates.measured_s.values())

    @property
    def waited_s(self) -> float:
        """Total time that calls waited, in seconds, without calls that are still waiting."""
        return self._waited_s

    @property
    def version(self) -> int | None:
        return self._version

    async def pause(self, mode: GateMode = "drain", lease_s: float = 600.0, wait_s: float | None = None) -> GateState:
        """Close the gate, or renew the lease of a closed one.

        `drain` returns when no call is in flight, when the gate was opened meanwhile (resumed, or its lease expired),
        or after `wait_s` seconds: see `is_drained` and `is_paused` of the returned state. A cancelled drain leaves at
        most `ABANDONED_S` of the lease, unless another pause followed it.

        Raises: InvalidRequest.
        """
        if mode not in ("drain", "keep"):
            raise InvalidRequest(f"mode must be drain or keep, got {mode!r}.", param="mode")
        if not 0 < lease_s <= 86_400:
            raise InvalidRequest(f"lease_s must be above 0 and at most 86400, got {lease_s}.", param="lease_s")
        self._close(mode, lease_s)
        if mode == "drain":
            await self._drain(wait_s)
        return self.state

    async def _drain(self, wait_s: float | None) -> None:
        number = self._num_pauses
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._settled.wait()
        except asyncio.CancelledError:
            if self._mode is not None and number == self._num_pauses:
                _log.warning("gate.drain_abandoned in_flight=%d", self._num_in_flight)
                self._lease_for(min(self._lease_ends_at - self._clock(), ABANDONED_S))
            raise

    def resume(self) -> GateState:
        """Open the gate. Does nothing if it is open."""
        return self._open()

    def _open(self, *, has_expired: bool = False) -> GateState:
        if self._mode is not None:
            update = self.updates.end(self._mode, self._version, has_expired=has_expired)
            _log.info("gate.updated drain_s=%.3f held_s=%.3f version=%s", update.drain_s, update.held_s, self._version)
        if self._lease is not None:
            self._lease.cancel()
        if self._opened is not None:
            self._opened.set()
        self._lease, self._opened, self._mode = None, None, None
        self._settled.set()
        self._freeze()
        _log.info("gate.resumed version=%s", self._version)
        return self.state

    def set_version(self, version: int) -> GateState:
        """Set the policy version of tokens sampled from now on. Raises: InvalidRequest when it would decrease."""
        if version < 0 or (self._version is not None and version < self._version):
            raise InvalidRequest(f"version must not go back: it is {self._version}, got {version}.", param="version")
        self._version = version
        _log.info("gate.version version=%d", version)
        return self.state

    @asynccontextmanager
    async def pass_through(self, meter: GateMeter | None = None) -> AsyncGenerator[None, None]:
        """Wait while the gate is closed, then count as in flight until the block ends."""
        if self._opened is not None:
            await self._wait(meter)
        self._enter(meter, 1)
        try:
            yield
        finally:
            self._enter(meter, -1)

    async def _wait(self, meter: GateMeter | None) -> None:
        began = self._clock()
        self._num_waiting += 1
        if meter is not None:
            meter.waits(1)
        try:
            while (opened := self._opened) is not None:  # closed again before this call got its turn
                await opened.wait()
        finally:
            self._num_waiting -= 1
            self._waited_s += self._clock() - began
            if meter is not None:
                meter.waits(-1)

    def _enter(self, meter: GateMeter | None, change: int) -> None:
        self._num_in_flight += change
        if self._mode is not None and self._num_in_flight == 0:
            self._settled.set()
            self.updates.drained()
        if meter is not None:
            meter.passes(change, is_frozen=self._mode == "keep")
            (self._passing.discard if meter.is_idle else self._passing.add)(meter)

    def _lease_for(self, lease_s: float) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(lease_s, self._expire)
        self._lease_ends_at = self._clock() + lease_s

    def _close(self, mode: GateMode, lease_s: float) -> None:
        self._num_pauses += 1
        self._mode = mode
        self.updates.begin(is_drained=mode == "keep" or not self._num_in_flight)
        self._opened = self._opened or asyncio.Event()
        self._lease_for(lease_s)
        if self._num_in_flight:
            self._settled.clear()
        else:
            self._settled.set()
        self._freeze()
        _log.info("gate.paused mode=%s lease_s=%g in_flight=%d", mode, lease_s, self._num_in_flight)

    def _freeze(self) -> None:
        for meter in self._passing:
            meter.freeze(self._mode == "keep")

    def _expire(self) -> None:
        self._num_expired += 1
        _log.error("gate.lease_expired version=%s: whoever paused the gate did not renew it", self._version)
        if self.on_expired is not None:
            self.on_expired()
        self._open(has_expired=True)
