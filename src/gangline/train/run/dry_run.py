"""A dry run: measures the spread of rewards under the current weights before training.

A group whose sessions all have the same reward teaches nothing. A few groups show how many differ and by how much, and
so whether a task set, a reward or a model is worth a run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from gangline.domain.session import SessionResult
from gangline.train.collecting.groups import Group, tokens_left_out, trainable_traces, why_invalid
from gangline.train.collecting.selection import Selection
from gangline.train.collecting.task_stream import TaskStream
from gangline.wire.client.rollouts import OpenTasks, RolloutClient

_FEWEST_REWARDS = 2
_MANY_EQUAL = 0.5
"""Share of groups with equal rewards above which most of the sampling is wasted."""


class GroupSpread(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions of one task."""

    task_id: str
    rewards: tuple[float, ...]
    """Rewards of sessions that could be trained on, by sample index."""
    reward_mean: float | None
    """None if there are no rewards."""
    deviation: float
    """Population standard deviation."""
    is_informative: bool
    """Whether the rewards differ enough to learn from."""
    took_s: float
    """From submission to the last result."""


class SpreadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The spread of rewards over a few groups."""

    groups: tuple[GroupSpread, ...]
    num_samples: int
    """Sessions requested per group."""
    num_valid: int
    """Sessions that could be trained on."""
    invalid: dict[str, int]
    """Reason why a session cannot be trained on -> number of sessions."""
    outcomes: dict[str, int]
    degenerate: dict[str, int]
    """Kind of reason -> number of sessions that the experiment's filters leave out."""
    reward_mean: float | None
    """Over the valid sessions."""
    deviation_within: float | None
    """Mean of the groups' deviations: the signal."""
    deviation_between: float | None
    """Standard deviation of the groups' means: how much the tasks differ in difficulty."""
    share_informative: float
    """Share of informative groups."""
    compares: bool
    """Whether the algorithm compares the sessions of a group, so that groups with equal rewards teach nothing."""
    num_all_best: int
    """Groups whose sessions all have the largest reward observed."""
    num_all_worst: int
    tokens_per_session: float | None
    """Sampled tokens that would be trained on, averaged over valid sessions."""
    left_out: dict[str, int]
    """Reason why tokens must not be trained on -> number of tokens."""
    took_s: float
    sessions_per_s: float

    def advice(self) -> list[str]:
        """Problems to expect in the run, each with a remedy."""
        return list(_advice(self))


class DryRun:
    """Runs a few groups of an experiment's tasks through the service and judges them as its trainer would."""

    def __init__(
        self,
        service: RolloutClient,
        stream: TaskStream,
        *,
        num_groups: int,
        num_samples: int,
        num_in_flight: int,
        compares: bool = True,
        selection: Selection | None = None,
        on_group: Callable[[GroupSpread], None] = lambda _: None,
        retry_s: float = 0.5,
    ) -> None:
        """stream: with its own task ids. compares: see `SpreadReport`. selection: the experiment's, without its
        control.
        """
        self._open = OpenTasks(service, retry_s)
        self._tasks = list(islice(stream.tasks(), num_groups))
        self._num_samples = num_samples
        self._compares = compares
        self._slots = asyncio.Semaphore(num_in_flight)
        self._selection = selection or Selection()
        self._on_group = on_group
        self._degenerate = Counter[str]()

    async def measure(self) -> SpreadReport:
        """Cancelling it also cancels unfinished tasks at the service.

        Raises: the service's errors; InvalidGroup if the experiment's reward fails.
        """
        began = time.monotonic()
        measured = await self._open.all(self._one(task) for task in self._tasks)
        return self._report(measured, time.monotonic() - began)

    async def _one(self, task: Mapping[str, Any]) -> tuple[GroupSpread, list[SessionResult]]:
        async with self._slots:
            task_id, began = task["task_id"], time.monotonic()
            sessions = await self._open.run(task)
        valid = Group(task_id, tuple(session for session in sessions if why_invalid(session) is None))
        group = self._selection.select(valid, self._degenerate) or Group(task_id, ())
        spread = GroupSpread(
            task_id=task_id,
            rewards=group.rewards,
            reward_mean=float(np.mean(group.rewards)) if group.rewards else None,
            deviation=group.deviation,
            is_informative=group.is_informative,
            took_s=time.monotonic() - began,
        )
        self._on_group(spread)
        return spread, sessions

    def _report(self, measured: Sequence[tuple[GroupSpread, list[SessionResult]]], took_s: float) -> SpreadReport:
        groups = tuple(group for group, _ in measured)
        sessions = [session for _, mine in measured for session in mine]
        reasons = [why_invalid(session) for session in sessions]
        rewards = [reward for group in groups for reward in group.rewards]
        means = [group.reward_mean for group in groups if group.reward_mean is not None]
        tokens = [_num_trained(one) for one, why in zip(sessions, reasons, strict=True) if why is None]
        return SpreadReport(
            groups=groups,
            num_samples=self._num_samples,
            num_valid=sum(why is None for why in reasons),
            invalid=dict(Counter(why for why in reasons if why is not None)),
            outcomes=dict(Counter(str(session.outcome) for session in sessions)),
            degenerate=dict(self._degenerate),
            reward_mean=_mean(rewards),
            deviation_within=_mean([group.deviation for group in groups if group.rewards]),
            deviation_between=float(np.std(means)) if means else None,
            share_informative=sum(group.is_informative for group in groups) / max(len(groups), 1),
            compares=self._compares,
            num_all_best=_num_all(groups, max(rewards, default=0.0)) if len(set(rewards)) > 1 else 0,
            num_all_worst=_num_all(groups, min(rewards, default=0.0)),
            tokens_per_session=_mean(tokens),
            left_out=tokens_left_out(sessions),
            took_s=took_s,
            sessions_per_s=len(sessions) / took_s if took_s else 0.0,
        )


def _num_trained(session: SessionResult) -> int:
    return sum(int(np.count_nonzero(trace.loss_mask)) for trace in trainable_traces(session))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _num_all(groups: Iterable[GroupSpread], reward: float) -> int:
    return sum(bool(group.rewards) and set(group.rewards) == {reward} for group in groups)


def _advice(report: SpreadReport) -> Iterable[str]:
    num_groups, num_sessions = len(report.groups), sum(report.outcomes.values())
    if not report.num_valid:
        yield "no session could be trained on: mend what the reasons above say first."
        return
    if num_sessions - report.num_valid > num_sessions / 10:
        yield (
            f"{num_sessions - report.num_valid} of {num_sessions} sessions could not be trained on. Their groups are "
            "sampled again, or dropped."
        )
    if not report.compares:
        if len({reward for group in report.groups for reward in group.rewards}) < _FEWEST_REWARDS:
            yield "all sessions have the same reward: there is nothing to learn. Give other tasks, or another reward."
    elif not report.share_informative:
        yield (
            "no group has two different rewards: there is nothing to learn. Give tasks that the model solves "
            "sometimes, a reward with parts (evaluators composite, staged, shaped), or train on solved examples first."
        )
    elif report.share_informative < _MANY_EQUAL:
        yield (
            f"{1 - report.share_informative:.0%} of the groups have one reward and teach nothing "
            f"({report.num_all_worst} all the worst, {report.num_all_best} all the best, of {num_groups}). Take more "
            "samples of each task, other tasks, or an algorithm with dynamic sampling (dapo), which samples about "
            f"{1 / report.share_informative:.1f} groups for each that it trains on."
        )
    if report.left_out:
        yield "some sampled tokens would not be trained on: " + "; ".join(report.left_out)
