"""Regrades a recorded session: the steps of POSTRUN in a sandbox with its kept files.

The agent does not run, no model is called for it, and nothing is delivered: the caller gets the verdict. A session
whose grading failed can be graded now; a session that never reached grading cannot.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from pydantic import ValidationError

from gangline.domain.errors import Conflict, GanglineError, InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.lifecycle import UNGRADED, Outcome
from gangline.domain.sandbox import Sandbox
from gangline.domain.session import Grading, GradingRequest, SessionResult
from gangline.domain.task import TaskRequest
from gangline.node.sessions.adoption import RunEnd
from gangline.node.sessions.failures import failure_of
from gangline.node.sessions.grading.postrun import Graded, Postrun
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.replay.files import FILES, AbsentFiles, bring_back
from gangline.node.sessions.sandboxes import Sandboxes
from gangline.node.sessions.stages import StageClock
from gangline.settings.plugins import check_task, explain
from gangline.store.journal.log import AttemptKey

log = logging.getLogger("gangline.node")


async def regrade(request: GradingRequest, parts: NodeParts) -> Grading:
    """Grade the session again, in one of POSTRUN's slots.

    Raises: InvalidRequest, UnknownPlugin, Conflict when the session was not to be graded at all.
    """
    task, recorded = _task_of(request), request.result
    if task.steps:
        raise Conflict(f"session {recorded.session_id} had steps, which cannot be graded again.")
    end = _end_of(recorded)
    key = AttemptKey(recorded.session_id, recorded.attempt)
    sandboxes = Sandboxes(AttemptKey(new_id("regrade"), recorded.attempt), task, parts)
    attempt = Graded(outcome=end.outcome, failure=end.failure, artifacts={}, trajectory=recorded.trajectory)
    log.info("session.regraded session=%s attempt=%d evaluator=%s", *key, task.evaluator.strategy)

    def broken(error: GanglineError) -> Grading:
        failure = failure_of(error, recorded.session_id)
        return _verdict(recorded, msgspec.structs.replace(attempt, outcome="infra_error", failure=failure))

    try:
        try:
            await sandboxes.bring_images()
        except GanglineError as error:
            return broken(error)
        async with parts.pools.postrun:
            try:
                runtime = await _runtime(recorded, task, sandboxes)
            except GanglineError as error:
                return broken(error)
            postrun = Postrun(key, task, parts, sandboxes, StageClock(key), task_id=recorded.task_id)
            return _verdict(recorded, await postrun.scored(attempt, end, runtime, _whole(recorded.artifacts)))
    finally:
        await asyncio.shield(sandboxes.stop())


def _task_of(request: GradingRequest) -> TaskRequest:
    """Raises: InvalidRequest, UnknownPlugin."""
    try:
        task = TaskRequest.model_validate(request.task)
    except ValidationError as error:
        raise InvalidRequest(f"task: {explain(error, TaskRequest)}") from error
    check_task(task)
    return task


def _end_of(recorded: SessionResult) -> RunEnd:
    """Returns how its RUN ended. Raises: Conflict."""
    outcome: Outcome = recorded.run_outcome or recorded.outcome
    if outcome in UNGRADED or recorded.harness_exit is None or recorded.trajectory is None:
        why = "" if recorded.failure is None else f": {recorded.failure.message}"
        raise Conflict(f"session {recorded.session_id} ended as {recorded.outcome} before it was graded{why}.")
    return RunEnd(
        outcome=outcome,
        failure=recorded.failure if recorded.run_outcome is None else None,
        harness_exit=recorded.harness_exit,
        artifacts=recorded.artifacts,
        ended_at=max((timing.ended_at for timing in recorded.timings), default=0.0),
    )


async def _runtime(recorded: SessionResult, task: TaskRequest, sandboxes: Sandboxes) -> Sandbox:
    """Returns a sandbox with the agent's files, or `AbsentFiles`. Raises: the runtime's errors."""
    archive = recorded.artifacts.get(FILES)
    if archive is None or f"{FILES}.cut" in recorded.artifacts:
        why = recorded.artifacts.get(f"{FILES}.missing", b"the task did not ask for it").decode().strip().rstrip(".")
        return AbsentFiles(recorded.session_id, task.runtime.workdir, why)
    runtime = await sandboxes.start_untouched("agent")
    await bring_back(runtime, archive)
    return runtime


def _whole(artifacts: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in artifacts.items() if f"{name}.cut" not in artifacts}


def _verdict(recorded: SessionResult, graded: Graded) -> Grading:
    traces = () if graded.trajectory is None or graded.reward is None else graded.trajectory.traces
    return Grading(
        session_id=recorded.session_id,
        task_id=recorded.task_id,
        attempt=recorded.attempt,
        outcome=graded.outcome,
        failure=graded.failure,
        reward=graded.reward,
        trace_rewards={trace.trace_id: trace.reward for trace in traces if trace.reward is not None},
        turn_scores={
            span.completion_id: span.score for trace in traces for span in trace.spans if span.score is not None
        },
        details=graded.details,
    )
