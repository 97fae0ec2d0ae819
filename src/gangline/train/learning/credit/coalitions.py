"""Credit by coalitions: a session's advantage, distributed to the players by their Shapley values.

A turn of player p has the advantage `A * f(p)`: A is its trace's share of the session's advantage, and

    f(p) = 1 + weight * (n * |phi(p)| / sum of all |phi| - 1)

with n players and the Shapley value phi(p) of the coalitions' rewards in the group's task. The factor is 1 for turns of
other roles, and for all turns if all values are 0.

Why a factor: "Inside the Agentic RL Training Loop" compares a player's Shapley values over the sessions of a group,
`(phi - mean) / deviation`. But the coalitions' rewards are the same for all sessions of a group, so phi differs between
sessions only by the session's own reward divided by n, and the comparison is plain GRPO for every player. Adding a term
to all turns of a player does not work either: it does not depend on the sampled tokens, so its expected gradient is 0.
A factor gives the signal to players whose presence changes the reward, for better or worse, and keeps its noise from
the others.

Invariants: the values sum to the reward of all players minus the reward without players. Interchangeable players have
the same factor. A player that never changes a reward has value 0, and factor 0 at weight 1. The factors sum to n and
are never negative, so they never change the sign of a session's advantage. Weight 0 is the algorithm without
coalitions.

Shapley values: the contribution of each of several roles to a common reward.

`value(coalition)` is the reward of exactly these players, including the empty coalition. Sources: Shapley (1953);
M-GRPO; SHARP for the two-level form.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Group
from gangline.train.collecting.side_rollouts.coalitions import Coalition, CoalitionSettings
from gangline.train.learning.advantages import ONE_REWARD

Value = Callable[[frozenset[str]], float]

_MOST_EXACT = 16
"""Players; 2 ** 16 coalitions."""


def shapley_values(players: Sequence[str], value: Value) -> dict[str, float]:
    """Exact, over all coalitions, each evaluated once. Raises: ValueError for more than 16 players, or a player named
    twice.
    """
    _check(players)
    if len(players) > _MOST_EXACT:
        raise ValueError(f"{len(players)} players are too many for exact values: use monte_carlo_shapley.")
    value = functools.cache(value)
    return {player: _exact(player, [other for other in players if other != player], value) for player in players}


def _exact(player: str, others: Sequence[str], value: Value) -> float:
    num = len(others) + 1
    return math.fsum(
        math.factorial(size)
        * math.factorial(num - size - 1)
        / math.factorial(num)
        * (value(frozenset(coalition) | {player}) - value(frozenset(coalition)))
        for size in range(num)
        for coalition in itertools.combinations(others, size)
    )


def monte_carlo_shapley(players: Sequence[str], value: Value, *, num_orders: int, seed: int = 0) -> dict[str, float]:
    """Mean marginal gain over random orders; the values sum to v(all) - v(empty) exactly.

    Every order is followed by its reverse, which at least halves the variance. num_orders: rounded up to an even
    number.
    """
    _check(players)
    random, value = np.random.default_rng(seed), functools.cache(value)
    sums = dict.fromkeys(players, 0.0)
    num_pairs = (max(num_orders, 1) + 1) // 2
    for _ in range(num_pairs):
        order = [players[int(index)] for index in random.permutation(len(players))]
        _add_gains(sums, order, value)
        _add_gains(sums, order[::-1], value)
    return {player: total / (2 * num_pairs) for player, total in sums.items()}


def _add_gains(sums: dict[str, float], order: Sequence[str], value: Value) -> None:
    coalition: frozenset[str] = frozenset()
    for player in order:
        with_player = coalition | {player}
        sums[player] += value(with_player) - value(coalition)
        coalition = with_player


def two_level_shapley(manager: str, workers: Sequence[str], value: Value) -> dict[str, float]:
    """First the manager against all workers as one player, then the workers' share among themselves.

    A worker counts half without the manager and half with: `w(S) = (v(S) - v(empty) + v(S + m) - v(m)) / 2`. The
    workers' exact values of that game sum to their share, so all values sum to v(all) - v(empty). Evaluates 2 **
    (workers + 1) coalitions. Raises: ValueError as `shapley_values`.
    """
    _check([manager, *workers])
    value = functools.cache(value)
    team: frozenset[str] = frozenset(workers)
    nobody, alone = value(team - team), value(frozenset({manager}))

    def with_and_without(coalition: frozenset[str]) -> float:
        return 0.5 * (value(coalition) - nobody + value(coalition | {manager}) - alone)

    of_manager = 0.5 * (alone - nobody) + 0.5 * (value(team | {manager}) - value(team))
    return {manager: of_manager, **shapley_values(workers, with_and_without)}


def _check(players: Sequence[str]) -> None:
    if len(set(players)) != len(players):
        raise ValueError(f"a player is named twice in {list(players)}.")


def asked_coalitions(task_id: str, settings: CoalitionSettings) -> list[Coalition]:
    """The coalitions whose rewards a task's Shapley values need, except the empty one and the one of all players.

    The result depends only on the task id, and is the same when the task is run again.
    """
    asked = set[Coalition]()

    def ask(coalition: Coalition) -> float:
        asked.add(coalition)
        return 0.0

    _shapley(task_id, settings, ask)
    return sorted(asked - {frozenset(), settings.everybody}, key=settings.number_of)


def group_shapley(group: Group, settings: CoalitionSettings) -> dict[str, float]:
    """Player -> its value in the group's task. Raises: ValueError if the group has no coalitions."""
    if group.coalitions is None:
        raise ValueError(f"{group.task_id} was collected without its coalitions.")
    return _shapley(group.task_id, settings, group.coalitions.means.__getitem__)


def player_factors(group: Group, settings: CoalitionSettings) -> dict[str, float]:
    """Player -> factor of its turns' advantages. Raises: ValueError if the group has no coalitions."""
    sizes = {player: abs(value) for player, value in group_shapley(group, settings).items()}
    total = sum(sizes.values())
    if total < ONE_REWARD:
        return dict.fromkeys(sizes, 1.0)
    return {player: 1.0 + settings.weight * (len(sizes) * size / total - 1.0) for player, size in sizes.items()}


def spread_factors(trace: Trace, factors: Mapping[str, float]) -> NDArray[np.float64]:
    """[T]: each token's factor, by the role of its turn; 1.0 for roles without a factor."""
    found = np.ones(len(trace.response_ids))
    for span in trace.spans:
        found[span.start : span.end] = factors.get(span.agent_role or "", 1.0)
    return found


def mean_shapley(groups: Iterable[Group], settings: CoalitionSettings) -> dict[str, float]:
    """Player -> mean of its values over the groups' tasks."""
    found = [group_shapley(group, settings) for group in groups]
    return {player: float(np.mean([values[player] for values in found])) for player in settings.players}


def _shapley(task_id: str, settings: CoalitionSettings, value: Value) -> dict[str, float]:
    if settings.manager is not None:
        workers = [player for player in settings.players if player != settings.manager]
        return two_level_shapley(settings.manager, workers, value)
    if settings.method == "exact":
        return shapley_values(settings.players, value)
    seed = zlib.crc32(task_id.partition(".run")[0].encode())  # a rerun uses its original id
    return monte_carlo_shapley(settings.players, value, num_orders=settings.num_permutations, seed=seed)
