"""Stages of one attempt: the present one, its budget, and the times of those that are over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from gangline.domain.lifecycle import Stage
from gangline.domain.session import StageTiming
from gangline.store.journal.log import AttemptKey

__all__ = ["StageClock"]

log = logging.getLogger("gangline.node")


class StageClock:
    """Budgets count a stage's own work: while an attempt waits its turn, it has none."""

    def __init__(self, key: AttemptKey, clock: Callable[[], float] = time.time) -> None:
        self.stage: Stage = "init"
        self.since = clock()
        """When the attempt came to this stage, or began to work at it. Unix time, UTC, seconds."""
        self.timings: tuple[StageTiming, ...] = ()
        """Timings of the stages that are over."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the attempt is in another stage."""
        self.now = clock
        """Unix time, UTC, seconds."""
        self._key = key
        self._budget_ends_at: float | None = None

    def go_on(self, stage: Stage, since: float, timings: tuple[StageTiming, ...]) -> None:
        """Continue where an earlier life of the node was."""
        self.stage, self.since, self.timings = stage, since, timings

    def move(self, stage: Stage, budget_s: float | None = None) -> None:
        """Enter another stage, or another part of it; `budget_s` is None where the attempt waits its turn."""
        self.stage, self.since = stage, self.now()
        self.allow(budget_s)
        self.on_change()

    def allow(self, budget_s: float | None) -> None:
        """Give the work that begins now this budget."""
        self._budget_ends_at = None if budget_s is None else time.monotonic() + budget_s

    def overdue_s(self, held_s: float) -> float | None:
        """Seconds since the present work's budget ended, without the `held_s` that the gate held it; None without a
        budget."""
        if self._budget_ends_at is None:
            return None
        return max(0.0, time.monotonic() - self._budget_ends_at - held_s)

    def add(self, timing: StageTiming) -> None:
        self.timings = (*self.timings, timing)

    @contextmanager
    def within(self, stage: Stage, budget_s: float | None = None, since: float | None = None) -> Generator[None]:
        """Be in a stage, and add its times at the end. `since`: when an earlier life of the node entered it."""
        self.move(stage, budget_s)
        self.since = self.since if since is None else since
        log.info("session.%s session=%s attempt=%d", stage, *self._key)
        try:
            yield
        finally:
            self.add(StageTiming(stage, self.since, self.now()))
