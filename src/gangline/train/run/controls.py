"""Control arms: comparisons that show whether an experiment learned from the intended signal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Group
from gangline.train.learning.masks import Weights
from gangline.train.learning.samples import Mask

Control = Literal["none", "shuffled_rewards", "random_mask", "frozen"]
"""A deliberate change that shows where an experiment's result comes from.

shuffled_rewards: assigns each group's rewards to its sessions at random. random_mask: trains on as many tokens of each
row, at random places among sampled and other tokens. frozen: trains on no tokens, so the weights stay unchanged.
"""


def shuffled_rewards(seed: int, run: str) -> Callable[[Group], Group]:
    """Reassigns each group's rewards at random: rewards of sessions among sessions, of traces among traces, and scores
    of turns among scored turns. The values stay the same but are unrelated to merit.

    The same seed and task number give the same order, independent of the run's name.
    """

    def prepare(group: Group) -> Group:
        rewards = [session.reward for session in group.sessions]
        of_traces = [trace.reward for session in group.sessions for trace in _traces(session)]
        scores = _scores(group)
        order = random.Random(f"{seed}/{group.task_id.removeprefix(run)}")
        for numbers in (rewards, of_traces, scores):
            order.shuffle(numbers)
        left = iter(of_traces), iter(scores)
        sessions = zip(group.sessions, rewards, strict=True)
        return replace(group, sessions=tuple(_dealt(one, reward, *left) for one, reward in sessions))

    return prepare


def controlled_mask(control: Control, seed: int, mask: Mask) -> Mask:
    """A mask changed by the control. The same seed and row give the same mask."""
    if control == "frozen":
        return lambda trace: np.zeros_like(mask(trace))
    if control == "random_mask":
        return lambda trace: _scattered(mask(trace), f"{seed}/{trace.response_ids.tobytes().hex()}")
    return mask


def _scattered(weights: Weights, seed: str) -> Weights:
    return weights[random.Random(seed).sample(range(len(weights)), len(weights))]


def _traces(session: SessionResult) -> tuple[Trace, ...]:
    return () if session.trajectory is None else session.trajectory.traces


def _scores(group: Group) -> list[float]:
    """Scores of turns, in the order in which `_dealt` consumes them."""
    spans = (span for session in group.sessions for trace in _traces(session) for span in trace.spans)
    return [span.score for span in spans if span.score is not None]


def _dealt(
    session: SessionResult, reward: float | None, of_traces: Iterator[float | None], scores: Iterator[float]
) -> SessionResult:
    """The session with another reward, the next rewards for its traces and the next scores for its scored turns."""
    if session.trajectory is None:
        return msgspec.structs.replace(session, reward=reward)
    traces = tuple(
        msgspec.structs.replace(
            trace,
            reward=next(of_traces),
            spans=tuple(
                span if span.score is None else msgspec.structs.replace(span, score=next(scores))
                for span in trace.spans
            ),
        )
        for trace in session.trajectory.traces
    )
    trajectory = msgspec.structs.replace(session.trajectory, traces=traces)
    return msgspec.structs.replace(session, reward=reward, trajectory=trajectory)
