"""What becomes of each session of a leak run: chosen by a seed."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

__all__ = ["Fate", "fates"]

Blow = Literal["none", "cancel", "kill"]
"""Cancelled by its owner; or one process of all sandboxes, ours or the agent's, dies by `kill -9`."""

_WEIGHTS: dict[Blow, int] = {"none": 3, "cancel": 4, "kill": 3}
_MAX_STEP_S = 1.5


class Fate(NamedTuple):
    prepare_s: float
    """How long a command of INIT takes."""
    run_s: float
    """How long the agent takes alongside its calls."""
    grade_s: float
    in_clean_sandbox: bool
    """Graded in its own sandbox."""
    blow: Blow
    is_leased: bool
    """Whether the blow waits for the session's lease; else it may find it in the queue."""
    at: float
    """Of the time that the session takes by itself: when the blow falls."""
    pick: float
    """Of a kill: which of those processes that run, 0 is the first and 1 is beyond the last."""

    @property
    def blow_s(self) -> float:
        """After submitting, or after the lease."""
        return self.at * (self.prepare_s + self.run_s + self.grade_s + 2 * _MAX_STEP_S)


def fates(seed: int, num_sessions: int) -> list[Fate]:
    chance = random.Random(seed)
    blows: list[Blow] = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=num_sessions)
    return [
        Fate(
            prepare_s=chance.uniform(0, _MAX_STEP_S),
            run_s=chance.uniform(0, _MAX_STEP_S),
            grade_s=chance.uniform(0, _MAX_STEP_S),
            in_clean_sandbox=chance.random() < 0.5,
            blow=blow,
            is_leased=chance.random() < 0.8,
            at=chance.random(),
            pick=chance.random(),
        )
        for blow in blows
    ]
