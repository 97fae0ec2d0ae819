"""The reference trainer: collects groups, trains step by step, and pushes new weights. Small enough to read.

    sync    collect a batch, train, push the weights, repeat: every token is from the newest policy
    async   collection continues during training; tokens that are too old are dropped, or corrected by the loss

A step: take groups, make samples, update, push the weights under the next version, record the step, save a checkpoint,
and evaluate if due. Groups whose rewards are all equal teach nothing: a step with only such groups has no update, no
push and no new version. Killed at any moment, it resumes from its last checkpoint: a group that those weights were
trained on is not used again, groups that the service collected meanwhile are used, and the weights are pushed again,
whatever weights the engines have. Evaluated weights have a checkpoint, or are the initial ones: the evaluation of a
step uses the same weights after every restart.

Parts of rewards, as reported by the evaluators `composite` and `staged`, are averaged over the sessions of a step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from gangline.domain.session import SessionResult
from gangline.train.collecting.admission import lag_histogram
from gangline.train.collecting.batches import Batches
from gangline.train.collecting.collector import Admit, informative
from gangline.train.collecting.groups import Group, early_ends, tokens_left_out, trainable_traces
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.selection import Selection
from gangline.train.collecting.side_rollouts.coalition_runs import CoalitionRuns
from gangline.train.collecting.side_rollouts.coalitions import CoalitionSettings
from gangline.train.collecting.side_rollouts.greedy_runs import GreedyRuns
from gangline.train.collecting.side_rollouts.tasks import Beside
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.credit.coalitions import asked_coalitions, mean_shapley
from gangline.train.learning.credit.parts import found_parts, parts_differ
from gangline.train.learning.credit.roles import mean_role_rewards
from gangline.train.learning.credit.turns import mean_turn_score
from gangline.train.learning.mask_settings import FullMask, GroupMasks, Phase
from gangline.train.run.checkpoint import Checkpoints, TrainerState, checkpoint_digest
from gangline.train.run.evaluation import Evaluation
from gangline.train.run.lessons import Learning, Lessons
from gangline.train.run.lineage import weights_digest
from gangline.train.run.teacher import Teacher
from gangline.train.runs.log import RunLog
from gangline.train.runs.records import CheckpointRecord, EvaluationRecord, StepRecord
from gangline.train.weights.upkeep import Weights, WeightsUpkeep
from gangline.wire.client.rollouts import RolloutClient

_log = logging.getLogger("gangline.trainer")


def mean_reward_parts(sessions: Iterable[SessionResult]) -> dict[str, float]:
    """Name -> mean reward of a part of `composite`, or share of sessions that passed a gate of `staged`.

    Names of nested parts are joined by dots. A gate skipped because an earlier one failed counts as failed.
    """
    sums: dict[str, float] = {}
    num_asked, num_staged, level_of = Counter[str](), Counter[str](), dict[str, str]()
    for session in sessions:
        for level, name, value in found_parts(session.reward_details):
            if name is None:
                num_staged[level] += 1
                continue
            sums[name] = sums.get(name, 0.0) + value
            num_asked[name] += 1
            level_of[name] = level
    return {name: total / (num_staged[level_of[name]] or num_asked[name]) for name, total in sums.items()}


class Trainer:
    """One run. Call `run` once."""

    def __init__(
        self,
        folder: Path,
        *,
        schedule: ScheduleSettings,
        algorithm: Algorithm,
        learner: Learning,
        service: RolloutClient,
        stream: TaskStream,
        weights: Weights,
        selection: Selection | None = None,
        masks: GroupMasks | None = None,
        coalitions: CoalitionSettings | None = None,
        teacher: Teacher | None = None,
        on_step: Callable[[StepRecord], None] = lambda _: None,
        evaluation: Evaluation | None = None,
        on_evaluation: Callable[[EvaluationRecord], None] = lambda _: None,
    ) -> None:
        """folder: of the run; where there are checkpoints in it, the run continues from the last. selection: None keeps
        whole groups. masks: None trains on every sampled token. coalitions: None shares no advantage out to players.

        teacher: of an algorithm with `has_teacher`.
        evaluation: runs before the first step, after the last, and when due in between.
        """
        selection = selection or Selection()
        self._folder = folder
        self._schedule = schedule
        self._stream = stream
        self._coalitions = coalitions
        self._lessons = Lessons(learner, algorithm, masks or GroupMasks(FullMask()), coalitions, teacher)
        self._batches = Batches(
            schedule,
            service,
            stream,
            current_version=lambda: self._version,
            selection=selection,
            informative=_informative(algorithm),
            beside=_beside(service, algorithm, coalitions, schedule, selection),
        )
        self._weights = WeightsUpkeep(weights, self._lessons.save_weights, patience_s=schedule.patience_s)
        self._on_step = on_step
        self._evaluation = evaluation
        self._on_evaluation = on_evaluation
        self._checkpoints = Checkpoints(folder / "checkpoints", keep=schedule.keep_checkpoints)
        self._checkpoint_s = 0.0
        self._step = 0
        self._version = 0
        self._started = time.monotonic()
        """Shifted back by the time that earlier starts of the run took."""

    @property
    def _wall_s(self) -> float:
        return time.monotonic() - self._started

    async def run(self) -> int:
        """Run until all steps are done. Returns the last policy version.

        Raises: errors of the learner or the service; a new trainer resumes from the last checkpoint.
        """
        await self._restore()
        run_log = RunLog(self._folder, last_step=self._step)
        if self._step < self._schedule.steps or self._must_evaluate(run_log):
            await self._weights.push(self._version)
            async with self._weights.mending():
                await self._evaluate(run_log)
                if self._step < self._schedule.steps:
                    await self._take_steps(run_log)
                    await self._evaluate(run_log)
        return self._version

    async def _take_steps(self, run_log: RunLog) -> None:
        """All remaining steps, and the evaluations between them."""
        async with self._batches as batches:
            while True:
                began = time.monotonic()
                groups = await batches.next()
                record = await self._train(groups, waited_s=time.monotonic() - began)
                run_log.write(record)  # before the checkpoint: a restart can drop a record, not restore a lost one
                self._on_step(record)
                await self._save(run_log)
                if self._step >= self._schedule.steps:
                    break  # evaluated after collecting ends
                await self._evaluate(run_log)

    @property
    def _evaluation_is_due(self) -> bool:
        return self._evaluation is not None and self._evaluation.is_due(self._step, self._schedule.steps)

    def _must_evaluate(self, run_log: RunLog) -> bool:
        return self._evaluation_is_due and self._step not in run_log.evaluated_steps

    async def _evaluate(self, run_log: RunLog) -> None:
        """Evaluate the engines' weights, if due and not already done before a restart."""
        if self._evaluation is None or not self._must_evaluate(run_log):
            return
        record = await self._evaluation.measure(self._step, self._version, self._wall_s)
        run_log.write_evaluation(record)
        self._on_evaluation(record)

    async def _restore(self) -> None:
        found = await asyncio.to_thread(self._checkpoints.latest)
        served = await self._weights.latest_version()
        if found is None:
            self._version = 1 if served is None else served + 1  # 0 is the engine's initial version
            return
        folder, state = found
        await asyncio.to_thread(self._lessons.learner.load_state, folder)
        self._step = state.step
        self._started -= state.wall_s
        self._batches.restore(state.settled, state.buffer)
        # Versions never decrease, so tokens sampled after this checkpoint keep distinct version numbers.
        self._version = state.version if served is None or served <= state.version else served + 1
        _log.info("trainer.resumed step=%d version=%d", self._step, self._version)

    async def _train(self, groups: Sequence[Group], *, waited_s: float) -> StepRecord:
        """One step. When it returns, the engines have its weights. A step without a signal keeps weights and
        version.
        """
        version, began = self._version, time.monotonic()
        try:
            scores = await self._lessons.scores(groups)
            learned = await asyncio.to_thread(self._lessons.learn, groups, self._phase, scores)
        except asyncio.CancelledError:
            self._lessons.learner.abandon()  # else the process could not exit before the step ends
            raise
        trained_s = time.monotonic() - began
        self._step += 1
        update = None
        if learned.metrics is not None:
            self._version += 1
            update = await self._weights.push(self._version)
        rewards = [reward for group in groups for reward in group.rewards]
        sessions = [session for group in groups for session in group.sessions]
        collected = self._batches.take_counts()
        return StepRecord(
            step=self._step,
            version=version,
            wall_s=self._wall_s,
            reward_mean=float(np.mean(rewards)),
            reward_deviation=float(np.mean([group.deviation for group in groups])),
            collected_reward_mean=collected.reward_mean,
            groups=tuple(group.task_id for group in groups),
            num_groups=len(groups),
            num_one_reward=learned.num_one_reward,
            num_sessions=len(sessions),
            num_sampled_tokens=collected.num_sampled_tokens,
            early_ends=early_ends(sessions),
            num_trained_tokens=learned.num_tokens,
            turn_score_mean=mean_turn_score(groups),
            role_reward_mean=mean_role_rewards(groups),
            shapley={} if self._coalitions is None else mean_shapley(groups, self._coalitions),
            num_coalition_sessions=sum(group.coalitions.num_sessions for group in groups if group.coalitions),
            reward_parts=mean_reward_parts(sessions),
            sampler=self._stream.sampler_metrics(group.task_id for group in groups),
            degenerate=collected.degenerate,
            left_out=tokens_left_out(sessions),
            lag=lag_histogram([trace for session in sessions for trace in trainable_traces(session)], version),
            num_not_admitted=collected.num_not_admitted,
            num_invalid=collected.num_invalid,
            num_stale=collected.num_stale,
            waited_s=waited_s,
            trained_s=trained_s,
            checkpoint_s=self._checkpoint_s,
            update=update,
            learner=learned.metrics or {},
        )

    def _phase(self, group: Group) -> Phase:
        return Phase(self._step, self._stream.epoch_of(group.task_id))

    async def _save(self, run_log: RunLog) -> None:
        """Save a checkpoint, if due, and its record."""
        self._checkpoint_s = 0.0
        is_due = self._step % self._schedule.checkpoint_every == 0 or self._step >= self._schedule.steps
        if not is_due and not self._evaluation_is_due:
            return
        began = time.monotonic()
        state = TrainerState(
            step=self._step,
            version=self._version,
            settled=self._batches.settled,
            buffer=self._batches.buffer_state,
            wall_s=self._wall_s,
        )
        folder = await asyncio.to_thread(self._checkpoints.save, state, self._lessons.learner.save_state)
        pushed = self._weights.folder
        record = CheckpointRecord(
            step=self._step,
            version=self._version,
            digest=checkpoint_digest(folder),
            weights_digest=await asyncio.to_thread(weights_digest, Path(pushed)) if pushed else "",
        )
        run_log.write_checkpoint(record)
        self._checkpoint_s = time.monotonic() - began


def _informative(algorithm: Algorithm) -> Admit | None:
    """The rule of dynamic sampling: admits groups whose rewards, or one of their compared parts, differ."""
    if not algorithm.dynamic_sampling:
        return None
    if algorithm.advantage.rewards == "whole":
        return informative
    names = tuple(algorithm.advantage.part_weights)
    return lambda group: group if parts_differ(group, names) else None


def _beside(
    service: RolloutClient,
    algorithm: Algorithm,
    coalitions: CoalitionSettings | None,
    schedule: ScheduleSettings,
    selection: Selection,
) -> Beside:
    validity, reward = schedule.validity, selection.reward
    is_greedy = algorithm.advantage.baseline == "greedy"
    return Beside(
        coalitions=None
        if coalitions is None
        else CoalitionRuns(
            service,
            coalitions,
            lambda task_id: asked_coalitions(task_id, coalitions),
            validity=validity,
            reward=reward,
        ),
        greedy=GreedyRuns(service, validity=validity, reward=reward) if is_greedy else None,
    )
