"""Collectors and evaluations against a service whose sessions cannot start: they stop, and say why."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gangline.domain.errors import Failure, InvalidGroup
from gangline.domain.session import SessionResult
from gangline.tasks.evals.records import record_of
from gangline.train.collecting.collector import PlainCollector, ReplenishingCollector
from gangline.train.collecting.groups import ValiditySettings
from gangline.train.run.evaluation import Evaluation
from gangline.train.trainers.own_engine import Sampling
from gangline.train.trainers.skyrl import Connection, SkyRLGenerator, SkyRLPrompt
from gangline.train.trainers.verl.prompts import Prompt, TaskMaker
from gangline.train.trainers.verl.sessions import PromptRunner
from gangline.train.trainers.verl.settings import GanglineSettings
from support.training.samples import session
from support.training.service import FakeService, tasks

MISSING = b"""Traceback (most recent call last):
  File "agent.py", line 3, in <module>
ModuleNotFoundError: No module named 'openai'
"""


def failure(boundary: Any, code: str, message: str, *, retryable: bool = False) -> Failure:
    return Failure(boundary=boundary, code=code, message=message, retryable=retryable)


def ended(session_id: str, outcome: str, why: Failure | None, **changes: Any) -> SessionResult:
    """A session that made no model call."""
    fields: dict[str, Any] = {"trajectory": None, "outcome": outcome, "failure": why} | changes
    return session(session_id, fields.pop("reward", None), **fields)


def crashed(session_id: str) -> SessionResult:
    why = failure("harness", "harness_failed", "the harness ended with exit code 1")
    return ended(session_id, "agent_error", why, reward=0.0, artifacts={"harness.stderr": MISSING})


CAUSES: dict[str, Callable[[str], SessionResult]] = {
    "a missing module": crashed,
    "a missing program": lambda one: ended(
        one, "agent_error", failure("harness", "harness_failed", "the harness ended with exit code 127"), reward=0.0
    ),
    "no tools in the template": lambda one: ended(
        one, "infra_error", failure("harness", "tools_not_rendered", "the template shows no tools")
    ),
    "an agent that calls another address": lambda one: ended(
        one, "no_model_call", failure("harness", "no_model_call", "the agent ended without a model call")
    ),
    "an engine that refuses each call": lambda one: ended(
        one, "infra_error", failure("engine", "engine_refused", "the engine answered 401")
    ),
    "an image that is missing": lambda one: ended(
        one, "infra_error", failure("runtime", "prepare_failed", "no image python:3.99", retryable=True)
    ),
    "an agent that hangs before its first call": lambda one: ended(one, "agent_timeout", None, reward=0.0),
    "an agent that needs more memory than it has": lambda one: ended(one, "memory_limit", None, reward=0.0),
    "a grader that is never there": lambda one: session(
        one, None, outcome="infra_error", failure=failure("evaluator", "grader_unavailable", "the judge answers 401")
    ),
}


class Sessions(FakeService):
    """make: the session of an id; called for each session of each task."""

    def __init__(self, make: Callable[[str, int], SessionResult]) -> None:
        super().__init__()
        self._make = make

    async def submit(self, task: Any) -> Any:
        self.rewards[task["task_id"]] = ()
        return await super().submit(task)

    async def result(self, task_id: str) -> list[SessionResult]:
        return [self._make(f"{task_id}.{index}", index) for index in range(2)]


def number_of(session_id: str) -> int:
    return int(session_id.removeprefix("t").partition(".")[0])


@pytest.mark.parametrize("on_invalid", ["resubmit", "shrink"])
@pytest.mark.parametrize("make", CAUSES.values(), ids=CAUSES)
async def test_a_cause_that_stays_ends_the_collecting(make: Callable[[str], SessionResult], on_invalid: Any) -> None:
    service = Sessions(lambda session_id, _: make(session_id))
    validity = ValiditySettings(on_invalid=on_invalid)
    for collector in (
        PlainCollector(service, tasks(), validity=validity),
        ReplenishingCollector(service, tasks(), num_in_flight=3, validity=validity),
    ):
        service.submitted.clear()
        async with collector:
            with pytest.raises(InvalidGroup, match=r"(?s)8 tasks in a row gave nothing to train on.*gangline show t"):
                await collector.collect(2)
        assert len(service.submitted) <= 30


class Queue:
    def __init__(self) -> None:
        self.statuses = list[str]()

    async def async_kv_put(self, key: str, partition_id: str, *, tag: dict[str, Any]) -> None:
        self.statuses.append(tag["status"])

    async def async_kv_batch_put(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("partition", ["train", "val"])
@pytest.mark.parametrize("make", CAUSES.values(), ids=CAUSES)
async def test_verl_is_refused_more_prompts_by_a_cause_that_stays(
    make: Callable[[str], SessionResult], partition: Any
) -> None:
    """It replaces each prompt that failed by another one."""
    queue, sampling = Queue(), Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=64)
    runner = PromptRunner(
        Sessions(lambda session_id, _: make(session_id)),
        queue,
        TaskMaker(GanglineSettings(url="http://127.0.0.1:1")),
        sampling={"train": sampling, "val": sampling},
        num_samples={"train": 2, "val": 2},
        validity=ValiditySettings(on_invalid="resubmit"),
        compares_sessions=True,
    )
    for number in range(8):
        runner.check()
        columns = {"gangline_task": '{"instruction": "add"}'}
        await runner.run(Prompt(f"t{number}", partition, global_steps=1, num_samples=None, columns=columns))
    assert queue.statuses[1::2] == ["failure"] * 8
    with pytest.raises(InvalidGroup, match=r"(?s)8 tasks in a row gave nothing to train on.*gangline show t"):
        runner.check()


async def test_skyrls_batches_are_one_run() -> None:
    cfg = SimpleNamespace(trainer=SimpleNamespace(fully_async=SimpleNamespace(enabled=False)))
    service = Sessions(lambda session_id, _: crashed(session_id))

    @asynccontextmanager
    async def connect() -> AsyncGenerator[Connection]:
        yield Connection(service, [])

    def task_of(_: SkyRLPrompt) -> dict[str, Any]:
        return {"instruction": "add"}

    validity = ValiditySettings(on_invalid="refuse")
    generator = SkyRLGenerator(connect, task_of, cfg, SimpleNamespace(weight_version=1), validity=validity)
    for number in range(8):
        ids = [SimpleNamespace(instance_id=f"p{number}", repetition_id=sample) for sample in range(2)]
        batch: dict[str, Any] = {"prompts": [[], []], "env_classes": ["any"] * 2, "trajectory_ids": ids}
        with pytest.raises(InvalidGroup, match="8 tasks in a row" if number == 7 else "(?s)."):
            await generator.generate(batch)


async def test_the_error_has_the_end_of_what_an_agent_wrote(caplog: pytest.LogCaptureFixture) -> None:
    service = Sessions(lambda session_id, _: crashed(session_id))
    caplog.set_level(logging.WARNING)
    async with PlainCollector(service, tasks(), validity=ValiditySettings(on_invalid="resubmit")) as collector:
        with pytest.raises(InvalidGroup) as caught:
            await collector.collect(1)
    assert "exit code 1" in caught.value.message
    assert "No module named 'openai'\n" in caught.value.message
    told = [one.getMessage() for one in caplog.records if "tasks.came_to_nothing" in one.getMessage()]
    assert len(told) == 3  # at 1, 2 and 4 tasks: not silent, and no flood


@pytest.mark.parametrize("num_good", [0, 1])
async def test_sessions_that_ran_and_failed_by_themselves_never_end_it(num_good: int) -> None:
    """A weak policy's agent_error with a trace is trained on, whatever its reward."""
    why = failure("harness", "harness_failed", "the harness ended with exit code 1")

    def make(session_id: str, index: int) -> SessionResult:
        if index < num_good or number_of(session_id) >= 60:
            return session(session_id, 1.0)
        return session(session_id, 0.0 if number_of(session_id) % 2 else None, outcome="agent_error", failure=why)

    shrink = ValiditySettings(on_invalid="shrink")
    async with PlainCollector(Sessions(make), tasks(), validity=shrink) as collector:
        assert len(await collector.collect(40)) == 40


@pytest.mark.parametrize("num_broken", [7, 31, 32])
async def test_a_run_that_had_good_tasks_waits_for_more_broken_ones(num_broken: int) -> None:
    def make(session_id: str, _: int) -> SessionResult:
        number = number_of(session_id)
        return crashed(session_id) if 1 <= number <= num_broken else session(session_id, 1.0)

    shrink = ValiditySettings(on_invalid="shrink")
    async with PlainCollector(Sessions(make), tasks(), validity=shrink) as collector:
        assert len(await collector.collect(1)) == 1
        if num_broken == 32:
            with pytest.raises(InvalidGroup, match="32 tasks in a row"):
                await collector.collect(1)
        else:
            assert len(await collector.collect(1)) == 1


async def test_cancelled_sessions_count_neither_way() -> None:
    def make(session_id: str, _: int) -> SessionResult:
        return ended(session_id, "cancelled", None) if number_of(session_id) < 50 else session(session_id, 1.0)

    shrink = ValiditySettings(on_invalid="shrink")
    async with PlainCollector(Sessions(make), tasks(), validity=shrink) as collector:
        assert len(await collector.collect(1)) == 1


@pytest.mark.parametrize("make", CAUSES.values(), ids=CAUSES)
async def test_an_evaluation_in_which_no_session_ran_is_an_error(make: Callable[[str], SessionResult]) -> None:
    evaluation = Evaluation("run", [{"instruction": "add"}] * 3, Sessions(lambda one, _: make(one)), num_samples=2)
    with pytest.raises(InvalidGroup, match="has no session with a reward") as caught:
        await evaluation.measure(0, 0, 0.0)
    assert "gangline show run-evaluation" in caught.value.message


async def test_a_session_that_could_not_start_is_no_reward_of_0() -> None:
    numbers = itertools.count()

    def make(session_id: str, _: int) -> SessionResult:
        return crashed(session_id) if next(numbers) % 2 else session(session_id, 1.0)

    found = await Evaluation("run", [{"instruction": "add"}] * 3, Sessions(make), num_samples=2).measure(0, 0, 0.0)
    assert (found.reward_mean, found.num_sessions, found.num_invalid) == (1.0, 3, 3)
    assert found.early_ends == {"agent_error (harness_failed)": 3}


@pytest.mark.parametrize("allowed", [False, True])
async def test_an_agent_that_needs_no_model_may_fail_and_earn_0(allowed: bool) -> None:
    task = {"instruction": "add", "agent": {"harness": "shell", "allow_no_model_call": allowed}}
    evaluation = Evaluation("run", [task], Sessions(lambda one, _: crashed(one)), num_samples=2)
    if allowed:
        assert (await evaluation.measure(0, 0, 0.0)).reward_mean == 0.0
    else:
        with pytest.raises(InvalidGroup):
            await evaluation.measure(0, 0, 0.0)
    assert record_of(crashed("s"), "t", 0, {}, needs_model=not allowed).reward == (0.0 if allowed else None)
