"""A circuit breaker for a node: when everything fails because of the node itself, it stops taking sessions.

                 `threshold` consecutive faults at one boundary
        closed ───────────────────────────────────────────────▶ open
          ▲                                                      │ the pause is over: one session is taken
          │                    a success                         ▼
          └────────────────────────────────────────────────── trying
                                                                 │ a fault: open again, for twice as long
                                                                 └──────────────────────────────────────▶ open

Only faults of engine, runtime, store and node count, which another node may not have. Faults caused by the task (a
failing prepare action, an image that cannot be pulled, a broken grader) do not count against the node. The server's
rules decide whether a failed session is retried; the breaker only keeps this node from using up the queue.

A node that is out of file descriptors opens the breaker with the first session that fails for it.

Pure: the clock is passed in, and nothing is awaited.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gangline.domain.errors import Boundary, Failure, TooManyFiles
from gangline.domain.node_views import BreakerView
from gangline.domain.session import SessionResult

log = logging.getLogger("gangline.node")

_OURS: frozenset[Boundary] = frozenset({"engine", "runtime", "store", "node"})
_OF_THE_TASK = frozenset({"prepare_failed", "pull_failed", "pull_postponed"})
_AT_ONCE = frozenset({TooManyFiles.code})
"""Opens the breaker at once: further sessions would fail too, and endanger running ones."""


class Breaker:
    """threshold: consecutive faults that open it; 0: never.
    pause_s: the first pause; each failed try doubles it, up to `longest_pause_s`.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        threshold: int = 8,
        *,
        pause_s: float = 10.0,
        longest_pause_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_pause_s = pause_s
        self._longest_pause_s = max(pause_s, longest_pause_s)
        self._clock = clock
        self._faults = 0
        self._last: Failure | None = None
        self._pause_s = 0.0
        """Length of the current pause; 0 while closed."""
        self._tries_at = 0.0
        self._trial: tuple[str, int] | None = None

    @property
    def is_closed(self) -> bool:
        return self._pause_s == 0

    def allowed(self, wanted: int) -> int:
        """Returns how many of `wanted` sessions may be taken now."""
        if self.is_closed:
            return wanted
        return min(wanted, 1) if self._trial is None and self.wait_s() == 0 else 0

    def wait_s(self) -> float:
        """Seconds until a session may be taken: 0 while closed and while one is being tried."""
        return 0.0 if self.is_closed else max(0.0, self._tries_at - self._clock())

    def taken(self, key: tuple[str, int]) -> None:
        """Record that a session was leased. key: its id and fence."""
        if not self.is_closed and self._trial is None:
            self._trial = key
            log.info("breaker.trying boundary=%s session=%s", self._boundary, key[0])

    def ended(self, key: tuple[str, int], result: SessionResult | None) -> None:
        """Record that a session's attempt ended; None: it was cancelled or given back, which does not count."""
        is_trial = self._trial is not None and key == self._trial
        if is_trial:
            self._trial = None
        if result is None:
            return
        failure = result.failure if result.outcome == "infra_error" else None
        if failure is None:
            self._close()
        elif self.is_closed:
            self._count(failure)
        elif is_trial and _is_ours(failure):
            self._last = failure
            self._open(min(self._pause_s * 2, self._longest_pause_s))

    def view(self) -> BreakerView:
        return BreakerView(
            state="closed" if self.is_closed else "trying" if self._trial is not None else "open",
            boundary=self._boundary if self._faults else None,
            num_faults=self._faults,
            message=self._last.message if self._last is not None and self._faults else "",
            tries_in_s=None if self.is_closed or self._trial is not None else self.wait_s(),
        )

    @property
    def _boundary(self) -> Boundary | None:
        return self._last.boundary if self._last is not None else None

    def _count(self, failure: Failure) -> None:
        if not _is_ours(failure):
            self._faults = 0
            return
        self._faults = self._faults + 1 if self._faults and failure.boundary == self._boundary else 1
        self._last = failure
        if failure.code in _AT_ONCE or (self._threshold and self._faults >= self._threshold):
            self._open(self._first_pause_s)

    def _open(self, pause_s: float) -> None:
        assert self._last is not None
        self._pause_s, self._tries_at = pause_s, self._clock() + pause_s
        log.error(
            "breaker.opened boundary=%s code=%s faults=%d pause_s=%g message=%s",
            *(self._last.boundary, self._last.code, self._faults, pause_s, self._last.message),
        )

    def _close(self) -> None:
        if not self.is_closed:
            log.info("breaker.closed boundary=%s", self._boundary)
        self._faults, self._last, self._pause_s, self._trial = 0, None, 0.0, None


def _is_ours(failure: Failure) -> bool:
    return failure.boundary in _OURS and failure.code not in _OF_THE_TASK
