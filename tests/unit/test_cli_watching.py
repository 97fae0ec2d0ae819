"""What `gangline watch` knows, and how it draws that into terminals of any size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rich.console import Console

from gangline.cli.tasks.watch_view import Picture, shared_lines
from gangline.cli.tasks.watching import Watched, event_line
from gangline.cli.terminal.views import counts
from gangline.domain.node_numbers import NodeNumbers
from gangline.domain.views import Event, NodeView, ServiceStatus, TaskSummary

STATUS = ServiceStatus(
    version="0",
    at=1000.0,
    tasks={"running": 1},
    sessions={"queued": 3, "leased": 2, "ended": 4},
    stages={"init": 1, "run": 1},
    oldest_queued_s=1.0,
    callbacks={},
    nodes=(),
)


NUMBERS = NodeNumbers(
    init=1,
    ready=2,
    run=5,
    postrun=0,
    init_workers=4,
    ready_slots=8,
    run_slots=16,
    postrun_workers=4,
    external_sessions=3,
    gate_closed=0,
    gate_calls_waiting=0,
    calls_in_flight=7,
    model_calls=10,
    prompt_tokens=1000,
    sampled_tokens=500,
    contexts=10,
    contexts_diverged=0,
    untrainable=0,
)


def node(name: str = "n1", numbers: NodeNumbers | None = NUMBERS, **changes: Any) -> NodeView:
    fields: dict[str, Any] = {
        "node_id": name,
        "url": "http://n1",
        "capacity": 28,
        "draining": False,
        "num_sessions": 8,
        "metrics": {} if numbers is None else numbers.as_metrics(),
        "first_seen_at": 0.0,
        "last_seen_at": 1000.0,
        "age_s": 1.0,
    }
    return NodeView(**{**fields, **changes})


def backend(url: str, state: str = "healthy", error: str | None = None) -> dict[str, Any]:
    return {"url": url, "engine": "vllm", "state": state, "num_calls": 2, "num_sessions": 4, "error": error}


def status(*nodes: NodeView, at: float = 1000.0, **changes: Any) -> ServiceStatus:
    return msgspec.structs.replace(STATUS, nodes=nodes, at=at, **changes)


def task(mean_reward: float | None, task_id: str = "t[1]") -> TaskSummary:
    return TaskSummary(
        task_id=task_id,
        status="running",
        num_samples=4,
        num_open=2,
        position=1,
        created_at=0.0,
        outcomes={"completed": 2},
        mean_reward=mean_reward,
    )


def ended(at: float, kind: str = "session.ended", **data: object) -> Event:
    return Event(seq=int(at), at=at, kind=kind, task_id="t", session_id="t.0", data=dict(data))


def drawn(watched: Watched, width: int = 120, height: int | None = None) -> str:
    """`height`: of the terminal; None is a pipe."""
    plain = Console(width=width, no_color=True, force_terminal=False)
    with plain.capture() as text:
        plain.print(Picture(watched), height=height, crop=False)
    return text.get()


def busy(num_tasks: int = 30) -> Watched:
    """More than a small terminal has room for."""
    watched = Watched()
    for number in range(20):
        told = {"boundary": "engine", "code": "engine_unavailable", "message": "the engine does not answer"}
        watched.take(ended(980.0 + number, "session.requeued", **told))
    nodes = [node(f"node-{n}", backends=(backend(f"http://engine-{n}:8000"),)) for n in range(6)]
    watched.look(status(*nodes), [task(1.0, f"group-{n}") for n in range(num_tasks)])
    return watched


def test_sessions_in_an_engines_cache_are_shown() -> None:
    cache = {"num_tokens": 12_000, "usable": 1.0, "num_held_tokens": 9_000, "num_places": 3, "hit_rate": 0.81}
    watched = Watched()
    watched.look(status(node(backends=({**backend("http://e"), "cache": cache},))), [])
    assert "9000 of 12000 tokens held by 3 sessions, 81% of prompts in it" in drawn(watched, 200)
    assert "tokens held" not in drawn(busy(), 200)


def test_throughput_counts_the_last_minute_only() -> None:
    watched = Watched()
    for at in (900.0, 939.0, 941.0, 999.0):
        watched.take(ended(at))
    watched.look(STATUS, [])
    assert watched.ended_per_minute() == 2


def test_what_is_known_for_a_short_while_is_told_as_a_rate() -> None:
    watched = Watched()
    watched.look(status(node(), at=1000.0), [])
    for at in (1003.0, 1006.0):
        watched.take(ended(at))
    watched.look(status(node(), at=1006.0), [])
    assert watched.ended_per_minute() == pytest.approx(20.0)


def test_tokens_are_counted_over_the_nodes_and_over_their_restarts() -> None:
    watched = Watched()

    def sampled(number: int) -> NodeNumbers:
        return msgspec.structs.replace(NUMBERS, sampled_tokens=number)

    watched.look(status(node("a", sampled(500)), node("b", sampled(100)), at=1000.0), [])
    assert watched.sampled_per_s() == 0.0
    watched.look(status(node("a", sampled(700)), node("b", sampled(100)), at=1010.0), [])
    assert watched.sampled_per_s() == pytest.approx(20.0)
    watched.look(status(node("a", sampled(100)), node("b", sampled(200)), at=1020.0), [])  # a was restarted
    assert watched.sampled_per_s() == pytest.approx(20.0)


def test_without_nodes_that_tell_there_is_no_rate_of_tokens() -> None:
    watched = Watched()
    watched.look(status(node("theirs", None)), [])
    assert watched.sampled_per_s() is None
    assert "8/28 in all" in drawn(watched)


def test_stages_groups_and_failures_are_drawn() -> None:
    watched = Watched()
    watched.take(ended(990.0, boundary="node", code="lease_expired", message="n1 stopped renewing"))
    watched.look(STATUS, [task(0.75)])
    text = drawn(watched)
    assert "queued 3 > init 1 > ready 0 > run 1 > postrun 0 > ended 4" in text
    assert "t[1]" in text
    assert "0.75" in text
    assert "2/4" in text
    assert "node: lease_expired" in text
    assert "n1 stopped renewing" in text
    assert "gangline node" in text


def test_nodes_are_drawn_with_their_pools_gate_and_exactness() -> None:
    watched = Watched()
    closed = msgspec.structs.replace(
        NUMBERS, gate_closed=1, gate_calls_waiting=4, policy_version=12, contexts_diverged=1, untrainable=2
    )
    down = backend("http://b:8000", "unhealthy", "refused")
    nodes = [node("n1", backends=(backend("http://a:8000"), down)), node("n2", closed, draining=True)]
    watched.look(status(*nodes, at=1000.0), [])
    text = drawn(watched, width=140)
    assert all(pool in text for pool in ("1/4", "2/8", "5/16", "0/4"))
    assert "closed, 4 wait" in text
    assert "12" in text
    assert "draining" in text
    assert "95.00% exact of 20 · 1 diverged · 2 untrainable" in text
    assert text.index("http://b:8000") < text.index("http://a:8000"), "what does not work comes first"
    assert "refused" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 10), (40, 24), (24, 12), (200, 60), (80, 6)])
def test_every_terminal_gets_a_picture_that_fits(width: int, height: int) -> None:
    lines = drawn(busy(), width, height).splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_a_small_terminal_shows_something_of_everything_and_says_what_is_missing() -> None:
    text = drawn(busy(), 80, 24)
    assert all(title in text for title in ("node", "group", "failed", "engine"))
    assert "more" in text
    assert "sessions/min" in text


def test_a_narrow_terminal_keeps_stages_and_loses_columns() -> None:
    text = drawn(busy(), 44, 24)
    assert all(pool in text for pool in ("1/4", "2/8", "5/16", "0/4"))
    assert "heard" not in text


def test_lines_are_shared_so_that_nobody_gets_more_than_he_wants() -> None:
    assert shared_lines([1, 10, 3], 9) == [1, 5, 3]
    assert shared_lines([2, 2], 10) == [2, 2]
    assert shared_lines([5, 5], 0) == [0, 0]


def test_a_time_without_the_server_is_told_while_it_lasts_and_for_a_while_after() -> None:
    now = [0.0]
    watched = Watched(clock=lambda: now[0])
    watched.look(STATUS, [])
    watched.lost("connection refused")
    now[0] = 12.0
    watched.lost("connection refused")
    text = drawn(watched)
    assert "has not answered for 12 s" in text
    assert "connection refused" in text
    assert "queued 3" in text, "the last picture stays"
    watched.look(STATUS, [])
    assert "answers again; it was away for 12 s" in drawn(watched)
    now[0] = 60.0
    assert "away" not in drawn(watched)


def test_what_agents_say_cannot_move_the_cursor() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 two\nlines"
    watched = Watched()
    event = ended(990.0, boundary="harness", code="agent_error", message=evil)
    watched.take(event)
    watched.look(STATUS, [])
    for text in (drawn(watched), event_line(event)):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "\n" not in event_line(event)


def test_it_can_be_drawn_before_the_first_look() -> None:
    assert "connecting" in drawn(Watched())


def test_an_event_is_one_line() -> None:
    assert event_line(ended(0.0, outcome="completed", code=None)) == "00:00:00 session.ended t.0 outcome=completed"


def test_counts_leave_out_what_is_zero() -> None:
    assert counts({"a": 0, "b": 2}) == "2 b"
