"""Carries out what `Admission` decides about the sessions of one pool: holds their calls, moves them, and counts.

Laws
- A call waits before the gate for weight updates, so that an update never waits for it. Its session's clock stands.
- While a healthy backend has not told the size of its cache, or none is healthy, no call waits here.
- A session that fails over to another backend takes its place along.
- When contexts are cached less than expected, the caches are taken to be smaller, down to half.
- With a policy that is not eager no call waits until that has happened once: an engine whose cache holds all sessions,
  keeps nothing, or counts nothing is left alone, whatever size it tells.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from gangline.domain.node_views import CacheView, PlacesView
from gangline.domain.tokens import TokenIds, common_prefix_len
from gangline.models.engines.cache import EngineCache
from gangline.node.backends.admission import Admission, CacheRoom, Demand
from gangline.node.backends.engine import Assignment, Backend
from gangline.node.backends.gate import GateMeter

log = logging.getLogger("gangline.backends")

_TICK_S = 1.0
"""Between decisions while a session waits: it may have waited long enough."""
_BATCH_S = 0.01
"""What happens within this time is decided about together."""
_SMALLEST = 0.5
_EXPECTED_HITS = 0.8
_FIRST_JUDGED = 0.25
"""Part of a cache's size that calls must have asked for again before it is first judged; all of it later."""


class _Mean:
    """The mean of the last ten values or so."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._num = 0

    def add(self, value: float) -> None:
        self._num = min(self._num + 1, 10)
        self.value += (value - self.value) / self._num


class _Held:
    """A session, in the pool's view."""

    def __init__(self, assignment: Assignment, demand: Demand) -> None:
        self.assignment = assignment
        self.demand = demand
        self.num_calls = 0
        self.has_kept_place = False
        """Since its last call: its context should still be cached."""
        self.num_waiting = 0
        self.goes_on = asyncio.Event()


class _CacheRecord:
    """A backend's cache since it was last judged."""

    def __init__(self, cache: EngineCache) -> None:
        self.cache = self._judged = cache
        self.part = 1.0
        """The part of its size that sessions may fill."""
        self.num_prompted = self.num_expected = 0
        """Tokens of prompts, and how many of them sessions that kept their places have asked for again."""
        self.hit_rate: float | None = None
        self.held = 0.0
        """Tokens of the sessions with a place."""

    @property
    def capacity(self) -> float:
        return self.cache.num_tokens * self.part

    def read(self, cache: EngineCache, *, is_first: bool) -> bool:
        """is_first: judge by fewer calls. Returns whether it has held less than expected since it was last judged."""
        queried, hit = cache.num_queried - self.cache.num_queried, cache.num_hit - self.cache.num_hit
        self.cache = cache
        if queried < 0:  # the engine was started again
            self._begin_anew()
        elif queried:
            self.hit_rate = hit / queried
        # An engine counts a call when it starts it, we when it has ended. Others' calls are not ours to judge by.
        queried, hit = cache.num_queried - self._judged.num_queried, cache.num_hit - self._judged.num_hit
        expected = min(self.num_expected, queried * self.num_expected / max(self.num_prompted, 1))
        enough = self.capacity * (_FIRST_JUDGED if is_first else 1.0)
        if expected <= enough or not cache.num_hit:
            return False  # too few to judge by, or it keeps nothing, or does not count
        holds_less = hit < _EXPECTED_HITS * expected
        self.part *= 0.95 if holds_less else 1.02
        self.part = min(max(self.part, _SMALLEST), 1.0)
        self._begin_anew()
        return holds_less

    def _begin_anew(self) -> None:
        self._judged, self.num_prompted, self.num_expected = self.cache, 0, 0


class Places:
    """One per pool. Call all methods on the node's event loop."""

    def __init__(
        self,
        policy: Admission,
        backends: Mapping[str, Backend],
        move: Callable[[Assignment, Backend], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """backends: the pool's, by id. move: assigns a session to a backend."""
        self._policy = policy
        self._backends = backends
        self._move = move
        self._clock = clock
        self._caches: dict[str, _CacheRecord] = {}
        self._sessions: dict[str, _Held] = {}
        self._firsts: dict[str, tuple[TokenIds, int]] = {}
        """group -> first prompt of one of its sessions, and how many of its tokens all others have"""
        self._first_tokens, self._growth = _Mean(2000.0), _Mean(0.0)
        """The length of a first context, and what a later call adds to one."""
        self._timer: asyncio.TimerHandle | None = None
        self._longest_wait_s = 0.0
        self.are_needed = policy.is_eager
        """Whether sessions may have to wait."""
        self._is_closed = False

    # -- engines -------------------------------------------------------------------------------------------------

    def read(self, backend: Backend, cache: EngineCache | None) -> None:
        """Take in what the backend says of its cache. None: nothing this time."""
        self._caches = {one: record for one, record in self._caches.items() if one in self._backends}
        if cache is None:
            return
        if (record := self._caches.get(backend.backend_id)) is None:
            self._caches[backend.backend_id] = _CacheRecord(cache)
        elif record.read(cache, is_first=not self.are_needed) and not self.are_needed:
            self.are_needed = True
            log.info("backend.over_subscribed backend=%s url=%s", backend.backend_id, backend.url)

    def view_of(self, backend: Backend) -> CacheView | None:
        if (record := self._caches.get(backend.backend_id)) is None:
            return None
        there = [one for one in self._sessions.values() if one.demand.backend_id == backend.backend_id]
        held = record.held if self.are_needed else sum(one.demand.num_tokens for one in there)
        return CacheView(
            num_tokens=record.cache.num_tokens,
            usable=record.part,
            num_held_tokens=int(held),
            num_places=sum(one.demand.has_place or not self.are_needed for one in there),
            hit_rate=record.hit_rate,
        )

    def view(self) -> PlacesView:
        waiting = [self._clock() - one.demand.since for one in self._sessions.values() if one.demand.state == "due"]
        return PlacesView(
            num_waiting=len(waiting),
            longest_wait_s=max([self._longest_wait_s, *waiting]),
            max_wait_s=self._policy.max_wait_s,
        )

    def close(self) -> None:
        """Hold no call any longer. Idempotent."""
        self._is_closed = True
        self.decide()

    # -- sessions ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self, assignment: Assignment, meter: GateMeter) -> AsyncGenerator[None]:
        """Wait until the session may call, then keep its place until the block ends, and while its tools run."""
        held = self._sessions.get(assignment.session_id)
        if held is None or held.assignment is not assignment:
            demand = Demand(session_id=assignment.session_id, group=assignment.task_id, state="idle", since=0.0)
            held = self._sessions[assignment.session_id] = _Held(assignment, demand)
            assignment.keeps_prompt = True
        if held.num_calls == 0:
            held.has_kept_place = self._may_go(held)
            if not held.has_kept_place:
                await self._wait(held, meter)
        if held.num_calls == 0:
            held.demand.state, held.demand.since = "running", self._clock()
        held.num_calls += 1
        try:
            yield
        finally:
            held.num_calls -= 1
            if held.num_calls == 0:
                self._end(held)

    def release(self, session_id: str) -> None:
        """The session is over. Idempotent."""
        held = self._sessions.pop(session_id, None)
        if held is None:
            return
        group = held.demand.group
        if not any(one.demand.group == group for one in self._sessions.values()):
            self._firsts.pop(group, None)
        held.goes_on.set()
        self._look(held)

    def _may_go(self, held: _Held) -> bool:
        if not self.are_needed:
            return True
        backend = self._backends.get(held.demand.backend_id or "")
        return held.demand.has_place and backend is not None and backend.state == "healthy" and not held.num_waiting

    async def _wait(self, held: _Held, meter: GateMeter) -> None:
        if held.num_waiting == 0:
            demand = held.demand
            demand.state, demand.since = "due", self._clock()
            if not demand.num_tokens:
                demand.growth = self._first_tokens.value
                demand.num_shared = self._firsts[demand.group][1] if demand.group in self._firsts else 0
            held.goes_on.clear()
            if self._num_due() == 1:
                self.decide()
            else:
                self._decide_within(_BATCH_S)
        if held.goes_on.is_set():
            return
        held.num_waiting += 1
        meter.waits(1)
        try:
            await held.goes_on.wait()
        except asyncio.CancelledError:
            if held.num_waiting == 1 and held.num_calls == 0:  # its only call was given up, perhaps just as it may go
                held.demand.state, held.demand.since = "idle", self._clock()
                self._look(held)
            raise
        finally:
            meter.waits(-1)
            held.num_waiting -= 1

    def _end(self, held: _Held) -> None:
        demand, assignment = held.demand, held.assignment
        if self._sessions.get(demand.session_id) is not held:
            return  # it was over before its call was
        before, demand.num_tokens = demand.num_tokens, assignment.num_tokens or demand.num_tokens
        if demand.num_tokens and not before:
            self._first_tokens.add(demand.num_tokens)
            self._note_shared(held)
        elif demand.num_tokens > before:
            self._growth.add(demand.num_tokens - before)
        demand.growth = self._growth.value
        demand.state, demand.since = "idle", self._clock()
        prompted, repeated = assignment.num_prompted, assignment.num_repeated
        assignment.num_prompted = assignment.num_repeated = 0
        earlier = demand.backend_id
        if assignment.backend is not None:
            demand.backend_id = assignment.backend.backend_id
        record = self._caches.get(demand.backend_id or "")
        if record is not None and demand.has_place:
            record.held += demand.num_tokens - before
        if record is not None:
            record.num_prompted += prompted
            record.num_expected += repeated if held.has_kept_place and demand.backend_id == earlier else 0
        self._look(held)

    def _look(self, held: _Held) -> None:
        """Decide if what a session has done may matter to another."""
        record = self._caches.get(held.demand.backend_id or "")
        is_over = record is not None and record.held > record.capacity
        if is_over or self._num_due():
            self._decide_within(_BATCH_S)

    def _note_shared(self, held: _Held) -> None:
        """Find how much of its first prompt the group shares."""
        group, ids = held.demand.group, held.assignment.last_prompt
        if ids is None:
            return
        first, shared = self._firsts.setdefault(group, (ids, len(ids)))
        shared = common_prefix_len(first[:shared], ids)
        self._firsts[group] = first, shared
        for one in self._sessions.values():
            if one.demand.group == group:
                one.demand.num_shared = shared

    # -- decisions -----------------------------------------------------------------------------------------------

    def _rooms(self) -> list[CacheRoom] | None:
        """None: nobody waits."""
        healthy = [one.backend_id for one in self._backends.values() if one.state == "healthy"]
        is_limited = self.are_needed and not self._is_closed
        if not is_limited or not healthy or any(one not in self._caches for one in healthy):
            return None
        return [CacheRoom(one, self._caches[one].capacity) for one in healthy]

    def decide(self) -> None:
        """Let those go on who may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rooms = self._rooms()
        if rooms is None:
            for held in self._sessions.values():
                if held.demand.state == "due":
                    self._go(held)
            return
        decision = self._policy.decide(rooms, [one.demand for one in self._sessions.values()], self._clock())
        for session_id in decision.lose:
            self._sessions[session_id].demand.has_place = False
        for session_id, backend_id in decision.go.items():
            held = self._sessions[session_id]
            held.demand.has_place, held.demand.backend_id = True, backend_id
            self._move(held.assignment, self._backends[backend_id])
            self._go(held)
        for backend_id, num_tokens in decision.held.items():
            self._caches[backend_id].held = num_tokens
        if self._num_due():
            self._decide_within(_TICK_S)

    def _decide_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self.decide)

    def _num_due(self) -> int:
        return sum(one.demand.state == "due" for one in self._sessions.values())

    def _go(self, held: _Held) -> None:
        self._longest_wait_s = max(self._longest_wait_s, self._clock() - held.demand.since)
        held.demand.state, held.demand.since = "running", self._clock()
        held.goes_on.set()
