"""The steps of one attempt: which one is next, and the reward of all.

Laws
- A step without a reward ends the attempt, and the session has no reward: otherwise an agent that keeps a step from
  being graded would be rewarded for the steps before.
- Steps that were not reached do not count. A session that ended below a `min_reward` has the reward of the steps that
  began.
- The session has the outcome, failure and exit of the last step that began.
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
        """task: must have steps."""
        self._whole = task
        self._graded: list[Graded] = []
        """One per finished step."""
        self._ended: str | None = None
        """Why no further step begins although there is one."""
        self.task = task.at_step(0)
        """The current step's."""

    @property
    def number(self) -> int:
        """Number of the current step, from 1."""
        return len(self._graded) + 1

    @property
    def prepare(self) -> Sequence[PrepareAction]:
        """The current step's actions in the agent's sandbox."""
        return self._whole.steps[len(self._graded)].prepare

    def goes_on(self, graded: Graded) -> bool:
        """Move on to the next step, if any. Returns whether there is one."""
        if self.number >= len(self._whole.steps):
            return False
        self._ended = _why_ended(self._whole.steps[self.number - 1], graded)
        if self._ended is not None:
            return False
        self._graded.append(graded)
        self.task = self._whole.at_step(len(self._graded))
        return True

    def combined(self, last: Graded) -> Graded:
        """Returns the result of the whole attempt. last: the current step, which is the last."""
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
    """Returns why a step's numbers end its attempt; None: they do not."""
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
    """Combine the named numbers of all steps that began: the last step's, or the means, where a missing number counts
    as 0."""
    if strategy == "final":
        return dict(steps[-1])
    names = dict.fromkeys(name for values in steps for name in values)
    return {name: sum(values.get(name, 0.0) for values in steps) / len(steps) for name in names}


def reward_among(values: Mapping[str, float]) -> float:
    """Returns the number `reward`, or the only number. Raises: EvaluatorError."""
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
    """Returns completion id -> score. Each step's grading saw the turns of all earlier steps.

    whole: the trajectory of all steps; its builder may have dropped turns.
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
