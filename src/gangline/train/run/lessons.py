"""One learning step: builds samples from groups with masks and advantages, and updates the learner."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from gangline.domain.errors import InvalidGroup
from gangline.domain.tokens import Logprobs
from gangline.train.collecting.groups import Group
from gangline.train.collecting.side_rollouts.coalitions import CoalitionSettings
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.credit.coalitions import player_factors
from gangline.train.learning.credit.turns import require_turn_scores
from gangline.train.learning.mask_settings import GroupMasks, Phase
from gangline.train.learning.samples import Mask, Sample, make_samples, over_batch, resampled
from gangline.train.run.teacher import Teacher


class Learning(Protocol):
    """The object that is trained, such as `training.learning.learner.Learner`. Called in a thread, one call at a
    time.
    """

    def step(self, samples: Sequence[Sample]) -> dict[str, float]: ...

    def reward_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Session id -> penalty of its reward. Called before a step if the algorithm has such a penalty."""
        ...

    def abandon(self) -> None:
        """End a running step early with an exception. Called from another thread when the run is cancelled."""
        ...

    def save_weights(self, folder: Path) -> None: ...

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...


class Learned(NamedTuple):
    """The result of a step."""

    num_one_reward: int
    num_tokens: int
    metrics: dict[str, float] | None
    """None if there was nothing to learn. The learner is then not called, because its moments alone would change
    weights.
    """


class Lessons:
    """masks: select the tokens to train on. coalitions: None distributes no advantage to players. teacher: None for
    algorithms without one.
    """

    def __init__(
        self,
        learner: Learning,
        algorithm: Algorithm,
        masks: GroupMasks,
        coalitions: CoalitionSettings | None,
        teacher: Teacher | None,
    ) -> None:
        self.learner = learner
        self._teacher = teacher
        self._algorithm = algorithm
        self._masks = masks
        self._coalitions = coalitions
        self._learner_is_used = threading.Lock()

    def save_weights(self, folder: Path) -> None:
        """Write the weights between two updates. Blocking, callable from any thread."""
        with self._learner_is_used:
            self.learner.save_weights(folder)

    async def scores(self, groups: Sequence[Group]) -> Mapping[str, Logprobs] | None:
        """The teacher's log-probs for `learn`. Raises: as `Teacher.logprobs`."""
        return None if self._teacher is None else await self._teacher.logprobs(groups)

    def learn(
        self,
        groups: Sequence[Group],
        phase_of: Callable[[Group], Phase],
        scores: Mapping[str, Logprobs] | None = None,
    ) -> Learned:
        """Update the learner once. Blocking. scores: trace id -> log-probs [T] of the response, NaN where unknown.

        Raises: InvalidGroup, the learner's errors.
        """
        self._check_turn_scores(groups)
        masks = [_where_scored(self._masks.mask(group, phase_of(group)), scores) for group in groups]
        by_group = self._samples(groups, masks, {})
        if self._algorithm.reward_kl.coefficient > 0:
            with self._learner_is_used:
                penalties = self.learner.reward_penalties([one for mine in by_group for one in mine])
            by_group = self._samples(groups, masks, penalties)
        samples = over_batch([sample for mine in by_group for sample in mine], self._algorithm.advantage)
        samples = _taught(resampled(samples, self._algorithm.resampling), scores)
        ends = itertools.accumulate(map(len, by_group))
        num_one_reward = sum(
            not any(map(_is_judged, samples[end - len(mine) : end])) for mine, end in zip(by_group, ends, strict=True)
        )
        num_tokens = sum(int(np.count_nonzero(sample.weights)) for sample in samples)
        if not num_tokens or not (any(map(_has_signal, samples)) or self._algorithm.moves_all_tokens):
            return Learned(num_one_reward, 0, None)
        with self._learner_is_used:
            return Learned(num_one_reward, num_tokens, self.learner.step(samples))

    def _samples(
        self, groups: Sequence[Group], masks: Sequence[Mask], penalties: Mapping[str, float]
    ) -> list[list[Sample]]:
        """Samples of each group. penalties: session id -> penalty subtracted from its reward."""
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


def _where_scored(mask: Mask, teacher: Mapping[str, Logprobs] | None) -> Mask:
    return mask if teacher is None else lambda trace: mask(trace) * np.isfinite(teacher[trace.trace_id])


def _taught(samples: Sequence[Sample], teacher: Mapping[str, Logprobs] | None) -> list[Sample]:
    """With the teacher's log-probs. Raises: InvalidGroup."""
    if teacher is None:
        return list(samples)
    for sample in samples:
        if (other := sample.temperatures[(sample.weights != 0) & (sample.temperatures != 1)]).size:
            raise InvalidGroup(
                f"tokens of {sample.trace_id} were sampled at temperature {other[0]:g}, and a teacher's log-probs are "
                "of temperature 1. Give the tasks `capture.sampling.temperature.override: 1`."
            )
    return [replace(one, teacher_logprobs=np.nan_to_num(teacher[one.trace_id], neginf=0.0)) for one in samples]


def _is_judged(sample: Sample) -> bool:
    """With a critic, equal rewards teach too."""
    return sample.rewards is not None or bool(sample.advantages.any())


def _has_signal(sample: Sample) -> bool:
    trained = sample.weights if sample.rewards is not None else sample.weights * sample.advantages
    return bool(trained.any())
