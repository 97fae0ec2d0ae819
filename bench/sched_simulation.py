"""Sessions of agents over models of engines, without places (each call goes on at once, sessions are assigned by count)
or with them (`node/backends/admission.py`): seconds, and how much of their prompts was cached.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from sched_engine import Call, EngineModel, hit_rate

from gangline.node.backends.admission import Admission, CacheRoom, Demand


@dataclass(frozen=True)
class Turn:
    num_new: int
    """Tokens that the prompt has behind the session's context so far."""
    num_sampled: int
    tool_s: float
    """From the reply to the next call."""


@dataclass(frozen=True)
class Trace:
    """A session."""

    name: str
    group: str
    num_shared: int
    """Tokens at the start of the first prompt that are the same in the whole group."""
    turns: Sequence[Turn]

    @property
    def mean_context(self) -> float:
        """Tokens behind a turn, on average."""
        lengths = list(accumulate(turn.num_new + turn.num_sampled for turn in self.turns))
        return sum(lengths) / len(lengths)


def tool_seconds(rng: random.Random) -> float:
    """86 % within a second, 95 % within ten (vLLM router 285), the rest up to a minute."""
    at = rng.random()
    low, high = (0.05, 1.0) if at < 0.86 else (1.0, 10.0) if at < 0.95 else (10.0, 60.0)
    return low * (high / low) ** rng.random()


def traces(
    num_groups: int, group_size: int, rng: random.Random, *, prompts: float = 1.0, replies: float = 1.0
) -> list[Trace]:
    """Agents of 8 to 20 turns. prompts, replies: factors of their numbers of tokens."""
    found: list[Trace] = []
    for group in range(num_groups):
        task = rng.randint(300, 2000)
        for member in range(group_size):
            turns: list[Turn] = []
            for number in range(rng.randint(8, 20)):
                new = 1200 + task if number == 0 else int(rng.lognormvariate(5.7, 0.8))
                sampled = int(rng.lognormvariate(4.6, 0.6))
                turns.append(Turn(max(int(new * prompts), 1), max(int(sampled * replies), 1), tool_seconds(rng)))
            found.append(Trace(f"g{group}-{member}", f"g{group}", int((1200 + task) * prompts), turns))
    return found


@dataclass
class Result:
    seconds: float
    num_sessions: int
    hit_rate: float
    num_recomputed: int
    """Tokens of prompts that their session's earlier call had in the cache."""
    longest_wait_s: float
    num_moves: int
    num_preempted: int

    @property
    def sessions_per_hour(self) -> float:
        return 3600 * self.num_sessions / self.seconds


class _Session:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.turn = 0
        self.num_context = 0
        self.demand = Demand(session_id=trace.name, group=trace.group, state="due", since=0.0)
        self.engine: int | None = None


def simulate(work: Sequence[Trace], engines: Sequence[EngineModel], num_slots: int, policy: Admission | None) -> Result:
    """num_slots: sessions that live at a time. policy: None: each call goes on at once."""
    return _Simulation(work, engines, num_slots, policy).run()


class _Simulation:
    def __init__(
        self, work: Sequence[Trace], engines: Sequence[EngineModel], num_slots: int, policy: Admission | None
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._left = iter(work)
        self._num_slots = num_slots
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = 0.0
        self._sessions = dict[str, _Session]()
        self._counts = [0] * len(engines)
        self._stepping = [False] * len(engines)
        self._rooms = [CacheRoom(str(n), one.capacity) for n, one in enumerate(engines)]
        self._longest = 0.0
        self._num_ended = self._num_moves = self._recomputed = 0
        self._growth, self._first = 400.0, 2000.0
        self._timer = False

    def run(self) -> Result:
        for _ in range(self._num_slots):
            self._begin()
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return Result(
            self._now,
            self._num_ended,
            hit_rate(self._engines),
            self._recomputed,
            self._longest,
            self._num_moves,
            sum(one.num_preempted for one in self._engines),
        )

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _begin(self) -> None:
        trace = next(self._left, None)
        if trace is not None:
            session = self._sessions[trace.name] = _Session(trace)
            self._due(session)

    def _due(self, session: _Session) -> None:
        demand = session.demand
        demand.state, demand.since = "due", self._now
        if not demand.num_tokens:
            demand.growth = self._first
        if self._policy is None:
            if session.engine is None:
                session.engine = min(range(len(self._engines)), key=lambda one: self._counts[one])
                self._counts[session.engine] += 1
            self._send(session)
        else:
            self._decide()

    def _decide(self) -> None:
        assert self._policy is not None
        decision = self._policy.decide(self._rooms, [one.demand for one in self._sessions.values()], self._now)
        for name in decision.lose:
            self._sessions[name].demand.has_place = False
        for name, backend in decision.go.items():
            session = self._sessions[name]
            session.demand.has_place, session.demand.backend_id = True, backend
            engine = int(backend)
            self._num_moves += session.engine not in (None, engine)
            session.engine = engine
            self._send(session)
        if not self._timer and any(one.demand.state == "due" for one in self._sessions.values()):
            self._timer = True
            self._at(self._now + 1.0, self._tick)

    def _tick(self) -> None:
        self._timer = False
        self._decide()

    def _send(self, session: _Session) -> None:
        demand, trace, turn = session.demand, session.trace, session.trace.turns[session.turn]
        self._longest = max(self._longest, self._now - demand.since)
        demand.state, demand.since = "running", self._now
        prompt = session.num_context + turn.num_new
        assert session.engine is not None
        engine = self._engines[session.engine]
        engine.ask(Call(trace.name, trace.group, trace.num_shared, prompt, turn.num_sampled))
        self._step(session.engine)

    def _step(self, number: int) -> None:
        if not self._stepping[number] and self._engines[number].is_busy:
            self._stepping[number] = True
            seconds, ended = self._engines[number].step()
            self._at(self._now + seconds, lambda: self._stepped(number, ended))

    def _stepped(self, number: int, ended: Sequence[Call]) -> None:
        self._stepping[number] = False
        for call in ended:
            self._answered(self._sessions[call.session], call)
        self._step(number)

    def _answered(self, session: _Session, call: Call) -> None:
        self._recomputed += max(session.num_context - call.num_cached - 16, 0)
        demand, turn = session.demand, session.trace.turns[session.turn]
        before, session.num_context = session.num_context, call.total
        if before:
            self._growth += 0.05 * (session.num_context - before - self._growth)
        else:
            self._first += 0.05 * (session.num_context - self._first)
            demand.num_shared = session.trace.num_shared
        demand.num_tokens, demand.growth = session.num_context, self._growth
        demand.state, demand.since = "idle", self._now
        session.turn += 1
        if session.turn < len(session.trace.turns):
            self._at(self._now + turn.tool_s, lambda: self._due(session))
        else:
            del self._sessions[session.trace.name]
            if session.engine is not None:
                self._counts[session.engine] -= 1
            self._num_ended += 1
            self._begin()
        if self._policy is not None:
            self._decide()
