"""Credit by branches: forked sessions form trees, and a turn gets the credit of the sessions that share it.

A fork's first turns are its parent's (`Group.forks`), so sessions share turns. A segment is a run of turns shared by
the same sessions; its turns have the same advantage. Turns are numbered by their completions, over all traces of a
session.

    trees    A(session) = against all sessions of the group + against sessions of its tree; a segment takes the mean of
             its sessions (Tree-GRPO, arXiv 2509.21240: inter-tree and intra-tree advantages)
    leaves   A(session) = against all sessions of the group; a segment takes the mean of its sessions
             (TreeAdv, arXiv 2601.03703)
    depths   a segment's reward is the mean of its sessions', and it is compared with the segments that lie after as
             many branch points (BranchGRPO, arXiv 2509.06040, with uniform fusion)

Laws: without forks each method equals the plain comparison of sessions. A turn has the same advantage in every session
that shares it. The order of sessions does not matter. Under `leaves`, a turn that all sessions share has 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Fork, Group
from gangline.train.learning.advantages import AdvantageSettings, group_advantages

BranchCredit = Literal["trees", "leaves", "depths"]

_Leaves = frozenset[int]
"""Indices of the sessions that share a turn."""


def branch_advantages(
    group: Group,
    traces: Sequence[Sequence[Trace]],
    rewards: Sequence[float],
    credit: BranchCredit,
    settings: AdvantageSettings,
) -> list[NDArray[np.float64]]:
    """traces: each session's trainable traces. rewards: each session's shaped reward. Returns: [T] for each trace, in
    order; 0 between turns. Raises: ValueError if the forks form a cycle.
    """
    numbers = [_turn_numbers(session) for session in group.sessions]
    ids = [session.session_id for session in group.sessions]
    shared = shared_turns(ids, [len(mine) for mine in numbers], group.forks)
    trees = [_owner(one, 0, group.forks) for one in ids]
    found = segment_advantages(rewards, shared, trees, credit, settings)
    return [
        _spread(trace, of_turn, advantages)
        for mine, of_turn, advantages in zip(traces, numbers, found, strict=True)
        for trace in mine
    ]


def shared_turns(
    session_ids: Sequence[str], num_turns: Sequence[int], forks: Mapping[str, Fork]
) -> list[list[frozenset[int]]]:
    """For each turn of each session, the indices of the sessions that share it, by lineage. The parent may be absent.

    Raises: ValueError if the forks form a cycle.
    """
    owners = [
        [(_owner(one, turn, forks), turn) for turn in range(num)]
        for one, num in zip(session_ids, num_turns, strict=True)
    ]
    having: dict[tuple[str, int], set[int]] = {}
    for index, turns in enumerate(owners):
        for turn in turns:
            having.setdefault(turn, set()).add(index)
    return [[frozenset(having[turn]) for turn in turns] for turns in owners]


def segment_advantages(
    rewards: ArrayLike,
    shared: Sequence[Sequence[frozenset[int]]],
    trees: Sequence[str],
    credit: BranchCredit,
    settings: AdvantageSettings,
) -> list[NDArray[np.float64]]:
    """Advantage of each turn of each session. rewards: [S]. shared: as returned by `shared_turns`. trees: [S], each
    session's tree.
    """
    rewards_S = np.asarray(rewards, dtype=np.float64)
    if credit == "depths":
        by_depth = _depth_advantages(rewards_S, shared, settings)
        return [
            np.array([by_depth[depth, leaves] for depth, leaves in zip(_depths(turns), turns, strict=True)])
            for turns in shared
        ]
    advantages = group_advantages(rewards_S, settings)
    if credit == "trees":
        advantages = advantages + _within_trees(rewards_S, trees, settings)
    return [np.array([advantages[sorted(leaves)].mean() for leaves in turns]) for turns in shared]


def _within_trees(
    rewards_S: NDArray[np.float64], trees: Sequence[str], settings: AdvantageSettings
) -> NDArray[np.float64]:
    found = np.zeros(len(rewards_S))
    labels = np.array(trees)
    for tree in np.unique(labels):
        found[labels == tree] = group_advantages(rewards_S[labels == tree], settings)
    return found


def _depths(turns: Sequence[_Leaves]) -> list[int]:
    """Number of branch points before each turn."""
    changes = [before != after for before, after in itertools.pairwise(turns)]
    return [int(one) for one in np.cumsum([False, *changes])][: len(turns)]


def _depth_advantages(
    rewards_S: NDArray[np.float64], shared: Sequence[Sequence[_Leaves]], settings: AdvantageSettings
) -> dict[tuple[int, _Leaves], float]:
    segments = dict.fromkeys(one for turns in shared for one in zip(_depths(turns), turns, strict=True))
    found = dict[tuple[int, _Leaves], float]()
    for depth in {depth for depth, _ in segments}:
        here = [leaves for at, leaves in segments if at == depth]
        advantages = group_advantages([rewards_S[sorted(leaves)].mean() for leaves in here], settings)
        found |= {(depth, leaves): float(one) for leaves, one in zip(here, advantages, strict=True)}
    return found


def _owner(session_id: str, turn: int, forks: Mapping[str, Fork]) -> str:
    """The session that sampled the turn; for turn 0, the root of the tree."""
    for _ in range(len(forks) + 1):
        fork = forks.get(session_id)
        if fork is None or turn >= fork.num_turns:
            return session_id
        session_id = fork.parent_id
    raise ValueError(f"{session_id} is a fork of itself: the lineage of forks must be a tree.")


def _turn_numbers(session: SessionResult) -> dict[str, int]:
    """Completion id -> the turn's number, over all traces, including untrained ones."""
    traces = () if session.trajectory is None else session.trajectory.traces
    return {
        one: number
        for number, one in enumerate(sorted({span.completion_id for trace in traces for span in trace.spans}))
    }


def _spread(trace: Trace, number_of: Mapping[str, int], advantages: NDArray[np.float64]) -> NDArray[np.float64]:
    found = np.zeros(len(trace.response_ids))
    for span in trace.spans:
        found[span.start : span.end] = advantages[number_of[span.completion_id]]
    return found
