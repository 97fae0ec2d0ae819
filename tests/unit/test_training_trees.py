"""Forks that join a group: the states that are chosen, the budget of sampled tokens, and what is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import Conflict
from gangline.domain.session import SessionResult
from gangline.domain.tokens import logprobs, token_ids
from gangline.domain.views import Submitted
from gangline.rows.forks.calls import REPLAYED
from gangline.train.collecting.beside.tasks import Beside
from gangline.train.collecting.beside.trees import State, TreeRuns, TreeSettings, chosen_states, num_own_sampled
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.groups import Fork, Group
from support.store.completions import completion
from support.training.samples import session, trace
from support.training.service import FakeService

TASK = {"task_id": "t0", "instruction": "add", "num_samples": 2, "agent": {"harness": "shell"}}


def turns(session_id: str, surprises: Sequence[float], *, repeated: int = 0, reward: float = 1.0) -> SessionResult:
    """Calls of two tokens each; the first `repeated` come from a parent's record."""
    made = session(session_id, reward, trace(turns=[(10, 11)] * len(surprises)))
    calls = tuple(
        msgspec.structs.replace(
            completion(number, session=session_id),
            completion_id=f"c{number:04d}",
            sampled_ids=token_ids([10, 11]),
            logprobs=logprobs([-surprise, -surprise]),
            metadata={REPLAYED: f"p{number}"} if number < repeated else {},
        )
        for number, surprise in enumerate(surprises)
    )
    return msgspec.structs.replace(made, completions=calls)


def group(*sessions: SessionResult, **forks: Fork) -> Group:
    return Group("t0", sessions, forks=forks)


def test_the_turns_of_the_largest_surprise_are_sampled_again_but_never_the_first() -> None:
    one = group(turns("a", [9.0, 0.1, 0.5, 0.2]), turns("b", [9.0, 0.3]), turns("c", [9.0]))
    assert chosen_states(one, TreeSettings(branches=3)) == [State("a", 2, 3, 2), State("b", 1, 3, 1)]
    two = chosen_states(one, TreeSettings(branches=1, turns=2))
    assert [(state.session_id, state.turn) for state in two] == [("a", 2), ("b", 1), ("a", 3)]


def test_turns_are_spread_evenly_where_that_is_asked_for() -> None:
    one = group(turns("a", [1.0] * 10))
    for num, expected in ((1, [5]), (3, [2, 5, 8]), (9, list(range(1, 10))), (20, list(range(1, 10)))):
        found = chosen_states(one, TreeSettings(choose="evenly", turns=num))
        assert [state.turn for state in found] == expected


def test_a_fork_is_forked_behind_its_own_first_turn_and_no_state_twice() -> None:
    one = group(turns("a", [1.0] * 3), turns("a.f", [1.0] * 4, repeated=1), **{"a.f": Fork("a", 1)})
    wide = TreeSettings(turns=10)
    assert [(state.session_id, state.turn) for state in chosen_states(one, wide)] == [
        *(("a", turn) for turn in (1, 2)),
        *(("a.f", turn) for turn in (2, 3)),
    ]
    assert [(state.session_id, state.turn) for state in chosen_states(one, wide, {("a", 1), ("a.f", 3)})] == [
        ("a", 2),
        ("a.f", 2),
    ]


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    branches=st.integers(1, 5),
    num=st.integers(1, 6),
    budget=st.integers(1, 120),
    choose=st.sampled_from(["entropy", "evenly"]),
)
def test_forks_are_expected_to_stay_within_the_budget(
    lengths: list[int], branches: int, num: int, budget: int, choose: str
) -> None:
    sessions = [turns(f"s{at}", [0.1 * at + 0.01 * turn for turn in range(num_)]) for at, num_ in enumerate(lengths)]
    settings = TreeSettings.model_validate(
        {"branches": branches, "turns": num, "choose": choose, "max_sampled_tokens": budget}
    )
    states = chosen_states(group(*sessions), settings)
    length = {f"s{at}": num_ for at, num_ in enumerate(lengths)}
    spent = sum(num_own_sampled(one) for one in sessions)
    assert spent == 2 * sum(lengths)
    expected = sum(2 * (length[state.session_id] - state.turn) * state.samples for state in states)
    assert spent + expected <= max(budget, spent)
    assert all(1 <= state.turn < length[state.session_id] and 1 <= state.samples <= branches for state in states)
    assert len({(state.session_id, state.turn) for state in states}) == len(states)


class Forking(FakeService):
    """Forks have a result at once: of the given rewards, by the id of their task."""

    def __init__(self, *sessions: SessionResult, **forks: tuple[float | None, ...]) -> None:
        super().__init__(t0=tuple(one.reward for one in sessions))
        self._sessions = sessions
        self._forks = {name.replace("_", "."): rewards for name, rewards in forks.items()}
        self.refused = set[str]()

    async def fork(self, session_id: str, turn: int, *, samples: int = 1, task_id: str | None = None) -> Submitted:
        assert task_id is not None
        if task_id in self.refused:
            raise Conflict(f"session {session_id} is not forkable, because so.")
        self.rewards[task_id] = self._forks[task_id][:samples]
        return await self.submit({"task_id": task_id})

    async def result(self, task_id: str) -> list[SessionResult]:
        self._may_fail()
        if task_id == "t0":
            return list(self._sessions)
        made = [turns(f"{task_id}.{at}", [1.0] * 3, repeated=1, reward=0.5) for at in range(2)]
        pairs = zip(made, self.rewards[task_id], strict=False)
        return [msgspec.structs.replace(one, reward=reward) for one, reward in pairs]


def collecting(service: Forking, **settings: object) -> PlainCollector:
    trees = TreeRuns(service, TreeSettings.model_validate(settings), retry_s=0.0)
    return PlainCollector(service, islice([TASK], 1), beside=Beside(trees=trees), retry_s=0.0)


async def test_valid_forks_join_the_group_with_their_parents_and_others_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sessions = turns("t0.0", [1.0, 2.0]), turns("t0.1", [1.0, 1.0, 1.0], reward=0.0)
    service = Forking(*sessions, t0_0_t1=(1.0, None), t0_1_t1=(0.25, 0.75))
    async with collecting(service) as collector:
        service.num_unavailable = 2
        (found,) = await collector.collect(1)
    assert [one.session_id for one in found.sessions] == ["t0.0", "t0.1", "t0.0.t1.0", "t0.1.t1.0", "t0.1.t1.1"]
    assert found.forks == {
        "t0.0.t1.0": Fork("t0.0", 1),
        "t0.1.t1.0": Fork("t0.1", 1),
        "t0.1.t1.1": Fork("t0.1", 1),
    }
    assert (found.rewards, found.fair_rewards) == ((1.0, 0.0, 1.0, 0.25, 0.75), (1.0, 0.0))
    assert "t0.0.t1.1" in caplog.text
    assert service.cancelled == []


async def test_a_session_that_cannot_be_forked_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    sessions = turns("t0.0", [1.0, 2.0]), turns("t0.1", [1.0, 1.0], reward=0.0)
    service = Forking(*sessions, t0_1_t1=(0.25, 0.75))
    service.refused.add("t0.0.t1")
    async with collecting(service) as collector:
        (found,) = await collector.collect(1)
    assert set(found.forks) == {"t0.1.t1.0", "t0.1.t1.1"}
    assert "not forkable, because so" in caplog.text


async def test_rounds_fork_the_forks() -> None:
    sessions = turns("t0.0", [1.0, 2.0]), turns("t0.1", [1.0], reward=0.0)
    service = Forking(*sessions, t0_0_t1=(1.0,), t0_0_t1_0_t2=(0.0,))
    async with collecting(service, branches=1, rounds=2) as collector:
        (found,) = await collector.collect(1)
    assert found.forks == {"t0.0.t1.0": Fork("t0.0", 1), "t0.0.t1.0.t2.0": Fork("t0.0.t1.0", 2)}


async def test_forks_that_run_when_the_collector_is_left_are_cancelled() -> None:
    class Slow(Forking):
        async def fork(self, session_id: str, turn: int, *, samples: int = 1, task_id: str | None = None) -> Submitted:
            return await self.submit({"task_id": task_id})

    service = Slow(turns("t0.0", [1.0, 2.0]), turns("t0.1", [1.0], reward=0.0))
    async with collecting(service) as collector:
        work = asyncio.create_task(collector.collect(1))
        await service.until_submitted(2)
        work.cancel()
    assert service.cancelled[:1] == ["t0.0.t1"]
