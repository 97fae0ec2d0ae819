"""Evaluation: measures the engines' weights on the same held-out tasks every time.

Means of single training steps come from a few, very different tasks. Means of the same tasks before and after can be
compared.

Laws
- A session counts only if all of its tokens were sampled by the measured weights. A session left at the service by a
  killed trainer may have run on an engine without these weights.
- Sessions requested before the trainer's restart are used if they are complete, otherwise requested again under another
  id.
- A session without a reward, or whose agent failed without an answered model call, is left out of the mean and counted;
  it is never 0.

Source: Miller, Adding error bars to evals (arXiv 2411.00640): errors clustered by task.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pydantic import Field

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.rows.measured import needs_model, why_not_measured
from gangline.train.collecting.admission import lag_of
from gangline.train.collecting.giving_up import end_of_session
from gangline.train.collecting.groups import early_ends
from gangline.train.collecting.task_stream import seeded_task
from gangline.train.options import TrainingOptions
from gangline.train.runs.records import EvaluationRecord
from gangline.wire.client.rollouts import OpenTasks, RolloutClient, named, refuse_held_out

_log = logging.getLogger("gangline.trainer")

_ASKED = {"instruction", "runtime", "agent", "evaluator"}


class EvaluationSettings(TrainingOptions):
    tasks: Path
    """Held-out tasks; a task that is also trained on is refused. Format as for `gangline submit`; relative to the
    experiment's file. Ids are replaced.
    """
    num_samples: int = Field(default=1, ge=1)
    """Sessions per task."""
    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations. None: only before the first step and after the last, which are always evaluated."""


class _Judged(NamedTuple):
    """One task's sessions."""

    rewards: list[float]
    """Rewards of the sessions that count."""
    reasons: dict[str, str]
    """session id -> why it does not count."""
    early_ends: dict[str, int]
    """See `EvaluationRecord`."""
    not_counted: SessionResult | None
    """One of the sessions that do not count."""


class Evaluation:
    """The evaluation of one run."""

    def __init__(
        self,
        run: str,
        tasks: Sequence[Mapping[str, Any]],
        service: RolloutClient,
        *,
        num_samples: int = 1,
        every: int | None = None,
        seed: int | None = None,
        retry_s: float = 0.5,
    ) -> None:
        """tasks: bodies of `POST /v1/tasks`; their ids are replaced. seed: each task gets a `capture.seed` derived from
        it and the task's number, the same every time. None leaves tasks unchanged. retry_s: seconds between retries to
        an unreachable server.

        Raises: InvalidRequest if there are no tasks.
        """
        if not tasks:
            raise InvalidRequest("there are no tasks to evaluate on: the file of held-out tasks is empty.")
        self._run = run
        self._tasks = tasks if seed is None else [seeded_task(task, seed, number) for number, task in enumerate(tasks)]
        self._open = OpenTasks(service, retry_s)
        self._num_samples = num_samples
        self._every = every

    @property
    def digest(self) -> str:
        """Digest of the tasks and their order."""
        return hashlib.sha256(msgspec.json.encode(self._tasks, order="deterministic")).hexdigest()

    def is_due(self, step: int, num_steps: int) -> bool:
        """step: number of completed steps, of `num_steps`."""
        return step == 0 or step >= num_steps or (self._every is not None and step % self._every == 0)

    def num_due(self, num_steps: int) -> int:
        """Number of evaluations in a whole run."""
        return sum(self.is_due(step, num_steps) for step in range(num_steps + 1))

    def task_id(self, step: int, version: int, index: int) -> str:
        return f"{self._run}-evaluation-{step:06d}-v{version:06d}-{index:04d}"

    async def measure(self, step: int, version: int, wall_s: float) -> EvaluationRecord:
        """Measures the weights after `step` steps, which the engines have as policy `version`. Runs all tasks at once.

        wall_s: since the run began. Raises: InvalidGroup if no session counts; the service's errors.
        """
        began = time.monotonic()
        task_ids = [self.task_id(step, version, index) for index in range(len(self._tasks))]
        judged = await self._all(task_ids, version)
        means = [float(np.mean(one.rewards)) for one in judged if one.rewards]
        if not means:
            raise InvalidGroup(_why_none(step, judged))
        num_sessions, took_s = sum(len(one.rewards) for one in judged), time.monotonic() - began
        record = EvaluationRecord(
            step=step,
            version=version,
            wall_s=wall_s + took_s,
            reward_mean=float(np.mean(means)),
            standard_error=float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else None,
            task_means=tuple(float(np.mean(one.rewards)) if one.rewards else None for one in judged),
            num_tasks=len(means),
            num_sessions=num_sessions,
            num_invalid=len(self._tasks) * self._num_samples - num_sessions,
            early_ends=dict(sum((Counter(one.early_ends) for one in judged), Counter[str]())),
            took_s=took_s,
        )
        _log.info("evaluation.measured step=%d version=%d reward=%.3f", step, version, record.reward_mean)
        return record

    async def _all(self, task_ids: list[str], version: int) -> list[_Judged]:
        """Cancels tasks at the service that were started and are no longer needed."""
        pairs = zip(self._tasks, task_ids, strict=True)
        return await self._open.all(self._one(task, task_id, version) for task, task_id in pairs)

    async def _one(self, task: Mapping[str, Any], task_id: str, version: int) -> _Judged:
        run_id, run = task_id, 1
        while True:
            body = {**task, "task_id": run_id, "num_samples": self._num_samples, "held_out": True}
            submitted = await self._open.submit(body)
            judged = _judged(await self._open.result(run_id), version, needs_model(task))
            if len(judged.rewards) == self._num_samples:
                return judged
            _log.warning("evaluation.not_whole task_id=%s reasons=%s", run_id, judged.reasons)
            if submitted.created:  # else from before a restart: its cause may have been fixed since
                return judged
            run += 1
            run_id = f"{task_id}.run{run}"


def require_disjoint(tasks: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> None:
    """Raises: InvalidRequest if a held-out task is also trained on, under any id, or if a training task is marked held
    out.
    """
    for number, task in enumerate(tasks, 1):
        refuse_held_out(named(task, task.get("task_id") or f"{number} of those to train on"))
    ids = {task["task_id"]: number for number, task in enumerate(tasks, 1) if task.get("task_id")}
    contents = {_content(task): number for number, task in enumerate(tasks, 1)}
    shared = [
        (number, trained)
        for number, task in enumerate(held_out, 1)
        if (trained := contents.get(_content(task), ids.get(task.get("task_id")))) is not None
    ]
    if shared:
        shown = ", ".join(f"held-out task {number} is task {trained}" for number, trained in shared[:3])
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise InvalidRequest(
            f"{len(shared)} of {len(held_out)} held-out tasks are trained on ({shown}{more}): they have the same "
            "content or the same id, and would measure what the model remembers. Take them out of one of the files."
        )


def _content(task: Mapping[str, Any]) -> bytes:
    """Digest of the task's instruction, runtime, agent and evaluator, with defaults filled in."""
    found = TaskRequest.model_validate(task).model_dump(mode="json", include=_ASKED)
    return hashlib.sha256(msgspec.json.encode(found, order="deterministic")).digest()


def _judged(sessions: Sequence[SessionResult], version: int, wants_model: bool) -> _Judged:
    reasons = {
        session.session_id: why
        for session in sessions
        if (why := _why_not_counted(session, version, wants_model)) is not None
    }
    rewards = [
        session.reward for session in sessions if session.session_id not in reasons and session.reward is not None
    ]
    not_counted = next((session for session in sessions if session.session_id in reasons), None)
    return _Judged(rewards, reasons, early_ends(sessions), not_counted)


def _why_not_counted(session: SessionResult, version: int, wants_model: bool) -> str | None:
    traces = () if session.trajectory is None else session.trajectory.traces
    if (why := why_not_measured(session, needs_model=wants_model)) is not None:
        return why
    return None if lag_of(traces, version) == 0 else f"its tokens are not all of policy version {version}"


def _why_none(step: int, judged: Sequence[_Judged]) -> str:
    reasons = {session_id: why for one in judged for session_id, why in one.reasons.items()}
    shown = "; ".join(f"{session_id}: {why}" for session_id, why in itertools.islice(reasons.items(), 3))
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    look = next((f" {end_of_session(one.not_counted)}" for one in judged if one.not_counted is not None), "")
    return (
        f"the evaluation after step {step} has no session with a reward ({shown or 'none has a result'}{more}).{look}\n"
        "Started again, the run evaluates again and continues."
    )
