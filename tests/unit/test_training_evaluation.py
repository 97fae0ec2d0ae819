"""Evaluation: what counts, what it comes to, and that a run measures the right weights wherever it is killed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import Failure, InvalidGroup, InvalidRequest, ServerUnavailable
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import Submitted, TaskView
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.selection import Selection
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.samples import Sample
from gangline.train.run.controls import shuffled_rewards
from gangline.train.run.evaluation import Evaluation, require_disjoint
from gangline.train.run.trainer import Trainer
from gangline.train.runs.log import RunLog, read_evaluations, read_records
from gangline.train.runs.records import EvaluationRecord, PairedDifference, paired_difference
from support.training.fakes import Engines, Killed, Learner, Service
from support.training.samples import session, trace
from support.training.service import FakeService

HELD_OUT: list[dict[str, Any]] = [{"instruction": "multiply"}, {"instruction": "divide"}, {"instruction": "count"}]


def ids(step: int = 0, version: int = 0, num: int = 3) -> list[str]:
    return [f"run-evaluation-{step:06d}-v{version:06d}-{index:04d}" for index in range(num)]


def evaluation(service: FakeService, num_tasks: int = 3, **options: Any) -> Evaluation:
    return Evaluation("run", HELD_OUT[:num_tasks], service, num_samples=2, retry_s=0, **options)


async def test_tasks_are_the_independent_draws_and_a_missing_reward_is_no_zero() -> None:
    service = FakeService(**dict(zip(ids(), [(1.0, 0.0), (1.0, 1.0), (0.0, None)], strict=True)))
    found = await evaluation(service).measure(0, 0, wall_s=100.0)
    assert service.submitted == ids()
    assert (found.step, found.version) == (0, 0)
    assert found.reward_mean == pytest.approx(0.5)  # of 0.5, 1 and 0
    assert found.standard_error == pytest.approx(0.5 / 3**0.5)
    assert (found.num_tasks, found.num_sessions, found.num_invalid) == (3, 5, 1)
    assert found.wall_s == 100.0 + found.took_s
    assert found.scalars()["evaluation/reward_mean"] == found.reward_mean


async def test_two_evaluations_are_compared_task_by_task() -> None:
    """What tasks differ by themselves is in the error of each mean, and not in that of the difference."""
    rewards = {
        **dict(zip(ids(), [(1.0, 0.0), (0.0, 0.0), (0.5, None)], strict=True)),
        **dict(zip(ids(2, 1), [(1.0, 1.0), (1.0, 0.0), (None, None)], strict=True)),
    }
    service = VersionedService(**rewards)
    before, after = [await evaluation(service).measure(step, step // 2, 0.0) for step in (0, 2)]
    assert (before.task_means, after.task_means) == ((0.5, 0.0, 0.5), (1.0, 0.5, None))
    difference = paired_difference(before, after)
    assert difference == PairedDifference(mean=0.5, standard_error=0.0, num_tasks=2)
    assert str(difference) == "+0.50 ± 0.00"
    uneven = msgspec.structs.replace(after, task_means=(0.5, 0.5, 0.5))
    assert paired_difference(before, uneven) == PairedDifference(
        mean=pytest.approx(1 / 6), standard_error=pytest.approx(1 / 6), num_tasks=3
    )
    assert paired_difference(before, msgspec.structs.replace(after, task_means=(None,) * 3)) is None
    one = paired_difference(before, msgspec.structs.replace(after, task_means=(0.25, None, None)))
    assert one == PairedDifference(mean=-0.25, standard_error=None, num_tasks=1)
    assert str(one) == "-0.25"


class VersionedService(FakeService):
    """Its sessions were sampled by the version that is in the task's id."""

    async def result(self, task_id: str) -> list[SessionResult]:
        version = int(task_id.partition("-v")[2].partition("-")[0])
        rewards = self.rewards[task_id]
        return [session(f"s{index}", reward, trace(versions=[version])) for index, reward in enumerate(rewards)]


def test_what_is_trained_on_is_not_held_out() -> None:
    agent = {"harness": "shell"}
    trained = [{"task_id": "a", "instruction": "add", "agent": agent}, {"instruction": "count", "agent": agent}]
    require_disjoint(trained, [{"instruction": "divide", "agent": agent}])
    renamed = {"task_id": "z", "instruction": "count", "agent": {"harness": "shell", "settings": {}}, "max_attempts": 1}
    for held_out in (renamed, {"task_id": "a", "instruction": "other", "agent": agent}):
        with pytest.raises(InvalidRequest, match="1 of 1 held-out tasks are trained on"):
            require_disjoint(trained, [held_out])


async def test_sessions_that_did_not_complete_are_counted_by_cause() -> None:
    """Those with a reward count all the same."""
    full = Failure(boundary="harness", code="context_length_exceeded", message="", retryable=False)

    class Cut(FakeService):
        async def result(self, task_id: str) -> list[SessionResult]:
            first, second = await super().result(task_id)
            return [msgspec.structs.replace(first, outcome="token_limit", failure=full), second]

    service = Cut(**dict.fromkeys(ids(), (0.0, 1.0)))
    found = await evaluation(service).measure(0, 0, 0.0)
    assert (found.num_sessions, found.early_ends) == (6, {"token_limit (context_length_exceeded)": 3})


async def test_one_task_has_no_standard_error() -> None:
    service = FakeService(**{ids()[0]: (1.0, 0.0)})
    found = await evaluation(service, num_tasks=1).measure(0, 0, 0.0)
    assert found.reward_mean == 0.5
    assert found.standard_error is None
    assert "evaluation/standard_error" not in found.scalars()


async def test_without_any_reward_it_says_why() -> None:
    service = FakeService(**dict.fromkeys(ids(4, 0), (None, None)))
    with pytest.raises(InvalidGroup, match=r"after step 4 .*s0: it has no reward"):
        await evaluation(service).measure(4, 0, 0.0)


async def test_with_a_seed_every_evaluation_samples_each_task_by_one_of_its_own() -> None:
    class Bodies(FakeService):
        seeds: dict[str, int | None]

        async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
            body = TaskRequest.model_validate(task)
            self.seeds[str(body.task_id)] = body.capture.seed
            return await super().submit({"instruction": body.instruction, "task_id": body.task_id})

    async def seeds(step: int, **options: Any) -> list[int | None]:
        service = Bodies(**dict.fromkeys(ids(step), (1.0, 0.0)))
        service.seeds = {}
        held_out = [{**task, "agent": {"harness": "shell"}, "capture": {"tier": "observe"}} for task in HELD_OUT]
        await Evaluation("run", held_out, service, num_samples=2, **options).measure(step, 0, 0.0)
        return [service.seeds[task_id] for task_id in ids(step)]

    first, last, other = await seeds(0, seed=1), await seeds(9, seed=1), await seeds(0, seed=2)
    assert first == last
    assert len({*first, *other}) == 6
    assert await seeds(0) == [None, None, None]


def test_without_tasks_there_is_nothing_to_evaluate_on() -> None:
    with pytest.raises(InvalidRequest, match="held-out tasks is empty"):
        evaluation(FakeService(), num_tasks=0)


class Results(FakeService):
    """Gives these sessions for every task."""

    def __init__(self, *sessions: SessionResult) -> None:
        super().__init__(**dict.fromkeys(ids(0, 3), (None, None)))
        self._sessions = sessions

    async def result(self, task_id: str) -> list[SessionResult]:
        return list(self._sessions)


async def test_a_session_counts_only_if_the_measured_weights_sampled_all_of_it() -> None:
    two_turns = ([10, 2], [11, 2])
    service = Results(
        session("s0", 0.0, trace(turns=two_turns, versions=[3, 3])),
        session("s1", 1.0, trace(turns=two_turns, versions=[2, 3])),
    )
    found = await evaluation(service).measure(0, 3, 0.0)
    assert (found.reward_mean, found.num_sessions, found.num_invalid) == (0.0, 3, 3)


async def test_a_session_without_tokens_to_train_on_counts_and_one_that_we_broke_does_not() -> None:
    broken = Failure(boundary="node", code="node_lost", message="its node is gone", retryable=True)
    service = Results(session("s0", 0.25, trajectory=None), session("s1", 1.0, outcome="infra_error", failure=broken))
    found = await evaluation(service).measure(0, 3, 0.0)
    assert (found.reward_mean, found.num_sessions, found.num_invalid) == (0.25, 3, 3)


async def test_what_an_earlier_life_left_broken_is_asked_for_again_and_only_that() -> None:
    first, *others = ids()
    service = FakeService(**{first: (None, None), f"{first}.run2": (None, 1.0)}, **dict.fromkeys(others, (1.0, 0.0)))
    for task_id in ids():
        await service.submit({"task_id": task_id})
    service.submitted.clear()
    found = await evaluation(service).measure(0, 0, 0.0)
    assert sorted(service.submitted) == sorted([*ids(), f"{first}.run2"])
    assert (found.reward_mean, found.num_sessions, found.num_invalid) == (pytest.approx(2 / 3), 5, 1)


async def test_a_server_that_does_not_answer_is_asked_until_it_does() -> None:
    service = FakeService(**dict.fromkeys(ids(), (1.0, 1.0)))
    service.num_unavailable = 7
    assert (await evaluation(service).measure(0, 0, 0.0)).reward_mean == 1.0


async def test_an_evaluation_that_is_stopped_leaves_no_task_behind() -> None:
    service = FakeService()
    measuring = asyncio.create_task(evaluation(service).measure(0, 0, 0.0))
    await service.until_submitted(3)
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert sorted(service.cancelled) == ids()


class MeasuredEngines(Engines):
    """Know whose weights they have. No training comes to the same weights twice, as real ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = _OF_NOBODY
        self.trained = itertools.count(1)

    def restart(self) -> None:
        self.version, self.weights = None, _OF_NOBODY


_OF_NOBODY = -1


class MeasuredLearner(Learner):
    def __init__(self, engines: MeasuredEngines, kill_at: int | None = None, kill_in: str = "step") -> None:
        super().__init__(kill_at, kill_in)
        self.engines = engines
        self.weights = [0]
        """After each step."""

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.weights.append(next(self.engines.trained))
        return super().step(samples)

    def abandon(self) -> None: ...

    def save_weights(self, folder: Path) -> None:
        super().save_weights(folder)
        self.engines.weights = self.weights[-1]

    def save_state(self, folder: Path) -> None:
        super().save_state(folder)
        (folder / "weights.json").write_text(json.dumps(self.weights))

    def load_state(self, folder: Path) -> None:
        super().load_state(folder)
        self.weights = json.loads((folder / "weights.json").read_text())


class MeasuredService(Service):
    """The reward of a held-out task is the name of the weights that ran it."""

    def __init__(self, engines: MeasuredEngines) -> None:
        super().__init__(engines)
        self._measured = engines
        self.kill_at: int | None = None
        """The so many-th call about a held-out task, in `kill_in`, is the trainer's last."""
        self.kill_in = "submit"

    @property
    def evaluated(self) -> list[str]:
        return [task_id for task_id in self.submitted if "-evaluation-" in task_id]

    def may_be_killed(self, where: str, task_id: str) -> None:
        if where != self.kill_in or self.kill_at is None or "-evaluation-" not in task_id:
            return
        self.kill_at -= 1
        if self.kill_at <= 0:
            raise Killed

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        assert not isinstance(task, TaskRequest)
        if "-evaluation-" in task["task_id"]:
            self.rewards[task["task_id"]] = (0.0, 0.0)
        submitted = await super().submit(task)
        self.may_be_killed("submit", submitted.task_id)
        return submitted

    async def result(self, task_id: str) -> list[SessionResult]:
        if "-evaluation-" in task_id and task_id not in self._results:
            self.run(task_id, self._measured.version or 0, self._measured.weights)
        self.may_be_killed("result", task_id)
        return await super().result(task_id)

    def run(self, task_id: str, version: int, weights: int) -> None:
        sessions = [
            session(f"{task_id}.{n}", float(weights), trace(versions=[version]), task_id=task_id) for n in (0, 1)
        ]
        self._results[task_id] = sessions

    async def cancel(self, task_id: str) -> TaskView:
        raise ServerUnavailable("whoever was killed cancels nothing.")

    def begin_again(self) -> None:
        """Sessions that a killed trainer left run before it is back, on what its engines have by themselves."""
        for task_id in self.evaluated:
            if task_id not in self._results:
                self.run(task_id, 0, _OF_NOBODY)


def trainer(folder: Path, service: MeasuredService, learner: MeasuredLearner, **changes: Any) -> Trainer:
    options = {key: changes.pop(key) for key in ("selection", "on_evaluation") if key in changes}
    every = changes.pop("every", 2)
    return Trainer(
        folder,
        schedule=ScheduleSettings.model_validate({"steps": 5, "groups_per_step": 2, "checkpoint_every": 3, **changes}),
        algorithm=algorithm("grpo"),
        learner=learner,
        service=service,
        stream=TaskStream("run", [{"instruction": "add"}], num_samples=2),
        weights=learner.engines,
        evaluation=evaluation(service, every=every),
        **options,
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("every", "steps"), [(None, [0, 5]), (2, [0, 2, 4, 5]), (5, [0, 5])])
async def test_a_run_measures_before_the_first_step_after_the_last_and_between(
    tmp_path: Path, mode: str, every: int | None, steps: list[int]
) -> None:
    service, told = MeasuredService(engines := MeasuredEngines()), list[EvaluationRecord]()
    learner = MeasuredLearner(engines)
    await trainer(tmp_path, service, learner, mode=mode, every=every, on_evaluation=told.append).run()
    assert read_evaluations(tmp_path / "evaluations.jsonl") == told
    assert [record.step for record in told] == steps
    assert [record.version for record in told] == [step + 1 for step in steps]
    assert [record.reward_mean for record in told] == [learner.weights[step] for step in steps]
    assert len(service.evaluated) == 3 * len(steps)


KILLS = [
    *[("step", 5), ("save_weights", 5), ("save_state", 3), ("save_state", 9)],
    *[("submit", 1), ("submit", 5), ("submit", 9), ("result", 2), ("result", 4), ("result", 12)],
    *[("told", 1), ("told", 2), ("told", 3), ("told", 4)],
]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("restarted", [False, True], ids=["service goes on", "service is restarted too"])
@pytest.mark.parametrize(("kill_in", "kill_at"), KILLS)
async def test_wherever_a_run_is_killed_each_evaluation_is_of_the_weights_after_its_step(
    tmp_path: Path, mode: str, restarted: bool, kill_in: str, kill_at: int
) -> None:
    service = MeasuredService(engines := MeasuredEngines())
    service.kill_in, service.kill_at = kill_in, kill_at

    told = list[int]()

    def tell(record: EvaluationRecord) -> None:
        told.append(record.step)
        if kill_in == "told" and len(told) == kill_at:
            raise Killed

    first = trainer(tmp_path, service, MeasuredLearner(engines, kill_at, kill_in), mode=mode, on_evaluation=tell)
    with pytest.raises(Killed):
        await first.run()
    if restarted:
        engines.restart()
        service.begin_again()
    service.kill_at = None
    last = MeasuredLearner(engines)
    await trainer(tmp_path, service, last, mode=mode).run()
    found = read_evaluations(tmp_path / "evaluations.jsonl")
    assert [record.step for record in found] == [0, 2, 4, 5]
    assert [record.reward_mean for record in found] == [last.weights[record.step] for record in found]
    assert all((record.num_sessions, record.num_invalid) == (6, 0) for record in found)
    assert [record.step for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


async def test_what_was_asked_of_a_version_before_a_restart_is_no_answer_for_other_weights(tmp_path: Path) -> None:
    service = MeasuredService(engines := MeasuredEngines())
    for restarted in (False, True):  # version 1, then 2, both of what training begins with
        service.kill_in, service.kill_at = "result", 3
        with pytest.raises(Killed):
            await trainer(tmp_path, service, MeasuredLearner(engines), every=1).run()
        if restarted:
            engines.restart()
    service.kill_at = None
    learner = MeasuredLearner(engines)
    await trainer(tmp_path, service, learner, every=1).run()
    found = read_evaluations(tmp_path / "evaluations.jsonl")
    assert [record.version for record in found] == [1, 2, 3, 4, 5, 6]
    assert [record.reward_mean for record in found] == learner.weights


async def test_a_run_that_was_stopped_before_its_last_evaluation_makes_up_for_it(tmp_path: Path) -> None:
    service = MeasuredService(engines := MeasuredEngines())
    learner = MeasuredLearner(engines)
    await trainer(tmp_path, service, learner).run()
    path = tmp_path / "evaluations.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    before = len(service.submitted)
    await trainer(tmp_path, service, MeasuredLearner(engines)).run()
    assert service.submitted[before:] == ids(5, 6), "the same ids, and nothing else"
    assert [record.reward_mean for record in read_evaluations(path)] == [learner.weights[step] for step in (0, 2, 4, 5)]
    await trainer(tmp_path, service, MeasuredLearner(engines)).run()
    assert len(service.submitted) == before + 3, "and then nothing is left to do"


async def test_a_run_that_is_made_longer_is_measured_at_its_new_end(tmp_path: Path) -> None:
    service = MeasuredService(engines := MeasuredEngines())
    for steps in (2, 3):
        learner = MeasuredLearner(engines)
        await trainer(tmp_path, service, learner, steps=steps, every=None).run()
    found = read_evaluations(tmp_path / "evaluations.jsonl")
    assert [(record.step, record.reward_mean) for record in found] == [(0, 0), (2, 2), (3, 3)]


async def test_a_control_changes_nothing_of_what_is_measured(tmp_path: Path) -> None:
    seen, shuffle = list[str](), shuffled_rewards(0, "run")

    def prepare(one: Any) -> Any:
        seen.append(one.task_id)
        return shuffle(one)

    service = MeasuredService(engines := MeasuredEngines())
    await trainer(tmp_path, service, MeasuredLearner(engines), selection=Selection(control=prepare)).run()
    assert len(service.evaluated) == 12
    assert seen
    assert not [task_id for task_id in seen if "-evaluation-" in task_id]


def test_records_of_steps_that_are_done_again_are_taken_back(tmp_path: Path) -> None:
    def record(step: int) -> EvaluationRecord:
        return EvaluationRecord(
            step=step,
            version=step + 1,
            wall_s=1.0,
            reward_mean=0.5,
            standard_error=None,
            task_means=(0.5,),
            num_tasks=1,
            num_sessions=1,
            num_invalid=0,
            took_s=1.0,
        )

    run_log = RunLog(tmp_path)
    for step in (0, 2, 4):
        run_log.write_evaluation(record(step))
    assert RunLog(tmp_path, last_step=2).evaluated_steps == {0, 2}
    assert read_evaluations(tmp_path / "evaluations.jsonl") == [record(0), record(2)]
