"""The steps of one attempt: which of them is next, and the reward of all.

Laws
- A step without a reward ends the attempt, and the session has none: an agent that keeps a step from being graded
  would otherwise be rewarded for the steps before.
- Steps that were not reached count nowhere. A session that ended below a `min_reward` has the reward of those that
  began.
- The session's outcome, failure and exit are those of the last step that began.
- A step's reward is the score of its last turn in the main conversation, unless its evaluator scored turns itself.

Source: Harbor 0.25, `trial/multi_step.py` and `trial/trial.py` (thresholds, mean and final).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError
from gangline.domain.lifecycle import UNGRADED
from gangline.domain.task import PrepareAction, StepSpec, TaskRequest
from gangline.domain.trajectory import Trajectory
from gangline.node.sessions.failures import failure_of
from gangline.node.sessions.grading.postrun import Graded, vetting_of


class Steps:
    def __init__(self, task: TaskRequest) -> None:
        """task: one with steps."""
        self._whole = task
        self._graded: list[Graded] = []
        """One for each step that is over."""
        self._ended: str | None = None
        """Why no further step begins, where there is one."""
        self.task = task.at_step(0)
        """The present step's."""

    @property
    def number(self) -> int:
        """The present step's; 1 is the first."""
        return len(self._graded) + 1

    @property
    def prepare(self) -> Sequence[PrepareAction]:
        """The present step's actions in the agent's sandbox."""
        return self._whole.steps[len(self._graded)].prepare

    def goes_on(self, graded: Graded) -> bool:
        """Whether another step begins behind the present one, which is then the present one."""
        if self.number >= len(self._whole.steps):
            return False
        self._ended = _why_ended(self._whole.steps[self.number - 1], graded)
        if self._ended is not None:
            return False
        self._graded.append(graded)
        self.task = self._whole.at_step(len(self._graded))
        return True

    def combined(self, last: Graded) -> Graded:
        """The whole attempt. last: the present step, which is the last."""
        every = [*self._graded, last]
        artifacts = {
            f"step-{number}/{name}": data
            for number, one in enumerate(self._graded, start=1)
            for name, data in one.artifacts.items()
        }
        ends = [0, *(len(one.completions) for one in every)]
        details = {"steps": [*map(_detail, self._whole.steps, every, ends)], "step_reward": self._whole.step_reward}
        if self._ended is not None:
            details["ended_early"] = self._ended
        attempt = msgspec.structs.replace(last, artifacts=artifacts | last.artifacts, details=details)
        if last.reward is None or last.outcome in UNGRADED or last.trajectory is None:
            return _without_reward(attempt)
        values = combined_values([one.values for one in every], self._whole.step_reward)
        try:
            reward = Reward(
                reward=reward_among(values),
                details=details | {"values": values} | vetting_of(self._whole),
                turn_scores=_turn_scores(every, last.trajectory),
                values=values,
            )
            evaluators = (step.evaluator for step in self._whole.steps[: len(every)])
            return attempt.rewarded(last.trajectory, reward, *evaluators)
        except EvaluatorError as error:
            failed = _without_reward(attempt)
            failure = failure_of(error, last.trajectory.session_id)
            return msgspec.structs.replace(failed, outcome="infra_error", failure=failure)


def below_minimum(values: Mapping[str, float], minimum: float | Mapping[str, float] | None) -> str | None:
    """Why a step's numbers end its attempt; None where they do not."""
    if minimum is None:
        return None
    wanted = minimum if isinstance(minimum, Mapping) else {"reward": minimum}
    for name, least in wanted.items():
        if name not in values:
            return f"the grader gave no {name}, and min_reward is {least:g}"
        if values[name] < least:
            return f"{name} {values[name]:g} is below min_reward {least:g}"
    return None


def combined_values(steps: Sequence[Mapping[str, float]], strategy: str) -> dict[str, float]:
    """The named numbers of all steps that began: the last one's, or each one's mean, where a missing one is 0."""
    if strategy == "final":
        return dict(steps[-1])
    names = dict.fromkeys(name for values in steps for name in values)
    return {name: sum(values.get(name, 0.0) for values in steps) / len(steps) for name in names}


def reward_among(values: Mapping[str, float]) -> float:
    """The number `reward`, or the only one. Raises: EvaluatorError."""
    if "reward" in values:
        return values["reward"]
    if len(values) != 1:
        raise EvaluatorError(f"the steps' graders gave no `reward`, but {', '.join(values) or 'nothing'}.")
    return next(iter(values.values()))


def _why_ended(step: StepSpec, graded: Graded) -> str | None:
    if graded.outcome in UNGRADED or graded.reward is None:
        return f"step {step.name!r} has no reward"
    why = below_minimum(graded.values, step.min_reward)
    return None if why is None else f"step {step.name!r}: {why}"


def _without_reward(attempt: Graded) -> Graded:
    trajectory = attempt.trajectory
    if trajectory is not None:
        traces = tuple(msgspec.structs.replace(trace, reward=None) for trace in trajectory.traces)
        trajectory = msgspec.structs.replace(trajectory, traces=traces, reward=None)
    return msgspec.structs.replace(attempt, trajectory=trajectory, reward=None, values={})


def _detail(step: StepSpec, graded: Graded, num_before: int) -> dict[str, Any]:
    """num_before: completions of earlier steps."""
    found: dict[str, Any] = {
        "name": step.name,
        "outcome": graded.outcome,
        "reward": graded.reward,
        "values": graded.values,
        "details": graded.details,
        "num_completions": len(graded.completions) - num_before,
    }
    if graded.failure is not None:
        found["failure"] = msgspec.to_builtins(graded.failure)
    return found


def _turn_scores(steps: Sequence[Graded], whole: Trajectory) -> dict[str, float]:
    """completion id -> score. Each step's grading saw the turns of all steps before.

    whole: the trajectory of all steps, whose builder may have dropped turns.
    """
    kept = {span.completion_id for trace in whole.traces for span in trace.spans}
    scores: dict[str, float] = {}
    before: set[str] = set()
    for graded in steps:
        ids = [completion.completion_id for completion in graded.completions]
        traces = () if graded.trajectory is None else graded.trajectory.traces
        spans = {span.completion_id: span for trace in traces for span in trace.spans}
        own = [spans[id_] for id_ in ids if id_ not in before and id_ in spans and id_ in kept]
        given = {span.completion_id: span.score for span in own if span.score is not None}
        main = [span.completion_id for span in own if span.role == "main"]
        if not given and main and graded.reward is not None:
            given = {main[-1]: graded.reward}
        scores |= given
        before.update(ids)
    return scores
