"""Laws of the places that sessions have in engines' caches, for any snapshot and for whole lives of sessions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gangline.node.backends.admission import Admission, AdmissionDecision, CacheRoom, Demand

MAX_WAIT_S = 60.0
POLICY = Admission(patience_s=5.0, max_wait_s=MAX_WAIT_S)
NOW = 1000.0


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[list[CacheRoom], list[Demand]]:
    """Some sessions have a place at a backend that is no longer there."""
    caches = [CacheRoom(f"b{n}", draw(st.integers(0, 1000))) for n in range(draw(st.integers(0, 3)))]
    shared = {f"g{n}": draw(st.integers(0, 300)) for n in range(4)}
    demands: list[Demand] = []
    for number in range(draw(st.integers(0, 12))):
        group = draw(st.sampled_from(sorted(shared)))
        backend_id = draw(st.sampled_from(["b0", "b1", "b2", "gone", None]))
        has_place = backend_id is not None and draw(st.booleans())
        demands.append(
            Demand(
                session_id=f"s{number}",
                group=group,
                num_shared=shared[group],
                num_tokens=draw(st.integers(0, 800)),
                growth=draw(st.integers(0, 200)),
                state=draw(st.sampled_from(["running", "due", "idle"] if has_place else ["due", "idle"])),
                since=NOW - draw(st.sampled_from([0.0, 1.0, 4.0, 30.0, 59.0, 61.0, 500.0])),
                backend_id=backend_id,
                has_place=has_place,
            )
        )
    return caches, demands


def holders(caches: list[CacheRoom], demands: list[Demand], decision: AdmissionDecision) -> dict[str, list[Demand]]:
    """Backend -> the sessions that have a place there after the decision."""
    found: dict[str, list[Demand]] = {cache.backend_id: [] for cache in caches}
    for one in demands:
        if (backend := decision.go.get(one.session_id)) is not None:
            found[backend].append(one)
        elif one.has_place and one.session_id not in decision.lose and one.backend_id in found:
            found[one.backend_id].append(one)
    return found


def num_used(sessions: list[Demand]) -> float:
    """What a group shares counts once."""
    own = sum(max(one.num_tokens + one.growth - one.num_shared, 0.0) for one in sessions)
    return own + sum({one.group: one.num_shared for one in sessions}.values())


@given(snapshots())
def test_places_fit_the_cache_unless_one_session_alone_does_not(drawn: tuple[list[CacheRoom], list[Demand]]) -> None:
    caches, demands = drawn
    after = holders(caches, demands, POLICY.decide(caches, demands, NOW))
    for cache in caches:
        there = after[cache.backend_id]
        movable = [one for one in there if one.state != "running"]
        assert num_used(there) <= max(cache.capacity, 1.0) + 1e-6 or len(there) == 1 or not movable


@given(snapshots())
def test_whoever_gets_a_place_leaves_room_for_contexts_to_grow(drawn: tuple[list[CacheRoom], list[Demand]]) -> None:
    caches, demands = drawn
    decision = POLICY.decide(caches, demands, NOW)
    after = holders(caches, demands, decision)
    for cache in caches:
        there = after[cache.backend_id]
        placed = [
            one
            for one in there
            if one.session_id in decision.go and not (one.has_place and one.backend_id == cache.backend_id)
            if NOW - one.since < MAX_WAIT_S
        ]
        room = max(cache.capacity, 1.0) * (1 - POLICY.headroom)
        assert not placed or num_used(there) <= room + 1e-6 or len(there) == 1


@given(snapshots())
def test_a_decision_is_about_those_whom_it_can_concern(drawn: tuple[list[CacheRoom], list[Demand]]) -> None:
    caches, demands = drawn
    decision = POLICY.decide(caches, demands, NOW)
    by_id = {one.session_id: one for one in demands}
    for session_id, backend in decision.go.items():
        assert by_id[session_id].state == "due"
        assert backend in {cache.backend_id for cache in caches}
    for session_id in decision.lose:
        assert by_id[session_id].has_place
        assert by_id[session_id].state != "running"
        assert session_id not in decision.go


@given(snapshots())
def test_what_fits_stays_where_it_is(drawn: tuple[list[CacheRoom], list[Demand]]) -> None:
    caches, demands = drawn
    before = holders(caches, demands, AdmissionDecision({}, frozenset()))
    full = {cache.backend_id for cache in caches if num_used(before[cache.backend_id]) > max(cache.capacity, 1.0)}
    decision = POLICY.decide(caches, demands, NOW)
    waits = any(one.state == "due" and not (one.has_place and one.backend_id in before) for one in demands)
    is_overdue = any(one.state == "due" and NOW - one.since >= MAX_WAIT_S for one in demands)
    for backend, sessions in before.items():
        for one in sessions:
            if backend not in full and not is_overdue and one.state == "due":
                assert decision.go[one.session_id] == backend
            if not full and not waits:
                assert one.session_id not in decision.lose


@given(snapshots())
def test_no_engine_idles_while_a_session_waits(drawn: tuple[list[CacheRoom], list[Demand]]) -> None:
    caches, demands = drawn
    decision = POLICY.decide(caches, demands, NOW)
    after = holders(caches, demands, decision)
    due = [one for one in demands if one.state == "due"]
    for cache in caches:
        assert any(one.state != "idle" for one in after[cache.backend_id]) or len(due) == len(decision.go)


@given(snapshots(), st.randoms(use_true_random=False))
def test_the_order_of_the_snapshot_does_not_matter(
    drawn: tuple[list[CacheRoom], list[Demand]], rng: random.Random
) -> None:
    caches, demands = drawn
    shuffled = rng.sample(demands, len(demands))
    one, other = POLICY.decide(caches, demands, NOW), POLICY.decide(rng.sample(caches, len(caches)), shuffled, NOW)
    assert (one.go, one.lose) == (other.go, other.lose)


@dataclass
class Life:
    """A session from its first call to its end."""

    demand: Demand
    calls: list[tuple[int, int, int]]
    """(tokens added, seconds of the call, seconds of the tool behind it)"""
    ends_at: float = 0.0
    waits_for: Life | None = None
    """Its tools return only when this one has ended, as a game's does for the other player."""
    longest_wait_s: float = 0.0
    done: bool = False


@dataclass
class World:
    """Time in seconds. Backends come and go; at times no call ends, as while weights are updated."""

    caches: list[CacheRoom]
    lives: list[Life]
    drains: dict[int, str] = field(default_factory=dict[int, str])
    updates: set[int] = field(default_factory=set[int])
    now: float = 0.0

    def run(self, until: int) -> None:
        for second in range(until):
            self.now = float(second)
            if second in self.drains and len(self.caches) > 1:
                self.caches = [one for one in self.caches if one.backend_id != self.drains[second]]
            if second not in self.updates:
                self._end_calls()
            self._decide()
            if all(life.done for life in self.lives):
                return

    def _end_calls(self) -> None:
        for life in self.lives:
            demand = life.demand
            if life.done or life.ends_at > self.now:
                continue
            if demand.state == "running":
                added, _, tool_s = life.calls.pop(0)
                demand.num_tokens += added
                demand.state, demand.since, life.ends_at = "idle", self.now, self.now + tool_s
                life.done = not life.calls
            elif demand.state == "idle" and (life.waits_for is None or life.waits_for.done):
                demand.state, demand.since = "due", self.now

    def _decide(self) -> None:
        lives = {life.demand.session_id: life for life in self.lives if not life.done}
        decision = POLICY.decide(self.caches, [life.demand for life in lives.values()], self.now)
        for session_id in decision.lose:
            lives[session_id].demand.has_place = False
        for session_id, backend in decision.go.items():
            life, demand = lives[session_id], lives[session_id].demand
            life.longest_wait_s = max(life.longest_wait_s, self.now - demand.since)
            demand.state, demand.since, demand.has_place, demand.backend_id = "running", self.now, True, backend
            life.ends_at = self.now + life.calls[0][1]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    caches = [CacheRoom(f"b{n}", draw(st.integers(1, 600))) for n in range(draw(st.integers(1, 3)))]
    call = st.tuples(st.integers(1, 200), st.integers(1, 10), st.sampled_from([0, 0, 1, 3, 30]))
    lives: list[Life] = []
    for number in range(draw(st.integers(1, 10))):
        forked = draw(st.sampled_from([0, 0, 0, 400]))  # a fork begins with its parent's context
        demand = Demand(
            session_id=f"s{number}", group=f"g{number // 3}", num_shared=50, num_tokens=forked, state="due", since=0.0
        )
        lives.append(Life(demand, draw(st.lists(call, min_size=1, max_size=5))))
        if number and draw(st.booleans()):
            lives[-2].waits_for = lives[-1]
    drains = draw(st.dictionaries(st.integers(1, 100), st.sampled_from(["b0", "b1", "b2"]), max_size=2))
    update = draw(st.integers(1, 100))
    return World(caches, lives, drains, set(range(update, update + 5)))


@given(worlds())
def test_every_session_ends_and_none_waits_longer_than_the_bound(world: World) -> None:
    """Behind `max_wait_s`, a session waits for the calls in flight before each session that was overdue earlier."""
    longest_call_s = max(seconds for life in world.lives for _, seconds, _ in life.calls) + 5  # with an update
    bound_s = MAX_WAIT_S + len(world.lives) * (longest_call_s + 1)
    world.run(5_000)
    assert all(life.done for life in world.lives)
    assert max(life.longest_wait_s for life in world.lives) <= bound_s
