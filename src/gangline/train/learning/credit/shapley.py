"""Shapley values: the contribution of each of several roles to a common reward.

`value(coalition)` is the reward that just these players would get; v of nobody is asked for too. Sources: Shapley
(1953); M-GRPO; SHARP for the two-level form.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["Value", "monte_carlo_shapley", "shapley_values", "two_level_shapley"]

Value = Callable[[frozenset[str]], float]

_MOST_EXACT = 16
"""Players; 2 ** 16 coalitions."""


def shapley_values(players: Sequence[str], value: Value) -> dict[str, float]:
    """Exact, over all coalitions, each asked once. Raises: ValueError for more than 16 players, or one named twice."""
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
    """Mean marginal gain over random orders; the values sum to v(all) - v(nobody) exactly.

    Every order is followed by its reverse, which halves the variance or better. num_orders: rounded up to even.
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
    """First the manager against all workers as one player, then the workers' share among them.

    A worker is judged half without the manager and half with: `w(S) = (v(S) - v(nobody) + v(S + m) - v(m)) / 2`.
    The workers' exact values of that game sum to their share, so all values sum to v(all) - v(nobody). Asks for
    2 ** (workers + 1) coalitions. Raises: ValueError as `shapley_values`.
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
