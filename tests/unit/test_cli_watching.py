"""What `gangline watch` knows and draws."""

from __future__ import annotations

from rich.console import Console

from gangline.cli.views import counts, mean_reward
from gangline.cli.watching import Watched, event_line
from gangline.domain.views import Event, ServiceStatus, TaskView

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


def task(rewards: tuple[float | None, ...]) -> TaskView:
    return TaskView(
        task_id="t[1]",
        status="running",
        num_samples=4,
        num_open=2,
        position=1,
        created_at=0.0,
        states={},
        outcomes={"completed": 2},
        rewards=rewards,
        sessions=(),
        request={},
    )


def ended(at: float, **data: object) -> Event:
    return Event(seq=int(at), at=at, kind="session.ended", task_id="t", session_id="t.0", data=dict(data))


def drawn(watched: Watched) -> str:
    plain = Console(width=120, no_color=True, force_terminal=False)
    with plain.capture() as text:
        plain.print(watched)
    return text.get()


def test_throughput_counts_the_last_minute_only() -> None:
    watched = Watched()
    for at in (900.0, 939.0, 941.0, 999.0):
        watched.take(ended(at))
    watched.look(STATUS, [])
    assert watched.ended_per_minute() == 2


def test_stages_groups_and_failures_are_drawn() -> None:
    watched = Watched()
    watched.take(ended(990.0, code="lease_expired"))
    watched.look(STATUS, [task((1.0, 0.5, None, None))])
    text = drawn(watched)
    assert "queued 3 > init 1 > ready 0 > run 1 > postrun 0 > ended 4" in text
    assert "t[1]" in text
    assert "0.75" in text
    assert "2/4" in text
    assert "lease_expired" in text
    assert "gangline node" in text


def test_it_can_be_drawn_before_the_first_look() -> None:
    assert "connecting" in drawn(Watched())


def test_an_event_is_one_line() -> None:
    assert event_line(ended(0.0, outcome="completed", code=None)) == "00:00:00 session.ended t.0 outcome=completed"


def test_a_reward_that_is_not_there_counts_for_nothing() -> None:
    assert mean_reward([None, 1.0, 0.0]) == 0.5
    assert mean_reward([None]) is None
    assert counts({"a": 0, "b": 2}) == "2 b"
