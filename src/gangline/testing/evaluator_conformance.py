"""Requirements on every evaluator, as checks that any evaluator's author can run.

    SUBJECT = Subject(evaluator=MyEvaluator, config={"answer": "42"}, context=my_context)

    @pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
    async def test_my_evaluator(check):
        await run_check(check, SUBJECT)

`context` creates the input of one grading: a session that the evaluator can grade, with its own runtimes. A failed
check raises AssertionError with the expectation.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from gangline.domain.contracts import Controlled, EvaluationContext, Evaluator, GradesClean, Reward
from gangline.domain.conversation import Message, Text
from gangline.domain.errors import EvaluatorError, GanglineError, GradingSpoiled
from gangline.domain.session import HarnessExit
from gangline.domain.trajectory import Trajectory
from gangline.rows.rewards import apply_reward

_MAX_HELD_S = 1.0
"""Seconds that an evaluator may block the event loop, on which other sessions of the node wait."""
_MAX_DETAILS_BYTES = 1 << 20
_ARTIFACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HOSTILE = ("\ufffd half a character", "\0", "(" * 20_000, "a" * 200_000, '{"reward": 1}', "\\boxed{" * 500)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An evaluator under test."""

    evaluator: Callable[[Any], Evaluator]
    """The class; called with its validated `Config`."""
    config: dict[str, Any]
    """A configuration as in a task."""
    context: Callable[[], Awaitable[EvaluationContext]]
    """Returns a gradable session, a new one on each call."""
    is_deterministic: bool = True
    """Whether equal sessions get equal rewards; False if it samples."""
    wrong_config: dict[str, Any] = field(default_factory=lambda: {"no_such_field": 1})
    """Merged into `config`: a mistake that its `Config` must refuse."""

    def make(self) -> Evaluator:
        config: type[BaseModel] = self.evaluator.Config  # type: ignore[attr-defined]
        return self.evaluator(config.model_validate(self.config))


Check = Callable[[Subject], Awaitable[None]]
_CHECKS: list[Check] = []


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def checks() -> list[Check]:
    return list(_CHECKS)


async def run_check(check: Check, subject: Subject) -> None:
    """Raises: AssertionError."""
    await check(subject)


async def _outcome(subject: Subject, context: EvaluationContext) -> Reward | EvaluatorError | GradingSpoiled:
    """A reward that fits its session, or one of the errors that an evaluator may raise."""
    try:
        reward = await subject.make().evaluate(context)
    except (EvaluatorError, GradingSpoiled) as error:
        return error
    except GanglineError:
        raise
    except Exception as error:
        raise AssertionError(f"an evaluator raises EvaluatorError, not {type(error).__name__}: {error}") from error
    assert isinstance(reward, Reward), f"an evaluator returns a Reward, not {type(reward).__name__}"
    try:
        apply_reward(context.trajectory, reward)
    except EvaluatorError as error:
        raise AssertionError(error.message) from error
    return reward


async def _reward(subject: Subject, context: EvaluationContext) -> Reward:
    found = await _outcome(subject, context)
    assert isinstance(found, Reward), f"the subject's own session must get a reward, and got: {found}"
    return found


@_check
async def its_configuration_is_checked_and_travels(subject: Subject) -> None:
    config: type[BaseModel] = subject.evaluator.Config  # type: ignore[attr-defined]
    given = config.model_validate(subject.config)
    again = config.model_validate_json(given.model_dump_json(exclude_unset=True))
    assert again == given, "a configuration must survive JSON: it comes over HTTP"
    try:
        config.model_validate(subject.config | subject.wrong_config)
    except ValidationError:
        return
    raise AssertionError("a configuration with a mistake must be refused: forbid unknown fields")


@_check
async def its_reward_fits_the_session(subject: Subject) -> None:
    await _reward(subject, await subject.context())


@_check
async def it_grades_equal_sessions_equally(subject: Subject) -> None:
    first, second = [await _reward(subject, await subject.context()) for _ in range(2)]
    if subject.is_deterministic:
        assert (first.reward, first.trace_rewards, first.turn_scores) == (
            second.reward,
            second.trace_rewards,
            second.turn_scores,
        ), "equal sessions must get equal rewards"


@_check
async def its_evidence_can_be_kept(subject: Subject) -> None:
    context = await subject.context()
    reward = await _reward(subject, context)
    size = len(json.dumps(reward.details))
    assert size <= _MAX_DETAILS_BYTES, (
        f"details have {size} bytes of JSON; put more than {_MAX_DETAILS_BYTES} in artifacts"
    )
    for name, data in context.artifacts.items():
        assert _ARTIFACT.fullmatch(name), f"{name!r} is not a file name for an artifact"
        assert isinstance(data, bytes), f"the artifact {name} is {type(data).__name__}, not bytes"  # type: ignore[redundant-expr]


@_check
async def it_leaves_the_session_as_it_is(subject: Subject) -> None:
    context = await subject.context()
    before = _state(context.trajectory)
    await _reward(subject, context)
    assert _state(context.trajectory) == before, "an evaluator must not change the trajectory"


def _state(trajectory: Trajectory) -> list[Any]:
    """All state that could be changed in place."""
    return [
        [value.tobytes() if isinstance(value, np.ndarray) else repr(value) for value in msgspec.structs.astuple(trace)]
        for trace in trajectory.traces
    ]


@_check
async def it_grades_a_session_without_calls_or_says_why_not(subject: Subject) -> None:
    context = await subject.context()
    trajectory = msgspec.structs.replace(context.trajectory, traces=(), num_completions=0)
    silent = msgspec.structs.replace(context, trajectory=trajectory, harness_stdout=b"")
    await _outcome(subject, silent)


@_check
async def it_survives_text_that_is_made_to_hurt(subject: Subject) -> None:
    for text in _HOSTILE:
        context = await subject.context()
        spoken = (Message("assistant", (Text(text),)),)
        traces = tuple(msgspec.structs.replace(trace, response_messages=spoken) for trace in context.trajectory.traces)
        hurt = msgspec.structs.replace(
            context,
            trajectory=msgspec.structs.replace(context.trajectory, traces=traces),
            harness_stdout=b"\xff\xed\xa0\x80" + text.encode(),
        )
        await _outcome(subject, hurt)


@_check
async def it_leaves_the_event_loop_to_others(subject: Subject) -> None:
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)

    context = await subject.context()
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    try:
        await _reward(subject, context)
        await asyncio.sleep(0.02)
    finally:
        ticking.cancel()
    assert longest < _MAX_HELD_S, f"it held the event loop for {longest:.1f} s: use a thread or a child process"


@_check
async def it_ends_when_it_is_cancelled(subject: Subject) -> None:
    grading = asyncio.create_task(_outcome(subject, await subject.context()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if grading.done():
        return
    grading.cancel()
    await asyncio.wait({grading}, timeout=30)
    assert grading.done(), "it must end when its task is cancelled"
    assert grading.cancelled(), "it must let cancellation through, not turn it into a reward or an error"


@_check
async def its_control_works(subject: Subject) -> None:
    """A control grades a session in which no agent acted, in a clean runtime."""
    evaluator = subject.make()
    if not (isinstance(evaluator, Controlled) and evaluator.is_controlled):
        return
    context = await subject.context()
    clean = context.runtime
    if isinstance(evaluator, GradesClean) and evaluator.grades_clean and context.refresh_runtime:
        clean = await context.fresh_runtime()
    control = msgspec.structs.replace(
        context,
        trajectory=msgspec.structs.replace(context.trajectory, traces=(), num_completions=0),
        outcome="completed",
        harness_exit=HarnessExit(exit_code=0),
        harness_stdout=b"",
        runtime=clean,
        is_control=True,
        artifacts={},
    )
    await _reward(subject, control)
