"""The trainer's loop, with a service in memory and a learner that only counts what it is given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gangline.domain.errors import EngineUnavailable, InvalidGroup
from gangline.domain.session import SessionResult
from gangline.domain.task import CaptureSpec
from gangline.domain.trajectory import Trace
from gangline.domain.views import Submitted
from gangline.train.collecting.admission import StalenessSettings
from gangline.train.collecting.groups import Group
from gangline.train.collecting.sampling.history import SamplingHistory
from gangline.train.collecting.sampling.sampler import DifficultyPools, TaskSampler
from gangline.train.collecting.sampling.settings import DifficultyPoolSettings
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.selection import Selection
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.mask_settings import FullMask, GroupMasks, ProgressiveMask, TurnSelectiveMask
from gangline.train.learning.samples import Sample
from gangline.train.run.checkpoint import Checkpoints, checkpoint_digest
from gangline.train.run.controls import controlled_mask, shuffled_rewards
from gangline.train.run.lineage import weights_digest
from gangline.train.run.trainer import Trainer
from gangline.train.runs.log import GrowingRecords, read_records
from gangline.train.runs.records import CheckpointRecord, StepRecord, UpdateProfile
from support.training.fakes import PROFILE, Engines, Killed, Learner, Service, step_record
from support.training.recorded_runs import write_model
from support.training.samples import group, scored, session
from support.training.service import DULL, GOOD

TASKS: list[dict[str, Any]] = [{"instruction": "add"}, {"instruction": "subtract"}]


def trainer(folder: Path, engines: Engines, service: Service, learner: Learner, **changes: Any) -> Trainer:
    options = {key: changes.pop(key) for key in ("selection", "masks", "on_step") if key in changes}
    name, overrides = changes.pop("algorithm", "grpo"), changes.pop("overrides", {})
    sampler = changes.pop("sampler", None)
    return Trainer(
        folder,
        schedule=ScheduleSettings.model_validate({"steps": 3, "groups_per_step": 2, **changes}),
        algorithm=algorithm(name, overrides),
        learner=learner,
        service=service,
        stream=TaskStream("run", TASKS, num_samples=2, shuffle=False, sampler=sampler),
        weights=engines,
        **options,
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_it_trains_pushes_and_writes_every_step(tmp_path: Path, mode: str) -> None:
    engines, learner, told = Engines(), Learner(), list[StepRecord]()
    service = Service(engines)
    assert await trainer(tmp_path, engines, service, learner, mode=mode, on_step=told.append).run() == 4
    assert [version for version, _ in engines.pushed] == [1, 2, 3, 4]
    assert len(learner.seen) == 6
    assert set(learner.seen.values()) == {1}
    assert read_records(tmp_path / "metrics.jsonl") == told
    assert [record.step for record in told] == [1, 2, 3]
    assert [record.version for record in told] == [1, 2, 3]
    assert all(record.reward_mean == 0.5 and record.num_sessions == 4 for record in told)
    assert all(record.update == PROFILE and record.learner == {"loss": 0.0} for record in told)
    assert [len(record.groups) for record in told] == [2, 2, 2]
    assert {task_id for record in told for task_id in record.groups} == set(learner.seen)


async def test_each_checkpoint_is_on_record_with_the_digest_of_the_weights_that_were_pushed(tmp_path: Path) -> None:
    class Writing(Engines):
        async def push(self, save: Callable[[Path], None], version: int) -> UpdateProfile:
            await super().push(save, version)
            folder = write_model(tmp_path / f"v{version}", f"weights {version}".encode())
            return msgspec.structs.replace(PROFILE, folder=str(folder))

    engines, run = Writing(), tmp_path / "run"
    await trainer(run, engines, Service(engines), Learner(), mode="sync").run()
    made = GrowingRecords(run / "checkpoints.jsonl", CheckpointRecord).read()
    assert [(one.step, one.version) for one in made] == [(1, 2), (2, 3), (3, 4)]
    assert [one.weights_digest for one in made] == [weights_digest(tmp_path / f"v{version}") for version in (2, 3, 4)]
    found = Checkpoints(run / "checkpoints").latest()
    assert found is not None
    assert made[-1].digest == checkpoint_digest(found[0])
    assert len({one.digest for one in made}) == 3
    assert all("folder" not in name for name in step_record().scalars())


async def test_sync_trains_on_nothing_but_the_newest_policy(tmp_path: Path) -> None:
    engines, told = Engines(), list[StepRecord]()
    await trainer(tmp_path, engines, Service(engines), Learner(), mode="sync", on_step=told.append).run()
    assert [set(record.lag) for record in told] == [{0}, {0}, {0}]


async def test_async_collects_ahead_and_drops_what_grew_too_old(tmp_path: Path) -> None:
    engines, told = Engines(), list[StepRecord]()
    service = Service(engines)
    options: dict[str, Any] = {"mode": "async", "steps": 6, "groups_in_flight": 8, "on_step": told.append}
    await trainer(tmp_path, engines, service, Learner(), **options, staleness=StalenessSettings(max_lag=1)).run()
    lags = {lag for record in told for lag in record.lag}
    assert lags == {0, 1}
    assert sum(record.num_stale for record in told) > 0


async def test_dynamic_sampling_leaves_out_groups_of_one_reward_and_says_how_many(tmp_path: Path) -> None:
    engines, told = Engines(), list[StepRecord]()
    service = Service(engines, lambda number: DULL if number % 2 else GOOD)
    learner = Learner()
    await trainer(tmp_path, engines, service, learner, mode="sync", algorithm="dapo", on_step=told.append).run()
    assert all(int(task_id.rpartition("-")[2]) % 2 == 0 for task_id in learner.seen)
    assert sum(record.num_not_admitted for record in told) >= 4
    assert all(record.reward_mean == 0.5 < (record.collected_reward_mean or 0) for record in told)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_step_without_a_signal_pushes_no_weights_and_keeps_the_version(tmp_path: Path, mode: str) -> None:
    """Its first four groups have one reward: two steps. The learner's moments alone would move the weights."""
    engines, learner, told = Engines(), Learner(), list[StepRecord]()
    service = Service(engines, lambda number: DULL if number < 4 else GOOD)
    options: dict[str, Any] = {"mode": mode, "groups_in_flight": 1, "on_step": told.append}
    assert await trainer(tmp_path, engines, service, learner, **options).run() == 2
    assert [version for version, _ in engines.pushed] == [1, 2]
    assert [(one.version, one.num_one_reward, one.update) for one in told] == [
        (1, 2, None),
        (1, 2, None),
        (1, 0, PROFILE),
    ]
    assert [one.num_trained_tokens for one in told] == [0, 0, 12]
    assert sum(learner.seen.values()) == 2
    assert read_records(tmp_path / "metrics.jsonl") == told


async def test_a_critic_learns_from_groups_of_one_reward_too(tmp_path: Path) -> None:
    engines, learner, told = Engines(), Learner(), list[StepRecord]()
    service = Service(engines, lambda _: DULL)
    assert await trainer(tmp_path, engines, service, learner, algorithm="ppo", on_step=told.append).run() == 4
    assert [(one.num_one_reward, one.update) for one in told] == [(0, PROFILE)] * 3
    assert all(one.num_trained_tokens for one in told)


@pytest.mark.parametrize(("name", "overrides"), [("ppo", {}), ("grpo", {"loss.kl.coefficient": 0.1})])
async def test_a_step_without_a_trained_token_moves_nothing(
    tmp_path: Path, name: str, overrides: dict[str, Any]
) -> None:
    """As of the control `frozen`, also where every token would have a gradient."""
    engines, learner, told = Engines(), Learner(), list[StepRecord]()
    masks = GroupMasks(FullMask(), own=lambda one: np.zeros(len(one.response_ids), np.float32))
    options: dict[str, Any] = {"algorithm": name, "overrides": overrides, "masks": masks, "on_step": told.append}
    assert await trainer(tmp_path, engines, Service(engines), learner, **options).run() == 1
    assert [one.update for one in told] == [None] * 3
    assert not learner.seen


async def test_a_frozen_run_pushes_nothing_and_blames_no_group(tmp_path: Path) -> None:
    engines, learner, told = Engines(), Learner(), list[StepRecord]()
    masks = GroupMasks(FullMask(), control=partial(controlled_mask, "frozen", 0))
    made = trainer(tmp_path, engines, Service(engines), learner, mode="sync", masks=masks, on_step=told.append)
    assert await made.run() == 1
    assert [version for version, _ in engines.pushed] == [1]
    assert [(one.num_one_reward, one.num_trained_tokens, one.update) for one in told] == [(0, 0, None)] * 3
    assert not learner.seen


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kill_at", range(1, 12, 2))
@pytest.mark.parametrize("kill_in", ["step", "save_weights", "save_state"])
async def test_a_killed_trainer_goes_on_and_trains_on_no_group_twice(
    tmp_path: Path, mode: str, every: int, kill_at: int, kill_in: str
) -> None:
    engines = Engines()
    service = Service(engines, lambda number: DULL if number % 3 == 1 else GOOD)
    options: dict[str, Any] = {"mode": mode, "steps": 6, "checkpoint_every": every, "algorithm": "dapo"}
    with pytest.raises(Killed):
        await trainer(tmp_path, engines, service, Learner(kill_at, kill_in), **options).run()
    versions_before = [version for version, _ in engines.pushed]
    learner = Learner()
    last = await trainer(tmp_path, engines, service, learner, **options).run()
    assert set(learner.seen.values()) == {1}, "the weights that came out have seen each group once"
    assert len(learner.seen) == 12
    versions = [version for version, _ in engines.pushed]
    assert versions == sorted(versions), "versions never go back"
    assert last >= versions_before[-1]
    assert [record.step for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


class Remembers(Service):
    """Which instruction each task id was submitted with, over all lives of the trainer."""

    def __init__(self, engines: Engines, rewards: Callable[[int], tuple[float | None, ...]]) -> None:
        super().__init__(engines, rewards)
        self.asked: dict[str, set[str]] = {}

    async def submit(self, task: Any) -> Submitted:
        self.asked.setdefault(task["task_id"].partition(".run")[0], set()).add(task["instruction"])
        return await super().submit(task)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kill_at", [1, 4, 9])
@pytest.mark.parametrize("kill_in", ["step", "save_weights", "save_state"])
async def test_a_killed_trainer_draws_the_same_tasks_again(
    tmp_path: Path, mode: str, kill_at: int, kill_in: str
) -> None:
    """Task 0 is solved always, task 1 sometimes: which comes next depends on what was measured."""
    settings = DifficultyPoolSettings(kind="difficulty_pool")

    def sampler() -> TaskSampler:
        return TaskSampler(DifficultyPools(settings, 2, seed=3), SamplingHistory(tmp_path / "sampled.jsonl"), 2)

    engines, told = Engines(), list[StepRecord]()
    service = Remembers(engines, lambda number: DULL if number % 3 == 1 else GOOD)
    options: dict[str, Any] = {"mode": mode, "steps": 5, "algorithm": "dapo", "on_step": told.append}
    with pytest.raises(Killed):
        await trainer(tmp_path, engines, service, Learner(kill_at, kill_in), sampler=sampler(), **options).run()
    told.clear()
    learner = Learner()
    await trainer(tmp_path, engines, service, learner, sampler=sampler(), **options).run()
    assert set(learner.seen.values()) == {1}
    assert all(len(instructions) == 1 for instructions in service.asked.values()), "a number is the same task for ever"
    assert set(map(_number, service.asked)) == set(range(len(service.asked))), "none was left out"
    assert told[-1].sampler is not None
    assert all(one.sampler is not None and sum(one.sampler.drawn.values()) == one.num_groups for one in told)
    assert read_records(tmp_path / "metrics.jsonl")[-len(told) :] == told
    assert told[-1].scalars()["sampler/num_never_drawn"] == 0
    assert sum(told[-1].sampler.sizes.values()) == 2


def _number(task_id: str) -> int:
    return int(task_id.rpartition("-")[2])


async def test_a_run_that_is_done_does_nothing_more(tmp_path: Path) -> None:
    engines = Engines()
    service = Service(engines)
    await trainer(tmp_path, engines, service, Learner()).run()
    num_submitted, pushed = len(service.submitted), list(engines.pushed)
    assert await trainer(tmp_path, engines, service, Learner()).run() == 4
    assert (len(service.submitted), engines.pushed) == (num_submitted, pushed)


async def test_engines_that_served_another_run_get_the_first_weights_under_a_new_version(tmp_path: Path) -> None:
    engines = Engines(version=7)
    assert await trainer(tmp_path, engines, Service(engines), Learner(), steps=1).run() == 9
    assert [version for version, _ in engines.pushed] == [8, 9]


async def test_an_engine_that_is_down_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.train.weights.upkeep._AGAIN_S", 0.0)
    engines = Engines()
    engines.num_down = 3
    await trainer(tmp_path, engines, Service(engines), Learner(), steps=1).run()
    assert [version for version, _ in engines.pushed] == [1, 2]


async def test_an_engine_that_stays_down_ends_the_run_and_a_later_one_goes_on(tmp_path: Path) -> None:
    engines = Engines()
    service, learner = Service(engines), Learner()

    def break_down(_: StepRecord) -> None:
        engines.num_down = 1

    with pytest.raises(EngineUnavailable):
        await trainer(tmp_path, engines, service, learner, patience_s=0, on_step=break_down).run()
    engines.num_down, again = 0, Learner()
    await trainer(tmp_path, engines, service, again).run()
    assert set(again.seen.values()) == {1}
    assert len(again.seen) == 6


async def test_an_engine_that_was_restarted_gets_its_weights_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.train.weights.upkeep._LOOK_S", 0.0)
    engines = Engines()
    service = Service(engines)
    service.rewards.clear()
    held = _held(service)
    running = asyncio.create_task(trainer(tmp_path, engines, service, Learner(), steps=1).run())
    await service.until_submitted(2)
    engines.lost.set()
    await asyncio.wait_for(engines.mended.wait(), 30)
    held.set()
    assert await running == 2


def _held(service: Service) -> asyncio.Event:
    """Results come when it is set."""
    event, wait = asyncio.Event(), service.wait

    async def held_wait(task_id: str) -> Any:
        await event.wait()
        return await wait(task_id)

    service.wait = held_wait  # type: ignore[method-assign]
    return event


@pytest.mark.parametrize(("coefficient", "expected"), [(0.0, 0.5), (0.1, 0.25)])
async def test_penalties_of_the_learner_count_before_sessions_are_compared(
    tmp_path: Path, coefficient: float, expected: float
) -> None:
    """The learner takes a half from the first session of each group, whose rewards are 1 and 0."""
    engines, learner = Engines(), Learner()
    options = {"algorithm": "dr_grpo", "overrides": {"reward_kl.coefficient": coefficient}}
    await trainer(tmp_path, engines, Service(engines), learner, mode="sync", **options).run()
    assert sorted(map(abs, learner.advantages)) == pytest.approx([expected] * 12)


async def test_what_the_service_breaks_by_reaches_the_caller(tmp_path: Path) -> None:
    engines = Engines()
    service = Service(engines)

    async def refuse(_task_id: str) -> Any:
        raise RuntimeError("no result")

    service.result = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no result"):
        await trainer(tmp_path, engines, service, Learner(), mode="async").run()


class Slow(Learner):
    """Its step lasts until it is abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.abandoned = threading.Event(), threading.Event()

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.begun.set()
        assert self.abandoned.wait(60)
        raise RuntimeError("abandoned")

    def abandon(self) -> None:
        self.abandoned.set()


async def test_a_cancelled_run_abandons_the_step_that_it_is_in(tmp_path: Path) -> None:
    engines, learner = Engines(), Slow()
    running = asyncio.create_task(trainer(tmp_path, engines, Service(engines), learner).run())
    await asyncio.to_thread(learner.begun.wait, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert learner.abandoned.is_set()


def test_shuffled_rewards_are_the_same_rewards_in_an_order_of_their_own() -> None:
    one = group(1.0, 0.0, 0.0, 0.5)
    shuffled = [shuffled_rewards(seed, "run")(one) for seed in range(8)]
    assert all(sorted(found.rewards) == sorted(one.rewards) for found in shuffled)
    assert len({found.rewards for found in shuffled}) > 1
    assert shuffled_rewards(3, "run")(one).rewards == shuffled[3].rewards
    assert [found.session_id for found in shuffled[0].sessions] == [found.session_id for found in one.sessions]


def test_shuffled_rewards_do_not_depend_on_the_runs_name() -> None:
    def orders(run: str) -> list[tuple[float, ...]]:
        prepare, sessions = shuffled_rewards(1, run), group(1.0, 0.0, 0.25, 0.5).sessions
        return [prepare(Group(f"{run}-{number:06d}", sessions)).rewards for number in range(8)]

    assert orders("demo-1f2e") == orders("demo-99aa")
    assert len(set(orders("demo-1f2e"))) > 1


def test_a_stream_gives_the_same_task_the_same_id_whatever_is_left_out() -> None:
    def first(number: int, **options: Any) -> list[dict[str, Any]]:
        stream = TaskStream("run", [{"n": index} for index in range(5)], num_samples=4, seed=1)
        return [task for task, _ in zip(stream.tasks(**options), range(number), strict=False)]

    whole = first(20)
    assert [task["task_id"] for task in whole] == [f"run-{number:06d}" for number in range(20)]
    assert all(task["num_samples"] == 4 for task in whole)
    orders = [[task["n"] for task in whole[start : start + 5]] for start in range(0, 20, 5)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert first(17, settled={"run-000000", "run-000003", "run-000004"}) == [whole[1], whole[2], *whole[5:]]


def test_a_seeded_stream_gives_each_task_a_seed_of_its_own_whatever_the_run_is_called() -> None:
    tasks: list[dict[str, Any]] = [{"capture": {"tier": "observe"}}, {}]

    def captures(run: str, **options: Any) -> list[dict[str, Any] | None]:
        stream = TaskStream(run, tasks, num_samples=4, shuffle=False, **options)
        return [task.get("capture") for task, _ in zip(stream.tasks(), range(6), strict=False)]

    seeded = captures("one", seed=3, seeded=True)
    assert captures("two", seed=3, seeded=True) == seeded
    assert [capture and capture.get("tier") for capture in seeded] == ["observe", None] * 3
    others = captures("one", seed=4, seeded=True)
    assert len({CaptureSpec.model_validate(capture).seed for capture in (*seeded, *others)} - {None}) == 12
    assert captures("one", seed=3) == [{"tier": "observe"}, None] * 3
    digests = {TaskStream("one", tasks, num_samples=4, seeded=seeded).digest for seeded in (True, False)}
    assert len(digests) == 2, "a run that samples otherwise is another experiment"


def test_a_record_is_read_as_it_was_written_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    record = step_record()
    line = msgspec.json.encode(record)
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n" + line[:20])
    assert read_records(tmp_path / "metrics.jsonl") == [record]
    assert record.scalars()["rollout/lag_mean"] == 0.25
    assert record.scalars()["update/total_s"] == 0.5
    assert record.scalars()["rollout/trained_tokens_per_session"] == 2.0


async def test_what_the_selection_leaves_out_is_counted_and_other_groups_come_instead(tmp_path: Path) -> None:
    """Both sessions of every second group are too long."""
    engines, told, learner = Engines(), list[StepRecord](), Learner()
    service = Service(engines)

    def too_long(one: SessionResult) -> str | None:
        return "long: 9 ids" if int(one.session_id.partition(".")[0].rpartition("-")[2]) % 2 else None

    selection = Selection(filter=too_long)
    await trainer(tmp_path, engines, service, learner, mode="sync", selection=selection, on_step=told.append).run()
    assert all(int(task_id.rpartition("-")[2]) % 2 == 0 for task_id in learner.seen)
    assert sum(record.degenerate["long"] for record in told) == 2 * sum(record.num_not_admitted for record in told) > 0
    assert told[0].scalars()["rollout/num_degenerate"] == told[0].degenerate["long"]


async def test_a_progressive_mask_follows_the_steps_and_the_epochs(tmp_path: Path) -> None:
    """Two tasks, one group a step: an epoch has two steps. Traces of three turns; one, two, all are trained on."""
    for unit, until, wanted in (("steps", 3, [3, 6, 9, 9, 9]), ("epochs", 3, [3, 3, 6, 6, 9])):
        engines, told = Engines(), list[StepRecord]()
        service = Service(engines, turns=((10, 11, 2),) * 3)
        masks = GroupMasks(ProgressiveMask(kind="progressive", max_turns=3, unit=unit, until=until))  # type: ignore[arg-type]
        options: dict[str, Any] = {"mode": "sync", "steps": 5, "groups_per_step": 1, "on_step": told.append}
        await trainer(tmp_path / unit, engines, service, Learner(), masks=masks, **options).run()
        assert [record.num_trained_tokens for record in told] == [2 * num for num in wanted], unit


@pytest.mark.parametrize(
    "options",
    [
        {"masks": GroupMasks(TurnSelectiveMask(kind="turn_selective", threshold=0.5))},
        {"overrides": {"turn_credit.weight": 1.0}},
    ],
    ids=["mask", "credit"],
)
async def test_scores_of_turns_that_no_evaluator_gives_end_the_run_with_the_remedy(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    engines = Engines()
    with pytest.raises(InvalidGroup, match="per_turn or script"):
        await trainer(tmp_path, engines, Service(engines), Learner(), **options).run()


def test_shuffled_rewards_deal_out_the_scores_of_turns_too() -> None:
    scores = [0.1, 0.2, 0.3, None, 0.5, 0.6]
    sessions = tuple(
        session(f"s{index}", 1.0, scored(*scores[2 * index : 2 * index + 2])) for index in range(len(scores) // 2)
    )
    found = [shuffled_rewards(seed, "run")(Group("task-1", sessions)) for seed in range(8)]
    orders = [[span.score for one in it.sessions for span in _only_trace(one).spans] for it in found]
    assert all(sorted(score or 0 for score in order) == sorted(score or 0 for score in scores) for order in orders)
    assert all(order[3] is None for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def _only_trace(one: SessionResult) -> Trace:
    assert one.trajectory is not None
    return one.trajectory.traces[0]
