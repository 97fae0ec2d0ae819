"""Laws of credit by branches: trees of forked sessions, and groups without any."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.session import SessionResult
from gangline.train.collecting.groups import Fork, Group
from gangline.train.learning.advantages import AdvantageSettings, group_advantages
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.branches import segment_advantages, shared_turns
from gangline.train.learning.samples import make_samples
from support.training.samples import session, trace

NAMES = st.sampled_from(["tree_grpo", "tree_adv", "branch_grpo"])
rewards = st.floats(-2, 2, allow_subnormal=False).map(lambda one: round(one, 3))


@st.composite
def forests(draw: st.DrawFn) -> Group:
    """Sessions of one to four turns; some are forks of earlier ones, with one turn of their own at least."""
    sessions, forks, lengths = list[SessionResult](), dict[str, Fork](), list[int]()
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        shared = 0 if parent is None else draw(st.integers(0, lengths[parent]))
        if parent is not None:
            forks[f"s{number}"] = Fork(f"s{parent}", shared)
        lengths.append(shared + draw(st.integers(1, 3)))
        sessions.append(session(f"s{number}", draw(rewards), trace(turns=[(10, 11, 2)] * lengths[-1])))
    return Group("task-1", tuple(sessions), forks=forks)


def by_turn(group: Group, name: str) -> dict[tuple[str, int], float]:
    """(session, turn) -> its advantage, the same for all of its tokens."""
    found = dict[tuple[str, int], float]()
    for session_, sample in zip(group.sessions, make_samples(group, algorithm(name)), strict=True):
        assert session_.trajectory is not None
        for number, span in enumerate(session_.trajectory.traces[0].spans):
            (one,) = set(sample.advantages[span.start : span.end].tolist())
            found[session_.session_id, number] = one
    return found


@given(st.lists(rewards, min_size=1, max_size=8), NAMES)
def test_a_group_without_branches_is_grpo_exactly(given_rewards: list[float], name: str) -> None:
    group = Group("task-1", tuple(session(f"s{at}", one) for at, one in enumerate(given_rewards)))
    plain, branched = (make_samples(group, algorithm(one)) for one in ("grpo", name))
    assert [one.advantages.tolist() for one in branched] == [one.advantages.tolist() for one in plain]


@given(forests(), NAMES)
def test_a_turn_has_one_advantage_in_all_sessions_that_share_it(group: Group, name: str) -> None:
    found = by_turn(group, name)
    for child, fork in group.forks.items():
        for turn in range(fork.num_turns):
            assert found[child, turn] == found[fork.parent_id, turn]


@given(forests(), NAMES, st.randoms())
def test_the_order_of_sessions_changes_nothing(group: Group, name: str, random: Random) -> None:
    mixed = list(group.sessions)
    random.shuffle(mixed)
    found = by_turn(Group(group.task_id, tuple(mixed), forks=group.forks), name)
    assert found == pytest.approx(by_turn(group, name), abs=1e-6)


@given(forests())
def test_what_every_session_shares_teaches_nothing_of_leaves(group: Group) -> None:
    ids = [one.session_id for one in group.sessions]
    num_turns = [len(one.trajectory.traces[0].spans) for one in group.sessions if one.trajectory is not None]
    found = by_turn(group, "tree_adv")
    for one, turns in zip(ids, shared_turns(ids, num_turns, group.forks), strict=True):
        for number, having in enumerate(turns):
            if len(having) == len(ids):
                assert found[one, number] == pytest.approx(0, abs=1e-5)


@given(forests())
def test_leaves_keep_the_sum_of_each_tokens_credit(group: Group) -> None:
    """A segment that is trained once, with the mean of its sessions, moves as much as one trained in each of them."""
    compared = group_advantages([one.reward or 0.0 for one in group.sessions])
    ids = [one.session_id for one in group.sessions]
    num_turns = [len(one.trajectory.traces[0].spans) for one in group.sessions if one.trajectory is not None]
    shared = shared_turns(ids, num_turns, group.forks)
    found = segment_advantages(
        [one.reward or 0.0 for one in group.sessions], shared, ids, "leaves", AdvantageSettings()
    )
    for turns, advantages in zip(shared, found, strict=True):
        for having, one in zip(turns, advantages, strict=True):
            assert one * len(having) == pytest.approx(sum(compared[index] for index in having), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "stem", "ends"),
    [
        # Sessions a and b share a turn; c stands alone. Rewards 1, 0, 0: mean 1/3.
        ("tree_grpo", 1 / 6, [2 / 3 + 0.5, -1 / 3 - 0.5]),
        ("tree_adv", 1 / 6, [2 / 3, -1 / 3]),
        ("branch_grpo", 0.25, [0.5, -0.5]),
    ],
)
def test_a_fork_by_hand(name: str, stem: float, ends: list[float]) -> None:
    two = trace(turns=[(10, 11, 2)] * 2)
    sessions = (session("a", 1.0, two), session("b", 0.0, two), session("c", 0.0, two))
    settings = algorithm(name, {"advantage.scale": "none"})
    a, b, c = make_samples(Group("task-1", sessions, forks={"b": Fork("a", 1)}), settings)
    assert (a.advantages[0], b.advantages[0]) == (pytest.approx(stem), pytest.approx(stem))
    assert [a.advantages[-1], b.advantages[-1]] == pytest.approx(ends)
    assert c.advantages[-1] == pytest.approx({"branch_grpo": -0.25}.get(name, -1 / 3))


def test_forks_of_a_session_that_is_not_there_still_share_its_turns() -> None:
    forks = {"a": Fork("gone", 1), "b": Fork("gone", 1)}
    assert shared_turns(["a", "b"], [2, 2], forks) == [[{0, 1}, {0}], [{0, 1}, {1}]]


def test_turns_are_numbered_over_all_traces_of_a_session() -> None:
    """The second trace's only turn came between the two of the first."""
    main = trace(turns=[(10, 2), (11, 2)], spans=())
    spans = [("c1-000001", 0, 2), ("c1-000003", 4, 6)]
    main = trace(turns=[(10, 2), (11, 2)], spans=tuple(type(trace().spans[0])(*one) for one in spans))
    side = trace(turns=[(12, 2)], spans=(type(trace().spans[0])("c1-000002", 0, 2),))
    sessions = (session("a", 1.0, main, side), session("b", 0.0, main, side), session("c", 0.0))
    found = Group("task-1", sessions, forks={"b": Fork("a", 2)})
    samples = make_samples(found, algorithm("tree_adv", {"advantage.scale": "none"}))
    firsts = [(float(one.advantages[0]), float(one.advantages[-1])) for one in samples[:4]]
    assert np.allclose(firsts, [(1 / 6, 2 / 3), (1 / 6, 1 / 6), (1 / 6, -1 / 3), (1 / 6, 1 / 6)])


def test_a_circle_of_forks_is_refused() -> None:
    with pytest.raises(ValueError, match="fork of itself"):
        shared_turns(["a", "b"], [2, 2], {"a": Fork("b", 1), "b": Fork("a", 1)})
