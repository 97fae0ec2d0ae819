"""An evaluation through a service in memory: killed anywhere it resumes, within its budget, and loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import Conflict, GanglineError
from gangline.domain.session import SessionResult
from gangline.tasks.evals.records import SessionRecord
from gangline.tasks.evals.report import Prices, make_report
from gangline.tasks.evals.run import Budget, EvaluationRun, EvaluationSpec, read_predictions
from support.training.service import FakeService

NUM_TASKS = 6


def spec(num_tasks: int = NUM_TASKS, **changes: Any) -> EvaluationSpec:
    bodies = tuple({"instruction": f"do {at}", "metadata": {"repo": f"r{at % 2}"}} for at in range(num_tasks))
    made = EvaluationSpec(name="e", tasks=bodies, names=tuple(f"t{at}" for at in range(num_tasks)), num_samples=2)
    return msgspec.structs.replace(made, **changes)


def service_of(wanted: EvaluationSpec, *rewards: tuple[float | None, ...]) -> FakeService:
    ids = [f"e-{wanted.digest}-{at:06d}" for at in range(len(wanted.tasks))]
    return FakeService(**dict(zip(ids, rewards, strict=True)))


REWARDS = ((1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.5, None), (1.0, 0.0), (0.0, 1.0))


def run_of(service: FakeService, folder: Path, wanted: EvaluationSpec, **options: Any) -> EvaluationRun:
    return EvaluationRun(service, wanted, folder, retry_s=0, **options)


async def test_every_session_is_recorded_under_its_task(tmp_path: Path) -> None:
    wanted = spec()
    run = run_of(service_of(wanted, *REWARDS), tmp_path, wanted)
    assert run.num_left == NUM_TASKS
    await run.run()
    assert run.num_left == 0
    assert [(one.task, one.sample, one.reward) for one in run.records] == [
        (f"t{at}", sample, REWARDS[at][sample]) for at in range(NUM_TASKS) for sample in range(2)
    ]
    report = make_report("e", run.records, num_samples=2, ks=(1, 2), by=["repo"])
    assert report.whole.num_counted == 11
    assert report.whole.reward is not None
    assert report.whole.reward.mean == pytest.approx((0.5 + 1 + 0 + 0.5 + 0.5 + 0.5) / 6)
    assert report.whole.pass_at[2].mean == pytest.approx(4 / 5), "a task with one session has no pass@2"
    assert report.whole.pass_hat[2].mean == pytest.approx(1 / 5)
    assert [(one.name, one.num_tasks) for one in report.by["repo"]] == [("r0", 3), ("r1", 3)]


@pytest.mark.parametrize("num_whole", range(NUM_TASKS))
@pytest.mark.parametrize("torn", [False, True])
async def test_killed_anywhere_it_reports_as_if_undisturbed(tmp_path: Path, num_whole: int, torn: bool) -> None:
    wanted = spec()
    undisturbed = run_of(service_of(wanted, *REWARDS), tmp_path / "one", wanted)
    await undisturbed.run()
    first = run_of(service_of(wanted, *REWARDS), tmp_path / "two", wanted, num_in_flight=1)
    await first.run()
    path = tmp_path / "two" / "sessions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 2 * num_whole]) + (lines[2 * num_whole][:20] if torn else lines[2 * num_whole]))
    again = service_of(wanted, *REWARDS)
    resumed = run_of(again, tmp_path / "two", wanted)
    assert resumed.num_left == NUM_TASKS - num_whole
    await resumed.run()
    assert len(again.submitted) == NUM_TASKS - num_whole
    assert resumed.records == undisturbed.records
    third = run_of(FakeService(), tmp_path / "two", wanted)
    assert third.num_left == 0
    assert third.records == undisturbed.records, "what is written last counts, too"


async def test_tasks_under_way_are_cancelled_and_run_again(tmp_path: Path) -> None:
    wanted = spec(2)
    service = FakeService()
    working = asyncio.create_task(run_of(service, tmp_path, wanted, num_in_flight=1).run())
    await service.until_submitted(1)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert service.cancelled == service.submitted == [f"e-{wanted.digest}-000000"]


class _Cancelled(FakeService):
    """Sessions of first runs were cancelled."""

    async def result(self, task_id: str) -> list[SessionResult]:
        sessions = await super().result(task_id)
        if task_id.endswith(".run2"):
            return sessions
        return [msgspec.structs.replace(one, outcome="cancelled", reward=None) for one in sessions]


async def test_a_cancelled_task_runs_under_another_id(tmp_path: Path) -> None:
    wanted = spec(1)
    task_id = f"e-{wanted.digest}-000000"
    service = _Cancelled(**{task_id: (1.0, 1.0), f"{task_id}.run2": (1.0, 0.0)})
    run = run_of(service, tmp_path, wanted)
    await run.run()
    assert [one.reward for one in run.records] == [1.0, 0.0]


async def test_one_that_is_always_cancelled_is_an_error(tmp_path: Path) -> None:
    wanted = spec(1)
    task_id = f"e-{wanted.digest}-000000"
    ids = (task_id, f"{task_id}.run3")
    service = _Cancelled(**dict.fromkeys(ids, (1.0, 1.0)), **{f"{task_id}.run2": (1.0, 1.0)})
    service.result = lambda task_id: _all_cancelled(service, task_id)  # type: ignore[method-assign]
    with pytest.raises(GanglineError, match="3 times over"):
        await run_of(service, tmp_path, wanted).run()


async def _all_cancelled(service: FakeService, task_id: str) -> list[SessionResult]:
    sessions = await FakeService.result(service, task_id)
    return [msgspec.structs.replace(one, outcome="cancelled", reward=None) for one in sessions]


async def test_a_spent_budget_begins_no_more_tasks(tmp_path: Path) -> None:
    wanted = spec()
    prices = Prices(prompt=1e6, sampled=1e6)
    service = service_of(wanted, *REWARDS)
    run = run_of(service, tmp_path, wanted, num_in_flight=1, budget=Budget(max_cost=0.0, prices=prices))
    await run.run()
    assert service.submitted == []
    assert run.num_left == NUM_TASKS
    assert run_of(service, tmp_path, wanted, budget=Budget(max_s=0.0)).num_left == NUM_TASKS


async def test_patches_are_kept_for_predictions(tmp_path: Path) -> None:
    class Patching(FakeService):
        async def result(self, task_id: str) -> list[SessionResult]:
            sessions = await super().result(task_id)
            patches = [f"patch {number}".encode() for number in range(len(sessions))]
            return [
                msgspec.structs.replace(one, artifacts={"patch.diff": patch})
                for one, patch in zip(sessions, patches, strict=True)
            ]

    wanted = spec(1)
    await run_of(Patching(**{f"e-{wanted.digest}-000000": (1.0, 0.0)}), tmp_path, wanted).run()
    assert read_predictions(tmp_path) == {"t0": "patch 0"}


def test_a_folder_belongs_to_one_evaluation(tmp_path: Path) -> None:
    run_of(FakeService(), tmp_path, spec())
    run_of(FakeService(), tmp_path, spec())
    with pytest.raises(Conflict, match="other tasks"):
        run_of(FakeService(), tmp_path, spec(num_samples=3))


def test_a_report_without_a_reward_has_no_mean() -> None:
    record = SessionRecord(
        session_id="s",
        task="t",
        sample=0,
        outcome="infra_error",
        reward=None,
        boundary="runtime",
        code="gone",
        turns=1,
        prompt_tokens=1_000_000,
        sampled_tokens=500_000,
        seconds=2.0,
    )
    report = make_report("e", [record], num_samples=1, prices=Prices(prompt=1.0, sampled=2.0))
    assert (report.whole.reward, report.whole.num_counted, report.tasks) == (None, 0, {})
    assert report.whole.failures == {"runtime: gone": 1}
    assert report.whole.cost == 2.0
