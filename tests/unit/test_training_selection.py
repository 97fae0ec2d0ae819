"""The part of a group that an experiment trains on."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.train.collecting.degenerates import DegenerateSettings
from gangline.train.collecting.groups import Group
from gangline.train.collecting.selection import Selection
from gangline.train.run.controls import shuffled_rewards
from support.training.samples import group, session, trace

LONG = trace(turns=[(10,) * 9])


def test_the_default_keeps_the_group_as_it_is() -> None:
    one, left_out = group(1.0, 1.0), Counter[str]()
    assert Selection().select(one, left_out) is one
    assert Selection().select(Group("task-1", one.sessions[:1]), left_out) is not None
    assert not left_out


def test_degenerates_go_and_the_rest_stays_where_two_can_be_compared() -> None:
    selection = Selection(degenerates=DegenerateSettings(max_tokens=8))
    left_out = Counter[str]()
    rest = (session("s0", 1.0), session("s1", 0.0))
    found = selection.select(Group("task-1", (*rest, session("s2", 0.0, LONG))), left_out)
    assert found == Group("task-1", rest)
    assert selection.select(Group("task-2", (rest[0], session("s1", 0.0, LONG))), left_out) is None
    assert left_out == {"too long": 2}


def test_groups_of_one_reward_go_if_asked() -> None:
    assert Selection(degenerates=DegenerateSettings()).select(group(1.0, 1.0), Counter()) is not None
    selection = Selection(degenerates=DegenerateSettings(identical_rewards=True))
    assert selection.select(group(1.0, 1.0), Counter()) is None
    assert selection.select(group(1.0, 0.0), Counter()) is not None


def test_loops_stay_if_asked() -> None:
    turns, calls = [(10, 2)] * 25, ["ls"] * 25
    found = Group("task-1", (*group(1.0, 0.5).sessions, session("s2", 0.0, trace(turns=turns, calls=calls))))
    left_out = Counter[str]()
    assert Selection(degenerates=DegenerateSettings(loop_turns=None)).select(found, left_out) == found
    Selection(degenerates=DegenerateSettings()).select(found, left_out)
    assert left_out == {"a loop": 1}


def test_its_parts_take_their_turns() -> None:
    """The own reward comes first, the control after the filter: what is left out does not depend on the shuffling."""

    def by_number(one: SessionResult) -> float:
        return float(one.session_id.removeprefix("s"))

    def worst(one: SessionResult) -> str | None:
        return "worst: by the own reward" if one.reward == 0.0 else None

    def doubled(found: Group) -> Group:
        sessions = (msgspec.structs.replace(one, reward=2 * (one.reward or 0.0)) for one in found.sessions)
        return Group(found.task_id, tuple(sessions))

    selection = Selection(reward=by_number, prepare=doubled, filter=worst, control=shuffled_rewards(3, "run"))
    left_out = Counter[str]()
    found = selection.select(group(0.3, 0.3, 0.3, 0.3), left_out)
    assert found is not None
    assert [one.session_id for one in found.sessions] == ["s1", "s2", "s3"]
    assert sorted(found.rewards) == [2.0, 4.0, 6.0]
    assert left_out == {"worst": 1}
    refusing = Selection(admit=lambda it: it if it.deviation > 1 else None)
    assert refusing.select(group(1.0, 0.0), Counter()) is None


def test_a_reward_that_is_no_number_names_its_session() -> None:
    selection = Selection(reward=lambda one: float("nan") if one.session_id == "s1" else 1.0)
    with pytest.raises(InvalidGroup, match=r"reward of s1 in task-1 is not finite"):
        selection.select(group(1.0, 0.0), Counter())
