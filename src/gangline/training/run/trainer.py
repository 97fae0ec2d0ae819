"""The reference trainer: groups in, one step after another, new weights out. Small enough to be read.

    sync    collect a batch, train, push the weights, again: every token is of the newest policy
    async   collecting goes on while it trains; what has become too old is dropped, or corrected for by the loss

A step: take groups, make samples, update, push the weights under the next version, write the step down, save a
checkpoint, and where one is due, evaluate. Groups of one reward teach nothing: a step of nothing else has no update, no
push and no new version. Killed at any moment, it resumes from its last checkpoint: a group that those weights have seen
is not trained on again, groups that the service collected meanwhile are used, and the weights are pushed again,
regardless of the engines' current ones. Evaluated weights have a checkpoint, or are the initial ones: the evaluation of
a step uses the same weights after every restart.

Source: learning.md of the design; 003, asynchronous training.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from pydantic import Field

from gangline.domain.errors import EngineError, GanglineError, NodeError, ServerUnavailable
from gangline.training.collecting.admission import StalenessSettings, lag_histogram
from gangline.training.collecting.buffer import ReplayBuffer
from gangline.training.collecting.coalition_runs import CoalitionRuns
from gangline.training.collecting.coalitions import CoalitionSettings
from gangline.training.collecting.collector import (
    CollectionCounts,
    PlainCollector,
    ReplenishingCollector,
    informative,
)
from gangline.training.collecting.groups import Group, ValiditySettings, tokens_left_out, trainable_traces
from gangline.training.collecting.selection import Selection
from gangline.training.collecting.service import RolloutClient
from gangline.training.collecting.task_stream import TaskStream
from gangline.training.learning.algorithms import Algorithm
from gangline.training.learning.credit.coalitions import asked_coalitions, mean_shapley, player_factors
from gangline.training.learning.credit.roles import mean_role_rewards
from gangline.training.learning.credit.turns import mean_turn_score, require_turn_scores
from gangline.training.learning.mask_settings import FullMask, GroupMasks, Phase
from gangline.training.learning.samples import Mask, Sample, make_samples, over_batch
from gangline.training.options import TrainingOptions
from gangline.training.run.checkpoint import Checkpoints, TrainerState
from gangline.training.run.evaluation import Evaluation
from gangline.training.run.log import EvaluationRecord, RunLog, StepRecord
from gangline.training.run.reward_parts import mean_reward_parts
from gangline.training.weights.update import Save, UpdateProfile, WeightUpdater

__all__ = ["Learning", "ScheduleSettings", "Trainer", "Weights"]

_log = logging.getLogger("gangline.trainer")


T = TypeVar("T")

_AGAIN_S = 2.0
_LOOK_S = 5.0


class ScheduleSettings(TrainingOptions):
    mode: Literal["async", "sync"] = "async"
    steps: int = Field(default=100, ge=1)
    groups_per_step: int = Field(default=8, ge=1)
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Only async: always under way. None: as many as a step takes."""
    staleness: StalenessSettings = StalenessSettings()
    max_uses: int = Field(default=1, ge=1)
    """How often a group is trained on."""
    validity: ValiditySettings = ValiditySettings(on_invalid="resubmit")
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps. One that is evaluated, and the last, have one in any case."""
    patience_s: float = Field(default=600.0, ge=0)
    """How long engines, nodes and server may be down when weights are due."""

    @property
    def num_in_flight(self) -> int:
        """Groups under way, resolved."""
        return self.groups_in_flight or self.groups_per_step


class Learning(Protocol):
    """The object of training, such as `training.learning.learner.Learner`. Called in a thread, once at a time."""

    def step(self, samples: Sequence[Sample]) -> dict[str, float]: ...

    def reward_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Session id -> the penalty of its reward. Called before a step, where the algorithm has one."""
        ...

    def abandon(self) -> None:
        """End a running step early, by an exception; called from another thread when the run was cancelled."""
        ...

    def save_weights(self, folder: Path) -> None: ...

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...


class Weights(WeightUpdater, Protocol):
    """The destination of new weights; `ServiceWeights` is one. save: writes the weights into a folder; called in a
    thread."""

    async def latest_version(self) -> int | None:
        """The highest policy version that was ever set; None where none was."""
        ...

    async def ensure(self, version: int, save: Save) -> UpdateProfile | None:
        """Give them again to engines that lost them, as by a restart; None when none had."""
        ...


class _Learned(NamedTuple):
    """The result of a step."""

    num_one_reward: int
    num_tokens: int
    metrics: dict[str, float] | None
    """None where there was nothing to learn: the learner was not asked, for its moments alone would move weights."""


def _is_judged(sample: Sample) -> bool:
    """Under a critic, rewards that are all alike teach too."""
    return sample.rewards is not None or bool(sample.advantages.any())


def _has_signal(sample: Sample) -> bool:
    trained = sample.weights if sample.rewards is not None else sample.weights * sample.advantages
    return bool(trained.any())


class Trainer:
    """One run. `run` once."""

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
        on_step: Callable[[StepRecord], None] = lambda _: None,
        evaluation: Evaluation | None = None,
        on_evaluation: Callable[[EvaluationRecord], None] = lambda _: None,
    ) -> None:
        """folder: of the run; where there are checkpoints in it, the run goes on from the last. selection: None keeps
        whole groups. masks: None trains on every sampled token. coalitions: None shares no advantage out to players.

        evaluation: before the first step, after the last, and when it is due between them.
        """
        self._schedule = schedule
        self._algorithm = algorithm
        self._learner = learner
        self._service = service
        self._stream = stream
        self._weights = weights
        self._selection = selection or Selection()
        self._masks = masks or GroupMasks(FullMask())
        self._coalitions = coalitions
        self._on_step = on_step
        self._evaluation = evaluation
        self._on_evaluation = on_evaluation
        self._folder = folder
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._num_buffered = schedule.groups_per_step * max(schedule.staleness.max_lag, 1)
        """Enough to begin the next step with; more would only grow old."""
        self._buffer = ReplayBuffer(
            self._num_buffered + schedule.num_in_flight, schedule.staleness, max_uses=schedule.max_uses
        )
        self._changed, self._has_room = asyncio.Event(), asyncio.Event()
        """Set when a group came; when one may."""
        self._step = 0
        self._version = 0
        self._pushed = 0
        self._learner_is_used, self._engines_change = threading.Lock(), asyncio.Lock()
        self._settled = set[str]()
        self._num_stale = 0
        self._collected_rewards = list[float]()
        self._degenerate = Counter[str]()
        self._counted = CollectionCounts()
        """Counts as of the previous step."""
        self._checkpoint_s = 0.0
        self._wall_before_s = 0.0
        self._started = time.monotonic()

    @property
    def _wall_s(self) -> float:
        return self._wall_before_s + time.monotonic() - self._started

    async def run(self) -> int:
        """Until all steps are done. Returns the last policy version.

        Raises: errors of the learner or the service; a new trainer resumes from the last checkpoint.
        """
        await self._restore()
        run_log = RunLog(self._folder, last_step=self._step)
        if self._step < self._schedule.steps or self._must_evaluate(run_log):
            await self._push()
            async with self._mending():
                await self._evaluate(run_log)
                if self._step < self._schedule.steps:
                    await self._take_steps(run_log)
                    await self._evaluate(run_log)
        return self._version

    async def _take_steps(self, run_log: RunLog) -> None:
        """All that are left, and the evaluations between them."""
        async with self._collector() as collector, contextlib.aclosing(self._batches(collector)) as batches:
            waiting_since = time.monotonic()
            async for groups in batches:
                record = await self._train(groups, collector, waited_s=time.monotonic() - waiting_since)
                run_log.write(record)  # before the checkpoint: one that is too early is taken back, a lost one is lost
                self._on_step(record)
                await self._save()
                if self._step >= self._schedule.steps:
                    break  # evaluated once nothing is collected any more
                await self._evaluate(run_log)
                waiting_since = time.monotonic()

    @property
    def _evaluation_is_due(self) -> bool:
        return self._evaluation is not None and self._evaluation.is_due(self._step, self._schedule.steps)

    def _must_evaluate(self, run_log: RunLog) -> bool:
        return self._evaluation_is_due and self._step not in run_log.evaluated_steps

    async def _evaluate(self, run_log: RunLog) -> None:
        """The weights that the engines have, where it is due and an earlier life has not done it."""
        if self._evaluation is None or not self._must_evaluate(run_log):
            return
        record = await self._evaluation.measure(self._step, self._version, self._wall_s)
        run_log.write_evaluation(record)
        self._on_evaluation(record)

    async def _restore(self) -> None:
        found = await asyncio.to_thread(self._checkpoints.latest)
        served = await self._patiently(self._weights.latest_version)
        if found is None:
            self._version = 1 if served is None else served + 1  # 0 is what an engine began with
            return
        folder, state = found
        await asyncio.to_thread(self._learner.load_state, folder)
        self._step, self._wall_before_s = state.step, state.wall_s
        self._settled = set(state.settled)
        self._buffer.restore(state.buffer)
        # Versions never go back: what engines sampled after this checkpoint keeps numbers of its own.
        self._version = state.version if served is None or served <= state.version else served + 1
        _log.info("trainer.resumed step=%d version=%d", self._step, self._version)

    def _collector(self) -> PlainCollector | ReplenishingCollector:
        tasks, validity = self._stream.tasks(frozenset(self._settled)), self._schedule.validity
        service, coalitions = self._service, self._coalition_runs()
        if self._schedule.mode == "sync":
            return PlainCollector(service, tasks, validity=validity, admit=self._admit, coalitions=coalitions)
        return ReplenishingCollector(
            service,
            tasks,
            num_in_flight=self._schedule.num_in_flight,
            validity=validity,
            admit=self._admit,
            coalitions=coalitions,
        )

    def _coalition_runs(self) -> CoalitionRuns | None:
        if (settings := self._coalitions) is None:
            return None
        return CoalitionRuns(
            self._service,
            settings,
            lambda task_id: asked_coalitions(task_id, settings),
            validity=self._schedule.validity,
            reward=self._selection.reward,
        )

    def _admit(self, group: Group) -> Group | None:
        self._collected_rewards += group.rewards
        self._stream.measure(group.task_id, group.rewards)
        selected = self._selection.select(group, self._degenerate)
        admitted = informative(selected) if selected is not None and self._algorithm.dynamic_sampling else selected
        if admitted is None:
            self._settle(group.task_id)
        return admitted

    def _settle(self, task_id: str) -> None:
        self._settled.add(task_id.partition(".run")[0])  # of a task that was run again, the first id is asked for

    async def _batches(self, collector: PlainCollector | ReplenishingCollector) -> AsyncGenerator[list[Group]]:
        """The groups of each step, without end."""
        if isinstance(collector, PlainCollector):
            while True:
                missing = self._schedule.groups_per_step - len(self._buffer)
                for group in await collector.collect(missing):
                    self._buffer.add(group)
                if (groups := self._take()) is not None:
                    yield groups
        feeding = asyncio.create_task(self._feed(collector))
        try:
            while True:
                while (groups := self._take()) is None:
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait())
                    await asyncio.wait({changed, feeding}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                    if feeding.done():
                        await feeding  # it only ends by an error
                yield groups
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self, collector: ReplenishingCollector) -> None:
        while True:
            while len(self._buffer) >= self._num_buffered:
                self._has_room.clear()
                await self._has_room.wait()
            for group in await collector.collect(1):
                self._buffer.add(group)
                self._changed.set()

    def _take(self) -> list[Group] | None:
        """The next step's groups, once there are enough fresh ones."""
        before = self._buffer.task_ids
        self._num_stale += self._buffer.drop_stale(self._version)
        groups = self._buffer.take(self._schedule.groups_per_step, self._version)
        for task_id in before - self._buffer.task_ids:
            self._settle(task_id)
        self._has_room.set()
        return groups

    async def _train(
        self, groups: Sequence[Group], collector: PlainCollector | ReplenishingCollector, *, waited_s: float
    ) -> StepRecord:
        """One step; its weights are in the engines when it returns. One without a signal keeps weights and version."""
        version, began = self._version, time.monotonic()
        try:
            learned = await asyncio.to_thread(self._learn, groups)
        except asyncio.CancelledError:
            self._learner.abandon()  # else the process could not end before the step does
            raise
        trained_s = time.monotonic() - began
        self._step += 1
        update = None
        if learned.metrics is not None:
            self._version += 1
            update = await self._push()
        rewards = [reward for group in groups for reward in group.rewards]
        traces = [trace for group in groups for session in group.sessions for trace in trainable_traces(session)]
        record = StepRecord(
            step=self._step,
            version=version,
            wall_s=self._wall_s,
            reward_mean=float(np.mean(rewards)),
            reward_deviation=float(np.mean([group.deviation for group in groups])),
            collected_reward_mean=float(np.mean(self._collected_rewards)) if self._collected_rewards else None,
            num_groups=len(groups),
            num_one_reward=learned.num_one_reward,
            num_sessions=sum(len(group.sessions) for group in groups),
            num_trained_tokens=learned.num_tokens,
            turn_score_mean=mean_turn_score(groups),
            role_reward_mean=mean_role_rewards(groups),
            shapley={} if self._coalitions is None else mean_shapley(groups, self._coalitions),
            num_coalition_sessions=sum(group.coalitions.num_sessions for group in groups if group.coalitions),
            reward_parts=mean_reward_parts(session for group in groups for session in group.sessions),
            sampler=self._stream.sampler_metrics(group.task_id for group in groups),
            degenerate=dict(self._degenerate),
            left_out=tokens_left_out(session for group in groups for session in group.sessions),
            lag=lag_histogram(traces, version),
            num_not_admitted=collector.counts.not_admitted - self._counted.not_admitted,
            num_invalid=collector.counts.invalid - self._counted.invalid,
            num_stale=self._num_stale,
            waited_s=waited_s,
            trained_s=trained_s,
            checkpoint_s=self._checkpoint_s,
            update=update,
            learner=learned.metrics or {},
        )
        self._counted = dataclasses.replace(collector.counts)
        self._num_stale, self._collected_rewards, self._degenerate = 0, [], Counter[str]()
        return record

    async def _push(self) -> UpdateProfile:
        """Until every engine has them. Raises: the error of the last attempt."""

        async def push() -> UpdateProfile:
            async with self._engines_change:
                profile = await self._weights.push(self._save_weights, self._version)
                self._pushed = self._version
                return profile

        return await self._patiently(push)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Engines, nodes and server may be down for a while. Raises: the error of the last attempt."""
        ends_at = time.monotonic() + self._schedule.patience_s
        while True:
            try:
                return await call()
            except (EngineError, NodeError, ServerUnavailable) as error:
                if time.monotonic() > ends_at:
                    raise
                _log.warning("trainer.waits step=%d error=%s; trying again", self._step, error)
                await asyncio.sleep(_AGAIN_S)

    @contextlib.asynccontextmanager
    async def _mending(self) -> AsyncGenerator[None]:
        """Meanwhile, an engine that was started again gets the weights that it lost."""
        mending = asyncio.create_task(self._mend())
        try:
            yield
        finally:
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)

    async def _mend(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                async with self._engines_change:
                    mended = await self._weights.ensure(self._pushed, self._save_weights)
                if mended is not None:
                    _log.warning("trainer.weights_given_again version=%d", mended.version)
            except GanglineError as error:
                _log.warning("trainer.engines_not_asked error=%s", error)

    def _save_weights(self, folder: Path) -> None:
        with self._learner_is_used:
            self._learner.save_weights(folder)

    def _learn(self, groups: Sequence[Group]) -> _Learned:
        self._check_turn_scores(groups)
        masks = [self._masks.mask(group, self._phase(group)) for group in groups]
        by_group = self._samples(groups, masks, {})
        if self._algorithm.reward_kl.coefficient > 0:
            with self._learner_is_used:
                penalties = self._learner.reward_penalties([one for mine in by_group for one in mine])
            by_group = self._samples(groups, masks, penalties)
        samples = over_batch([sample for mine in by_group for sample in mine], self._algorithm.advantage)
        ends = itertools.accumulate(map(len, by_group))
        num_one_reward = sum(
            not any(map(_is_judged, samples[end - len(mine) : end])) for mine, end in zip(by_group, ends, strict=True)
        )
        num_tokens = sum(int(np.count_nonzero(sample.weights)) for sample in samples)
        if not num_tokens or not (any(map(_has_signal, samples)) or self._algorithm.moves_all_tokens):
            return _Learned(num_one_reward, 0, None)
        with self._learner_is_used:
            return _Learned(num_one_reward, num_tokens, self._learner.step(samples))

    def _samples(
        self, groups: Sequence[Group], masks: Sequence[Mask], penalties: Mapping[str, float]
    ) -> list[list[Sample]]:
        """Samples of each group. penalties: session id -> subtracted from its reward."""
        return [
            make_samples(group, self._algorithm, mask, self._factors(group), penalties=penalties)
            for group, mask in zip(groups, masks, strict=True)
        ]

    def _factors(self, group: Group) -> dict[str, float]:
        return {} if self._coalitions is None else player_factors(group, self._coalitions)

    def _check_turn_scores(self, groups: Sequence[Group]) -> None:
        """Raises: InvalidGroup."""
        if self._masks.needs_turn_scores:
            require_turn_scores(groups, "mask.kind turn_selective")
        if self._algorithm.turn_credit.weight > 0:
            require_turn_scores(groups, "turn_credit.weight")
        if self._algorithm.turn_credit.returns is not None:
            require_turn_scores(groups, "turn_credit.returns")

    def _phase(self, group: Group) -> Phase:
        return Phase(self._step, self._stream.epoch_of(group.task_id))

    async def _save(self) -> None:
        """A checkpoint, where one is due."""
        self._checkpoint_s = 0.0
        is_due = self._step % self._schedule.checkpoint_every == 0 or self._step >= self._schedule.steps
        if not is_due and not self._evaluation_is_due:
            return
        began = time.monotonic()
        state = TrainerState(
            step=self._step,
            version=self._version,
            settled=frozenset(self._settled),
            buffer=self._buffer.state,
            wall_s=self._wall_s,
        )
        await asyncio.to_thread(self._checkpoints.save, state, self._learner.save_state)
        self._checkpoint_s = time.monotonic() - began
