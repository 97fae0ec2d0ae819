"""Coalitions: their tasks, what a collector makes of their sessions, and the credit that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidGroup, OutOfTasks
from gangline.domain.task import AgentSpec, TaskRequest
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.groups import CoalitionRewards, Group, ValiditySettings
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.side_rollouts.coalition_runs import CoalitionRuns
from gangline.train.collecting.side_rollouts.coalitions import COALITION, CoalitionSettings, coalition_task
from gangline.train.collecting.side_rollouts.tasks import Beside
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.coalitions import asked_coalitions, group_shapley, player_factors
from gangline.train.learning.samples import make_samples
from gangline.train.run.trainer import Trainer
from gangline.train.runs.log import read_records
from gangline.train.runs.records import StepRecord
from support.training.fakes import Engines, Killed, Learner
from support.training.samples import session
from support.training.service import FakeService, tasks
from support.training.team import Team, turn_of

PAIR = CoalitionSettings(players=("worker", "idler"), samples=2)
WORKER, IDLER, BOTH = frozenset({"worker"}), frozenset({"idler"}), frozenset({"worker", "idler"})
TASK: dict[str, Any] = {"task_id": "t0", "instruction": "add", "num_samples": 8, "agent": {"env": {"A": "1"}}}


def of_worker(coalition: frozenset[str]) -> Sequence[float | None]:
    """Half of the sessions with the worker are solved, and none without it."""
    return (1.0, 0.0) if "worker" in coalition else (0.0,)


def collector(
    service: FakeService, settings: CoalitionSettings = PAIR, on_invalid: str = "refuse", **options: Any
) -> PlainCollector:
    validity = ValiditySettings.model_validate({"on_invalid": on_invalid})
    runs = CoalitionRuns(service, settings, lambda task_id: asked_coalitions(task_id, settings), validity=validity)
    numbered = ({**task, "num_samples": 2} for task in tasks())
    return PlainCollector(service, islice(numbered, 1), beside=Beside(coalitions=runs), **options)


def nothing(_: Group) -> None:
    """Admits no group."""


@pytest.mark.parametrize(
    "task", [TASK, TaskRequest.model_validate({**TASK, "agent": {**TASK["agent"], "harness": "x"}})]
)
def test_a_coalitions_task_is_the_task_with_its_players_named(task: dict[str, Any] | TaskRequest) -> None:
    body = coalition_task(task, WORKER, PAIR)
    assert (body["task_id"], body["num_samples"], body["instruction"]) == ("t0.coalition1", 2, "add")
    assert body["agent"]["env"] == {"A": "1", COALITION: "worker"}
    assert body["agent"]["allow_no_model_call"], "where only others call the model, it has a value too"
    assert coalition_task(task, BOTH, PAIR, run=2)["task_id"] == "t0.coalition3.run2"
    assert coalition_task(task, BOTH, PAIR)["agent"]["env"][COALITION] == "worker,idler"
    assert AgentSpec.model_validate({"harness": "x"} | body["agent"]).env["A"] == "1"
    assert TASK["agent"] == {"env": {"A": "1"}}, "the task itself stays as it is"


def test_random_orders_are_the_same_for_the_same_task_and_others_for_others() -> None:
    settings = CoalitionSettings(players=tuple("abcdef"), method="monte_carlo", permutations=3)
    asked = {name: asked_coalitions(name, settings) for name in ("run-000001", "run-000001.run2", "run-000002")}
    assert asked["run-000001"] == asked["run-000001.run2"] != asked["run-000002"]
    assert all(len(set(found)) == len(found) <= settings.most_coalitions == 20 for found in asked.values())
    assert len(asked_coalitions("t", CoalitionSettings(players=tuple("abc")))) == 6


async def test_a_group_comes_with_the_rewards_of_its_tasks_coalitions() -> None:
    service = Team(PAIR.players, of_worker)
    async with collector(service) as collecting:
        (group,) = await collecting.collect(1)
    assert service.submitted == ["t0", "t0.coalition1", "t0.coalition2"]
    assert service.cancelled == []
    assert [one.session_id for one in group.sessions] == ["t0.0", "t0.1"], "the others are never trained on"
    assert COALITION not in service.bodies["t0"].get("agent", {}).get("env", {})
    assert group.coalitions == CoalitionRewards({frozenset(): 0.0, BOTH: 0.5, WORKER: 0.5, IDLER: 0.0}, 4)
    assert group_shapley(group, PAIR) == {"worker": 0.5, "idler": 0.0}


async def test_the_reward_of_a_hook_is_that_of_coalitions_too() -> None:
    service = Team(PAIR.players, of_worker)
    runs = CoalitionRuns(
        service, PAIR, lambda task_id: asked_coalitions(task_id, PAIR), reward=lambda one: 10 * (one.reward or 0.0)
    )
    numbered = ({**task, "num_samples": 2} for task in tasks())
    async with PlainCollector(service, numbered, beside=Beside(coalitions=runs)) as collecting:
        (group,) = await collecting.collect(1)
    assert group_shapley(group, PAIR) == {"worker": 5.0, "idler": 0.0}


async def test_coalitions_of_a_group_that_is_not_wanted_are_cancelled() -> None:
    service = Team(PAIR.players, of_worker, holds_coalitions=True)
    async with collector(service, admit=nothing) as collecting:
        with pytest.raises(OutOfTasks):
            await collecting.collect(1)
        assert sorted(service.cancelled) == ["t0.coalition1", "t0.coalition2"]


async def test_an_agent_that_ignores_its_coalition_ends_the_run_with_the_players_names() -> None:
    service = Team(PAIR.players, of_worker, players=lambda _: PAIR.players)
    async with collector(service, on_invalid="resubmit") as collecting:
        with pytest.raises(InvalidGroup, match=r"t0.coalition1.*t0.coalition1.0: idler.*GANGLINE_COALITION.*'worker'"):
            await collecting.collect(1)
    assert service.cancelled == ["t0.coalition2"]


async def test_a_player_without_a_call_anywhere_is_named() -> None:
    settings = CoalitionSettings(players=("worker", "idle"), samples=1)
    service = Team(settings.players, of_worker, players=lambda coalition: sorted(coalition - {"idle"}))
    async with collector(service, settings) as collecting:
        with pytest.raises(InvalidGroup, match=r"names idle, .*roles of calls so far: worker"):
            await collecting.collect(1)


@pytest.mark.parametrize(("on_invalid", "submitted", "worker"), [("resubmit", 4, 0.5), ("shrink", 3, 0.75)])
async def test_sessions_without_a_reward_are_treated_as_those_of_groups(
    on_invalid: str, submitted: int, worker: float
) -> None:
    service = Team(PAIR.players, of_worker)
    service.rewards["t0.coalition1"] = (1.0, None)
    async with collector(service, on_invalid=on_invalid) as collecting:
        (group,) = await collecting.collect(1)
    assert len(service.submitted) == submitted
    assert ("t0.coalition1.run2" in service.submitted) == (on_invalid == "resubmit")
    assert group_shapley(group, PAIR)["worker"] == worker


async def test_a_coalition_that_never_comes_back_whole_is_refused_or_its_group_dropped() -> None:
    def broken(coalition: frozenset[str]) -> Sequence[float | None]:
        return (1.0, 0.0) if coalition == BOTH else (None,)

    async with collector(Team(PAIR.players, broken)) as collecting:
        with pytest.raises(InvalidGroup, match=r"0 of 2 sessions of t0.coalition1, with the players worker"):
            await collecting.collect(1)
    service = Team(PAIR.players, broken)
    async with collector(service, on_invalid="resubmit") as collecting:
        with pytest.raises(OutOfTasks):
            await collecting.collect(1)
        assert collecting.counts.invalid == 1
    assert service.submitted[1:] == [f"t0.coalition{end}" for end in ("1", "2", "1.run2", "1.run3")]
    assert service.cancelled == ["t0.coalition2"]


async def test_a_collector_that_is_left_cancels_coalitions_too() -> None:
    service = Team(PAIR.players, of_worker, holds_coalitions=True)
    async with collector(service) as collecting:
        work = asyncio.create_task(collecting.collect(1))
        await service.until_submitted(3)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert sorted(service.cancelled) == ["t0.coalition1", "t0.coalition2"], "t0 has ended"


@pytest.mark.parametrize(("weight", "factors"), [(1.0, (2.0, 0.0)), (0.5, (1.5, 0.5)), (0.0, (1.0, 1.0))])
def test_a_turn_has_its_sessions_advantage_by_its_players_share(weight: float, factors: tuple[float, float]) -> None:
    settings = PAIR.model_copy(update={"weight": weight})
    turns = (turn_of("worker"), turn_of("idler"), turn_of("narrator"))
    sessions = tuple(session(f"s{index}", reward, *turns) for index, reward in enumerate((1.0, 0.0)))
    measured = CoalitionRewards({frozenset(): 0.0, WORKER: 0.5, IDLER: 0.0, BOTH: 0.5}, 4)
    group = Group("t0", sessions, measured)
    samples = make_samples(group, algorithm("grpo"), factors=player_factors(group, settings))
    found = [sample.advantages.tolist() for sample in samples]
    expected = [[side * factor] * 3 for side in (1.0, -1.0) for factor in (*factors, 1.0)]
    assert found == [pytest.approx(one, abs=1e-5) for one in expected]


def test_a_group_without_its_coalitions_is_an_error() -> None:
    with pytest.raises(ValueError, match="t0 was collected without"):
        player_factors(Group("t0", ()), PAIR)


def trainer(folder: Path, engines: Engines, service: Team, learner: Learner, **options: Any) -> Trainer:
    return Trainer(
        folder,
        schedule=ScheduleSettings.model_validate({"steps": 3, "groups_per_step": 2, **options}),
        algorithm=algorithm("grpo"),
        learner=learner,
        service=service,
        stream=TaskStream("run", [{"instruction": "add"}], num_samples=2),
        weights=engines,
        coalitions=PAIR,
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_killed_trainer_finds_the_coalitions_of_its_tasks_again(tmp_path: Path, mode: str) -> None:
    engines, told = Engines(), list[StepRecord]()
    service = Team(PAIR.players, of_worker, version=lambda: engines.version or 0)
    with pytest.raises(Killed):
        await trainer(tmp_path, engines, service, Learner(4, "save_weights"), mode=mode).run()
    before = set(service.submitted)
    learner = Learner()
    await trainer(tmp_path, engines, service, learner, mode=mode).run()
    assert set(learner.seen.values()) == {1}
    assert len(learner.seen) == 6
    assert not any("coalition" in task_id for task_id in learner.seen)
    assert {task_id.partition(".")[0] for task_id in service.submitted} >= learner.seen.keys()
    assert any(service.submitted.count(task_id) == 2 for task_id in before if "coalition" in task_id)
    told = read_records(tmp_path / "metrics.jsonl")
    assert [one.shapley for one in told] == [{"worker": 0.5, "idler": 0.0}] * 3
    assert [(one.num_sessions, one.num_coalition_sessions) for one in told] == [(4, 8)] * 3
    assert told[0].scalars()["shapley/worker"] == 0.5
    of_tasks = zip(learner.advantages[::2], learner.advantages[1::2], strict=True)
    assert all(abs(worker) > 1.9 or worker == idler == 0 for idler, worker in of_tasks)
