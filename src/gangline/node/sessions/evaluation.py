"""Grades one session and attributes its failure.

An evaluator that fails may be broken, or an agent may have left files that break it. A control decides: the same
evaluator grades a session in which no agent acted, in another clean runtime. If it gives a reward there, the agent
spoiled its grading. If it fails there too, the failure is ours. An evaluator that needs an agent's work uses work it
has graded before, or placeholders. The control is only for evaluators that declare it (`Controlled`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from gangline.domain.contracts import Controlled, EvaluationContext, Evaluator, Reward
from gangline.domain.errors import EvaluatorError, GanglineError, GraderUnavailable, GradingSpoiled, TaskAtFault
from gangline.domain.plain import plain, plain_text
from gangline.domain.plain_reward import plain_reward
from gangline.domain.sandbox import Sandbox
from gangline.domain.session import HarnessExit
from gangline.machine.event_loop import is_fault

log = logging.getLogger("gangline.node")

MAX_ARTIFACT_BYTES = 8 << 20
"""Most bytes of all artifacts of an evaluator for one session."""

_UNDECIDED = (
    "without an agent's work grading fails too: the grader is broken, or needs a solution. Let it give the reward of "
    "a failure where the solution is missing or does not run; `gangline vet` tries that"
)

_T = TypeVar("_T")


async def graded(
    evaluator: Evaluator,
    context: EvaluationContext,
    start_control: Callable[[], Awaitable[tuple[Sandbox, Sandbox]]],
    *,
    budget_s: float,
) -> Reward:
    """Returns the reward of a session.

    start_control: starts clean runtimes for the control, in place of the agent's and the grader's, which may be the
    same; the caller stops them.
    budget_s: for grading, and again for the control.

    Raises: GradingSpoiled, EvaluatorError, and errors of a runtime.
    """
    try:
        return await _reward(evaluator, context, budget_s)
    except (GraderUnavailable, TaskAtFault):
        raise
    except EvaluatorError as error:
        if not (isinstance(evaluator, Controlled) and evaluator.is_controlled):
            raise
        log.info("grader.control session=%s message=%s", context.session_id, error)
        try:
            await _reward(evaluator, _without_agent(context, *await start_control()), budget_s)
        except EvaluatorError:
            raise EvaluatorError(f"{error.message}; {_UNDECIDED}") from error
        raise GradingSpoiled(f"{error.message}; without what the agent left, grading works") from error


async def _reward(evaluator: Evaluator, context: EvaluationContext, budget_s: float) -> Reward:
    """Raises: EvaluatorError, also when the evaluator returned something other than a reward."""
    out_of_time = EvaluatorError(f"no reward within its budget of {budget_s:g} s")
    try:
        return plain_reward(await within(budget_s, evaluator.evaluate(context), out_of_time))
    except (asyncio.CancelledError, SystemExit) as error:
        if not is_fault(error):
            raise
        raise GraderUnavailable(f"the evaluator ended itself: {type(error).__name__} {error}") from error


def _without_agent(context: EvaluationContext, runtime: Sandbox, graders: Sandbox) -> EvaluationContext:
    async def fresh_runtime() -> Sandbox:
        return graders

    return msgspec.structs.replace(
        context,
        trajectory=msgspec.structs.replace(context.trajectory, traces=(), num_completions=0),
        outcome="completed",
        harness_exit=HarnessExit(exit_code=0),
        harness_stdout=b"",
        runtime=runtime,
        fresh_runtime=fresh_runtime,
        is_control=True,
        artifacts={},
        kept={},
        environment_calls=(),
        environments={},
    )


def bounded(artifacts: Mapping[Any, object]) -> dict[str, bytes]:
    """Returns at most `MAX_ARTIFACT_BYTES` of an evaluator's artifacts. A shortened one has a note `NAME.cut`."""
    kept: dict[str, bytes] = {}
    room = MAX_ARTIFACT_BYTES
    for key, given in artifacts.items():
        name, data = plain_text(str(key)), given if isinstance(given, bytes) else str(plain(given)).encode()
        kept[name] = data[:room]
        if len(data) > room:
            kept[f"{name}.cut"] = f"The first {room} of {len(data)} bytes are kept.\n".encode()
        room -= len(kept[name])
    return kept


async def within(seconds: float, work: Awaitable[_T], otherwise: GanglineError) -> _T:
    """Returns the result of `work`. Raises: `otherwise` when it takes longer than `seconds`."""
    budget = asyncio.timeout(seconds)
    try:
        async with budget:
            return await work
    except TimeoutError:
        if budget.expired():
            raise otherwise from None
        raise
