"""Which sessions may compete for an engine's prefix cache now, and where: a pure decision over a snapshot.

A session with a *place* at a backend may call it, and keeps its context cached there while its tools run: the contexts
of all sessions with a place fit the cache together. The others wait before a call.

Laws
- A backend's places never exceed its cache, except for one session that alone does, and for calls in flight that have
  outgrown it: a call in flight is never stopped.
- A call of a session with a place goes on at once. When contexts have outgrown the cache, sessions lose their place:
  those in a tool first, the longest one first.
- A session in a tool for more than `patience_s` loses its place when another one waits and fits then. Where no call is
  in flight, it does at once: no engine idles while a session waits.
- Sessions that have a context are placed before new ones, those of groups with a place before others. Of sessions with
  a context the last to wait goes first, since its context is the likeliest to be cached still; of new ones the first.
  A later one may go first where an earlier one does not fit.
- After `max_wait_s` a session is overdue, and the oldest of these goes before all others: nobody else gets a place at
  its backend, and those whose call ends lose theirs, until it fits. It waits for calls in flight only, so no circle of
  sessions that wait for each other lasts.
- A session moves only when it has no place. It goes where load and tokens to compute are least together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

CallState = Literal["running", "due", "idle"]


class CacheRoom(msgspec.Struct, frozen=True):
    """A healthy backend."""

    backend_id: str
    capacity: float
    """Tokens whose keys and values fit its cache."""


class Demand(msgspec.Struct, kw_only=True):
    """A session that has called or wants to."""

    session_id: str
    group: str
    """Sessions of one group share the first `num_shared` tokens."""
    num_shared: int = 0
    num_tokens: int = 0
    """Length of its last context; 0 before its first call."""
    growth: float = 0.0
    """Tokens that its next call is expected to add."""
    state: CallState
    """`running`: a call is in flight. `due`: a call wants to go on. `idle`: a tool runs."""
    since: float
    """When it entered this state, in seconds of the caller's clock."""
    backend_id: str | None = None
    """Where it has, or last had, a place."""
    has_place: bool = False


class AdmissionDecision(msgspec.Struct, frozen=True):
    go: dict[str, str]
    """Due session -> its backend: its call goes on, and it has a place there."""
    lose: frozenset[str]
    """Sessions that no longer have a place."""
    held: dict[str, float] = {}
    """Backend -> tokens of the sessions that have a place there then."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The policy. All methods are pure."""

    patience_s: float = 5.0
    max_wait_s: float = 600.0
    headroom: float = 0.2
    """Part of a cache that sessions leave free when they get a place, for contexts to grow."""
    is_eager: bool = True
    """False: nobody waits until an engine has computed contexts again that its cache should have held."""

    def decide(self, caches: Iterable[CacheRoom], demands: Iterable[Demand], now: float) -> AdmissionDecision:
        return _Deciding(self, caches, demands, now).decision()


class _CacheUse:
    """A backend's cache during one decision."""

    def __init__(self, cache: CacheRoom) -> None:
        self.backend_id = cache.backend_id
        self.capacity = max(cache.capacity, 1.0)
        self.used = 0.0
        self.is_closed = False
        """An overdue session gets the next room."""
        self.refused = math.inf
        """As many tokens as these did not fit: they do not in the rest of this decision, since it only fills up."""
        self.holders: dict[str, Demand] = {}
        self._groups = Counter[str]()

    def need(self, demand: Demand) -> float:
        """Tokens that the session adds to those here. What its group shares counts with the first of them."""
        shared = 0 if self._groups[demand.group] else demand.num_shared
        return max(demand.num_tokens + demand.growth - demand.num_shared, 0.0) + shared

    def join(self, demand: Demand) -> None:
        self.used += self.need(demand)
        self._groups[demand.group] += 1
        self.holders[demand.session_id] = demand

    def leave(self, demand: Demand) -> None:
        del self.holders[demand.session_id]
        self._groups[demand.group] -= 1
        self.used -= self.need(demand)

    def fits(self, demand: Demand, headroom: float = 0.0) -> bool:
        return not self.holders or self.used + self.need(demand) <= self.capacity * (1.0 - headroom)

    def load_with(self, demand: Demand) -> float:
        """Load in caches, and the tokens that the session would compute there, in caches too."""
        need = self.need(demand)
        computed = demand.growth if demand.backend_id == self.backend_id else need
        return (self.used + need + computed) / self.capacity

    def is_busy(self) -> bool:
        return any(one.state != "idle" for one in self.holders.values())

    def victims(self, *, also_due: bool) -> list[Demand]:
        """Whose place goes first: the longest idle, then the latest due."""
        holders = sorted(self.holders.values(), key=lambda one: (one.since, one.session_id))
        idle = [one for one in holders if one.state == "idle"]
        return [*idle, *(one for one in reversed(holders) if one.state == "due")] if also_due else idle


class _Deciding:
    def __init__(self, policy: Admission, caches: Iterable[CacheRoom], demands: Iterable[Demand], now: float) -> None:
        self._policy = policy
        self._now = now
        self._rooms = {cache.backend_id: _CacheUse(cache) for cache in caches}
        self._waiting = list[Demand]()
        self._go: dict[str, str] = {}
        self._lose = set[str]()
        for demand in demands:
            room = self._rooms.get(demand.backend_id or "") if demand.has_place else None
            if room is not None:
                room.join(demand)
            elif demand.state == "due":
                self._waiting.append(demand)

    def decision(self) -> AdmissionDecision:
        for room in self._rooms.values():
            self._shrink(room)
        overdue = [one for one in self._waiting if self._now - one.since >= self._policy.max_wait_s]
        for demand in sorted(overdue, key=lambda one: (one.since, one.session_id)):
            self._place_overdue(demand)
        for room in self._rooms.values():
            self._go |= {one.session_id: room.backend_id for one in room.holders.values() if one.state == "due"}
        started = {one.group for room in self._rooms.values() for one in room.holders.values()}
        waiting = [one for one in self._waiting if one.session_id not in self._go]
        for demand in sorted(waiting, key=lambda one: _order(one, started)):
            self._place_waiting(demand)
        held = {room.backend_id: room.used for room in self._rooms.values()}
        return AdmissionDecision(self._go, frozenset(self._lose), held)

    def _shrink(self, room: _CacheUse) -> None:
        """Take places away until the contexts fit, or one is left."""
        for demand in room.victims(also_due=True):
            if room.used <= room.capacity or len(room.holders) == 1:
                return
            self._take(room, demand)

    def _place_overdue(self, demand: Demand) -> None:
        rooms = self._rooms_for(demand)
        for room in rooms:
            if room.fits(demand):
                return self._place(room, demand)
        for room in rooms[:1]:
            for one in room.victims(also_due=True):
                if one.session_id in self._go:  # overdue too, and placed just now
                    continue
                self._take(room, one)
                if room.fits(demand):
                    return self._place(room, demand)
            room.is_closed = True
        return None

    def _place_waiting(self, demand: Demand) -> None:
        rooms = [room for room in self._rooms_for(demand) if room.need(demand) < room.refused]
        headroom = self._policy.headroom
        for room in rooms:
            if room.fits(demand, headroom):
                return self._place(room, demand)
        for room in rooms:
            patience_s = self._policy.patience_s if room.is_busy() else 0.0
            idle = [one for one in room.victims(also_due=False) if self._now - one.since >= patience_s]
            for number, one in enumerate(idle, 1):
                room.leave(one)
                if room.fits(demand, headroom):
                    self._lose.update(gone.session_id for gone in idle[:number])
                    return self._place(room, demand)
            for one in idle:
                room.join(one)
            room.refused = room.need(demand)
        return None

    def _rooms_for(self, demand: Demand) -> list[_CacheUse]:
        rooms = (room for room in self._rooms.values() if not room.is_closed)
        return sorted(rooms, key=lambda room: (room.load_with(demand), room.backend_id))

    def _take(self, room: _CacheUse, demand: Demand) -> None:
        room.leave(demand)
        self._lose.add(demand.session_id)
        if demand.state == "due":
            self._waiting.append(demand)

    def _place(self, room: _CacheUse, demand: Demand) -> None:
        room.join(demand)
        self._lose.discard(demand.session_id)
        self._go[demand.session_id] = room.backend_id


def _order(demand: Demand, started: set[str]) -> tuple[bool, bool, float, str]:
    is_new = demand.num_tokens == 0
    return is_new, demand.group not in started, demand.since if is_new else -demand.since, demand.session_id
