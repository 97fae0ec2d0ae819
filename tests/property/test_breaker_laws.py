"""The circuit breaker through random sequences of leases, ends and time, held against what it promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import Boundary, Failure
from gangline.domain.session import SessionResult
from gangline.node.health.breaker import Breaker

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 80.0

_BOUNDARIES: list[Boundary] = ["engine", "runtime", "store", "node", "builder", "evaluator", "harness"]
_ENDS = st.one_of(st.none(), st.just("well"), st.sampled_from(_BOUNDARIES), st.just("prepare_failed"))
_STEPS = st.one_of(st.just("lease"), st.tuples(st.integers(0, 5), _ENDS), st.floats(0.1, 200))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ended(how: str) -> SessionResult:
    said = {"session_id": "t.0", "task_id": "t", "node_id": "n", "attempt": 1, "fence": 1}
    if how == "well":
        return SessionResult(**said, outcome="completed")
    boundary = "runtime" if how == "prepare_failed" else how
    code = how if how == "prepare_failed" else "broken"
    failure = Failure(boundary=boundary, code=code, message="it broke", retryable=True)  # type: ignore[arg-type]
    return SessionResult(**said, outcome="infra_error", failure=failure)


def opened(clock: Clock, threshold: int = 3) -> Breaker:
    breaker = Breaker(threshold, pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, clock=clock)
    for fence in range(threshold):
        breaker.taken(("s", fence))
        breaker.ended(("s", fence), ended("engine"))
    return breaker


@given(st.integers(1, 4), st.lists(_STEPS, max_size=60))
def test_an_open_breaker_takes_one_at_a_time_and_is_never_open_for_good(threshold: int, steps: list[object]) -> None:
    clock = Clock()
    breaker = Breaker(threshold, pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, clock=clock)
    running: list[tuple[str, int]] = []
    fence = 0
    for step in steps:
        if step == "lease":
            for _ in range(breaker.allowed(3)):
                fence += 1
                running.append((f"s{fence}", fence))
                breaker.taken(running[-1])
                if not breaker.is_closed:
                    assert breaker.allowed(3) == 0, "one is tried, and no other is taken"
        elif isinstance(step, tuple) and running:
            at, how = step
            key = running.pop(at % len(running))
            was_closed = breaker.is_closed
            breaker.ended(key, None if how is None else ended(how))
            if how == "well":
                assert breaker.is_closed
            elif how not in ("engine", "runtime", "store", "node"):
                assert breaker.is_closed == was_closed, "what is not the node's fault changes nothing"
        elif isinstance(step, float):
            clock.now += step
        assert breaker.wait_s() <= LONGEST_PAUSE_S
        assert (breaker.view().state == "closed") == breaker.is_closed
    for key in running:
        breaker.ended(key, None)
    clock.now += LONGEST_PAUSE_S
    assert breaker.allowed(3) >= 1


@given(st.lists(st.sampled_from(_BOUNDARIES), max_size=30), st.integers(2, 4))
def test_it_opens_with_the_last_of_a_row_at_one_boundary(boundaries: list[Boundary], threshold: int) -> None:
    breaker = Breaker(threshold, clock=Clock())
    row: list[Boundary] = []
    for fence, boundary in enumerate(boundaries):
        if not breaker.is_closed:
            break
        breaker.taken(("s", fence))
        breaker.ended(("s", fence), ended(boundary))
        ours = boundary in ("engine", "runtime", "store", "node")
        row = ([*row, boundary] if row and row[-1] == boundary else [boundary]) if ours else []
        assert breaker.is_closed == (len(row) < threshold)


def test_each_failed_try_doubles_the_pause_and_a_success_forgets_them() -> None:
    clock = Clock()
    breaker = opened(clock)
    pauses: list[float] = []
    for fence in range(100, 105):
        pauses.append(breaker.wait_s())
        assert breaker.allowed(5) == 0
        clock.now += breaker.wait_s()
        assert breaker.allowed(5) == 1
        breaker.taken(("trial", fence))
        breaker.ended(("trial", fence), ended("runtime"))
    assert pauses == [10, 20, 40, 80, 80]
    clock.now += breaker.wait_s()
    breaker.taken(("trial", 200))
    breaker.ended(("trial", 200), ended("well"))
    assert breaker.allowed(5) == 5
    assert breaker.view().num_faults == 0


def test_sessions_from_before_it_opened_do_not_lengthen_the_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += breaker.wait_s()
    breaker.taken(("trial", 9))
    breaker.ended(("an old one", 1), ended("engine"))
    assert breaker.view().state == "trying"
    breaker.ended(("an old one", 2), ended("well"))
    assert breaker.is_closed, "whatever goes well proves that it can"


def test_it_says_what_fails_and_when_it_tries_again() -> None:
    breaker = opened(Clock(), threshold=2)
    view = breaker.view()
    assert (view.state, view.boundary, view.num_faults, view.message) == ("open", "engine", 2, "it broke")
    assert view.tries_in_s == FIRST_PAUSE_S


def test_a_threshold_of_0_never_opens_it() -> None:
    breaker = Breaker(0, clock=Clock())
    for fence in range(50):
        breaker.taken(("s", fence))
        breaker.ended(("s", fence), ended("node"))
    assert breaker.allowed(7) == 7
