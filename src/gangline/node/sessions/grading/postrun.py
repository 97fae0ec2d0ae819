"""POSTRUN of one attempt: traces are built from its calls, and the outcome is graded.

A reward is given by the evaluator or not at all. No session is scored because *we* broke.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.environment import GradedEnvironment
from gangline.domain.errors import BuilderError, Failure, GradingSpoiled
from gangline.domain.lifecycle import UNGRADED, Outcome
from gangline.domain.sandbox import Sandbox, SideServices
from gangline.domain.task import EvaluatorSpec, TaskRequest, vetted_digest
from gangline.domain.trajectory import Trajectory
from gangline.node.environments.session_environments import RECORD, recorded_calls
from gangline.node.sessions.adoption import RunEnd, annotate
from gangline.node.sessions.evaluation import bounded, graded, within
from gangline.node.sessions.failures import failure_of, log_failed
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.sandboxes import Sandboxes
from gangline.node.sessions.stages import StageClock
from gangline.rows.chains import built
from gangline.rows.rewards import apply_reward, lowered_where_unparsed
from gangline.settings import plugins
from gangline.store.journal.log import AttemptKey

log = logging.getLogger("gangline.node")


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt after POSTRUN."""

    outcome: Outcome
    failure: Failure | None
    artifacts: dict[str, bytes]
    completions: tuple[Completion, ...] = ()
    trajectory: Trajectory | None = None
    reward: float | None = None
    details: dict[str, Any] = {}
    """The evaluator's details about its reward."""
    values: dict[str, float] = {}
    """All numbers from the evaluator, by name; empty without a reward."""

    def rewarded(self, trajectory: Trajectory, found: Reward, *evaluators: EvaluatorSpec) -> Graded:
        """Returns the attempt with its reward applied.

        evaluators: specs of the reward's evaluators, for `on_unparsed`.

        Raises: EvaluatorError when the reward does not fit the trajectory.
        """
        limits = [evaluator.on_unparsed for evaluator in evaluators if evaluator.on_unparsed != "keep"]
        if limits:
            found = lowered_where_unparsed(found, trajectory, min(limits))
        return msgspec.structs.replace(
            self,
            trajectory=apply_reward(trajectory, found),
            reward=found.reward,
            details=found.details,
            values=found.values or {"reward": found.reward},
        )


class Postrun:
    """Run `graded()` once, or `scored()` for a session whose traces are already recorded."""

    def __init__(
        self,
        key: AttemptKey,
        task: TaskRequest,
        parts: NodeParts,
        sandboxes: Sandboxes,
        stages: StageClock,
        *,
        task_id: str,
        environments: Mapping[str, GradedEnvironment] | None = None,
    ) -> None:
        """environments: the session's environments; None if they have ended."""
        self._key = key
        self._environments = environments or {}
        self._task_id = task_id
        self._task = task
        self._parts = parts
        self._journal = parts.journal
        self._sandboxes = sandboxes
        self._stages = stages

    async def graded(self, end: RunEnd) -> Graded:
        """Build the traces, and grade if a model was called and the node did not fail. Raises only CancelledError."""
        attempt = Graded(outcome=end.outcome, failure=end.failure, artifacts=end.artifacts)
        try:
            completions = tuple(await self._journal.read(self._key))
            attempt = msgspec.structs.replace(attempt, completions=completions)
            trajectory = await self._built(completions) if completions else None
            attempt = msgspec.structs.replace(attempt, trajectory=trajectory)
        except Exception as error:
            return self._failed(attempt, error)
        if end.outcome in UNGRADED:
            return attempt
        assert self._sandboxes.agent is not None
        return await self.scored(attempt, end, self._sandboxes.agent)

    def _failed(self, attempt: Graded, error: Exception) -> Graded:
        failure = failure_of(error, self._key.session_id)
        log_failed(self._key, self._stages.stage, failure)
        return msgspec.structs.replace(attempt, outcome="infra_error", failure=failure)

    async def _built(self, completions: Sequence[Completion]) -> Trajectory:
        """Raises: BuilderError."""
        builder = plugins.make_builder(self._task.builder.strategy, self._task.builder.config)
        budget_s = self._task.evaluation_timeout_seconds
        building = asyncio.to_thread(
            built, builder, completions, session_id=self._key.session_id, task_id=self._task_id
        )
        return await within(
            budget_s, building, BuilderError(f"no trajectory within the evaluation's budget of {budget_s:g} s")
        )

    async def scored(
        self, attempt: Graded, end: RunEnd, runtime: Sandbox, kept: Mapping[str, bytes] | None = None
    ) -> Graded:
        """Grade an attempt that has its traces. Raises only CancelledError.

        runtime: the agent's.
        kept: for a recorded session, the evaluator's artifacts from the earlier grading.
        """
        trajectory = attempt.trajectory or self._empty_trajectory()
        attempt = msgspec.structs.replace(attempt, trajectory=trajectory)
        left: dict[str, bytes] = {}
        """The evaluator's artifacts."""
        try:
            context = self._context(trajectory, end, runtime, left, kept or {})
            graded = attempt.rewarded(trajectory, await self._evaluate(context), self._task.evaluator)
            attempt = msgspec.structs.replace(graded, details=graded.details | vetting_of(self._task))
        except GradingSpoiled as error:
            attempt = self._spoiled(attempt, trajectory, error)
        except Exception as error:
            attempt = self._failed(attempt, error)
        return msgspec.structs.replace(attempt, artifacts=bounded(left) | attempt.artifacts)

    def _spoiled(self, attempt: Graded, trajectory: Trajectory, error: GradingSpoiled) -> Graded:
        """The session counts as the agent's failure, not as ours."""
        log.warning("session.grading_spoiled session=%s attempt=%d message=%s", *self._key, error.message)
        details, on_failure = {"grading_failed": error.message}, self._task.evaluator.on_failure
        outcome = "agent_error" if attempt.outcome == "completed" else attempt.outcome
        attempt = msgspec.structs.replace(attempt, outcome=outcome, failure=error.failure(), details=details)
        return (
            attempt
            if on_failure == "none"
            else attempt.rewarded(trajectory, Reward(reward=on_failure, details=details), self._task.evaluator)
        )

    def _context(
        self,
        trajectory: Trajectory,
        end: RunEnd,
        runtime: Sandbox,
        artifacts: dict[str, bytes],
        kept: Mapping[str, bytes],
    ) -> EvaluationContext:
        assert end.harness_exit is not None
        return EvaluationContext(
            session_id=self._key.session_id,
            instruction=self._task.instruction,
            trajectory=trajectory,
            outcome=end.outcome,
            harness_exit=end.harness_exit,
            harness_stdout=end.artifacts.get("harness.stdout", b""),
            runtime=runtime,
            fresh_runtime=self._sandboxes.clean,
            refresh_runtime=self._task.evaluator.refresh_runtime,
            metadata=self._task.metadata,
            artifacts=artifacts,
            kept=kept,
            engines=self._parts.engines_for_graders(),
            services_of=self._services_of,
            functions=self._parts.reward_functions,
            environment_calls=recorded_calls(end.artifacts) if RECORD in end.artifacts else (),
            environments=self._environments,
            verdicts=self._parts.verdicts,
            task_digest=vetted_digest(self._task),
            graded_before=self._parts.graded_before,
            child_work=self._parts.child_work,
        )

    def _services_of(self, sandbox: Sandbox) -> SideServices | None:
        spec = self._task.runtime
        runtime = plugins.make_runtime(spec.backend) if spec.services else None
        return None if runtime is None else runtime.services_of(sandbox.runtime_id, spec)

    async def _evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: GradingSpoiled, EvaluatorError, UnknownPlugin, and a runtime's errors."""
        if not context.refresh_runtime:
            await annotate(context.runtime, None)  # grading that changes the agent's sandbox must not run twice
        evaluator = plugins.make_evaluator(self._task.evaluator.strategy, self._task.evaluator.config)
        budget_s, init_s = self._task.evaluation_timeout_seconds, self._task.init_timeout_seconds
        if context.refresh_runtime:
            self._stages.allow(2 * init_s)
            await asyncio.wait({self._sandboxes.fresh()})
        self._stages.allow(budget_s)

        def start_control() -> Coroutine[Any, Any, tuple[Sandbox, Sandbox]]:
            self._stages.allow(2 * init_s + budget_s)
            return self._sandboxes.start_control()

        return await graded(evaluator, context, start_control, budget_s=budget_s)

    def _empty_trajectory(self) -> Trajectory:
        """Returns the trajectory of an agent that never called its model."""
        return Trajectory(
            session_id=self._key.session_id,
            task_id=self._task_id,
            builder=self._task.builder.strategy,
            traces=(),
            num_completions=0,
        )


def vetting_of(task: TaskRequest) -> dict[str, Any]:
    """Returns the verdict on the task, as evidence of a reward; empty if the task was not audited."""
    if (found := task.vetting) is None:
        return {}
    verdict = found.verdict if found.digest == vetted_digest(task) else "stale"
    return {"vetting": {"verdict": verdict, "digest": found.digest, "vetted_at": found.vetted_at}}
