"""What goes wrong in a chaos run, and when: chosen by a seed, and timed by how many sessions have ended.

So the same seed is the same faults at the same places of the run, on a slow machine too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Literal, NamedTuple

__all__ = ["NODES", "PROGRAMS", "Fault", "Manner", "Target", "num_kills", "schedule"]

NODES = ("node-a", "node-b")
PROGRAMS = ("server", "engine", *NODES)

Target = Literal["server", "engine", "node-a", "node-b", "harness", "receiver"]
"""Programs and harnesses are killed with `kill -9`; the trainer's receiver of callbacks misbehaves."""
Manner = Literal["down", "refuses", "forgets"]
"""Of a receiver: nobody listens; it answers 500; it takes what it is sent, and its answer is lost."""

_PER_THOUSAND_SESSIONS: dict[Target, int] = {
    "server": 14,
    "engine": 12,
    "node-a": 10,
    "node-b": 10,
    "harness": 40,
    "receiver": 30,
}
_AT_LEAST: dict[Target, int] = {"harness": 2, "receiver": 3}
_MANNERS: tuple[Manner, ...] = ("down", "refuses", "forgets")
_LAST = 0.8
"""Of all sessions: so that there is still something to break at the last fault."""


class Fault(NamedTuple):
    num_ended: int
    """Strikes when so many sessions have ended ..."""
    pause_s: float
    """... and so long after that."""
    target: Target
    lasts_s: float
    """How long what was killed stays dead; how long the receiver misbehaves once another task has ended."""
    again_s: float | None
    """Of a program: killed once more so long into its next life, ready or not."""
    pick: float
    """Of a harness: which of those that run, 0 is the first and 1 is beyond the last."""
    manner: Manner


def schedule(seed: int, num_sessions: int) -> list[Fault]:
    """In order of time."""
    chance = random.Random(seed)
    manners = chance.sample(_MANNERS, len(_MANNERS))
    faults: list[Fault] = []
    for target, rate in _PER_THOUSAND_SESSIONS.items():
        num = max(_AT_LEAST.get(target, 1), round(rate * num_sessions / 1000))
        for manner in islice(cycle(manners), num):
            twice = target in PROGRAMS and chance.random() < 0.25
            faults.append(
                Fault(
                    num_ended=chance.randrange(int(_LAST * num_sessions)),
                    pause_s=chance.uniform(0, 0.5),
                    target=target,
                    lasts_s=chance.uniform(0, 2.0),
                    again_s=chance.uniform(0, 3.0) if twice else None,
                    pick=chance.random(),
                    manner=manner,
                )
            )
    return sorted(faults)


def num_kills(faults: Iterable[Fault]) -> Counter[str]:
    """Target -> how often it is killed."""
    kills: Counter[str] = Counter()
    for fault in faults:
        if fault.target != "receiver":
            kills[fault.target] += 1 if fault.again_s is None else 2
    return kills
