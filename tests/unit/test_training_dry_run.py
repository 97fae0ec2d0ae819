"""A dry run: what it finds in groups of every kind, and that it leaves no task behind."""

from __future__ import annotations

import asyncio

import pytest

from gangline.train.collecting.degenerates import DegenerateSettings
from gangline.train.collecting.selection import Selection
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.run.dry_run import DryRun, GroupSpread, SpreadReport
from support.training.service import FakeService


def dry_run(service: FakeService, num_groups: int, seen: list[GroupSpread] | None = None, **more: object) -> DryRun:
    stream = TaskStream("dry", [{"instruction": "count"}], num_samples=2)
    return DryRun(
        service,
        stream,
        num_groups=num_groups,
        num_samples=2,
        num_in_flight=2,
        on_group=(seen if seen is not None else []).append,
        retry_s=0,
        **more,  # type: ignore[arg-type]
    )


def served(*groups: tuple[float | None, ...]) -> FakeService:
    return FakeService(**{f"dry-{number:06d}": rewards for number, rewards in enumerate(groups)})


async def test_the_spread_within_groups_and_between_them() -> None:
    seen: list[GroupSpread] = []
    service = served((1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0))
    report = await dry_run(service, 4, seen).measure()
    assert [group.rewards for group in report.groups] == [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    assert sorted(seen, key=lambda one: one.task_id) == list(report.groups)
    assert (report.share_informative, report.num_all_best, report.num_all_worst) == (0.25, 1, 2)
    assert (report.reward_mean, report.deviation_within) == (0.375, 0.125)
    assert report.deviation_between == pytest.approx(0.4145, abs=1e-4)
    assert report.num_valid == 8
    (advice,) = report.advice()
    assert advice.startswith("75% of the groups have one reward")
    assert "2 all the worst, 1 all the best, of 4" in advice
    assert "about 4.0 groups for each" in advice


async def test_sessions_without_a_reward_are_counted_and_are_not_0() -> None:
    report = await dry_run(served((1.0, None), (0.5, 0.25)), 2).measure()
    assert report.num_valid == 3
    assert list(report.invalid.values()) == [1]
    assert report.reward_mean == pytest.approx(1.75 / 3)
    assert any("1 of 4 sessions could not be trained on" in line for line in report.advice())


async def test_nothing_to_learn_is_said() -> None:
    report = await dry_run(served((0.0, 0.0), (0.0, 0.0)), 2).measure()
    assert report.share_informative == 0
    assert any("there is nothing to learn" in line for line in report.advice())


async def test_groups_of_one_reward_are_of_use_without_comparisons() -> None:
    spread = await dry_run(served((0.0, 0.0), (1.0, 1.0)), 2, compares=False).measure()
    assert spread.share_informative == 0
    assert spread.advice() == []
    equal = await dry_run(served((0.5, 0.5), (0.5, 0.5)), 2, compares=False).measure()
    (advice,) = equal.advice()
    assert advice.startswith("all sessions have the same reward")


async def test_nothing_valid_is_said() -> None:
    report = await dry_run(served((None, None)), 1).measure()
    assert (report.reward_mean, report.tokens_per_session, report.num_all_best) == (None, None, 0)
    assert report.advice() == ["no session could be trained on: mend what the reasons above say first."]


async def test_the_experiments_filters_count() -> None:
    selection = Selection(filter=lambda one: "too easy" if one.reward == 1.0 else None)
    report = await dry_run(served((1.0, 1.0), (0.5, 0.0)), 2, selection=selection).measure()
    assert report.degenerate == {"too easy": 2}
    assert [group.rewards for group in report.groups] == [(), (0.5, 0.0)]
    equal = Selection(degenerates=DegenerateSettings(identical_rewards=True))
    report = await dry_run(served((1.0, 1.0)), 1, selection=equal).measure()
    assert [group.is_informative for group in report.groups] == [False]


async def test_unfinished_tasks_are_cancelled_at_the_service() -> None:
    service = FakeService()
    running = asyncio.create_task(dry_run(service, 3).measure())
    await service.until_submitted(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(service.cancelled) == ["dry-000000", "dry-000001"]
    assert len(service.submitted) == 2, "two at a time"


async def test_a_server_that_is_away_for_a_while_costs_nothing() -> None:
    service = served((1.0, 0.0))
    service.num_unavailable = 3
    report: SpreadReport = await dry_run(service, 1).measure()
    assert report.share_informative == 1.0
    assert report.advice() == []
