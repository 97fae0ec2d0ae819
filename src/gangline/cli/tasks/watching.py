"""The state of `gangline watch`: the latest state of the service, and totals of its events. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from gangline.cli.terminal.output import printable
from gangline.domain.node_numbers import NodeNumbers
from gangline.domain.views import Event, NodeView, ServiceStatus, TaskSummary

_WINDOW_S = 60.0
_SHORTEST_S = 1.0
_LAST_FAILURES = 50
_TOLD_AFTER_S = 30.0


def clock_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def event_line(event: Event) -> str:
    """One event for people: time, kind, subject."""
    values = " ".join(f"{name}={value}" for name, value in event.data.items() if value is not None)
    about = event.session_id or event.task_id or ""
    return printable(" ".join(piece for piece in (clock_time(event.at), event.kind, about, values) if piece))


class Outage:
    """A time without the server."""

    def __init__(self, why: str, began_at: float) -> None:
        self.why = why
        self.began_at = began_at
        self.ended_at: float | None = None


class Watched:
    """Updated by events and by new views.

    clock: monotonic seconds of this machine; rates use the server's clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.status: ServiceStatus | None = None
        self.tasks: tuple[TaskSummary, ...] = ()
        self.failures: deque[Event] = deque(maxlen=_LAST_FAILURES)
        self._clock = clock
        self._outage: Outage | None = None
        self._since: float | None = None
        self._ended_at: deque[float] = deque()
        self._sampled: dict[str, int] = {}
        self._fresh: deque[tuple[float, int]] = deque()
        """(server's time, tokens sampled since the last look)."""

    def take(self, event: Event) -> None:
        self._begin(event.at)
        if event.kind == "session.ended":
            self._ended_at.append(event.at)
        if event.data.get("code"):
            self.failures.append(event)

    def look(self, status: ServiceStatus, tasks: Sequence[TaskSummary]) -> None:
        self._begin(status.at)
        if self._outage is not None and self._outage.ended_at is None:
            self._outage.ended_at = self._clock()
        self.status, self.tasks = status, tuple(tasks)
        self._count_tokens(status)
        oldest = status.at - _WINDOW_S
        while self._ended_at and self._ended_at[0] < oldest:
            self._ended_at.popleft()
        while self._fresh and self._fresh[0][0] < oldest:
            self._fresh.popleft()

    def lost(self, why: str) -> None:
        """Call it when the server does not answer."""
        if self._outage is None or self._outage.ended_at is not None:
            self._outage = Outage(why, self._clock())

    def outage(self) -> tuple[str, float, bool] | None:
        """(why, seconds, whether it is over); None without an outage worth reporting."""
        if self._outage is None:
            return None
        now, ended_at = self._clock(), self._outage.ended_at
        if ended_at is not None and now > ended_at + _TOLD_AFTER_S:
            return None
        return self._outage.why, (ended_at or now) - self._outage.began_at, ended_at is not None

    def ended_per_minute(self) -> float:
        """Rate of ended sessions over the last minute of the server's clock, or over the known time if shorter."""
        return len(self._ended_at) * 60.0 / self._known_s()

    def sampled_per_s(self) -> float | None:
        """Tokens sampled per second, over all nodes; None if no node reports them."""
        if not self._sampled:
            return None
        return sum(num for _, num in self._fresh) / self._known_s()

    def numbers(self) -> list[tuple[NodeView, NodeNumbers | None]]:
        nodes = () if self.status is None else self.status.nodes
        return [(node, NodeNumbers.of(node.metrics)) for node in nodes]

    def _known_s(self) -> float:
        if self.status is None or self._since is None:
            return _WINDOW_S
        return min(_WINDOW_S, max(_SHORTEST_S, self.status.at - self._since))

    def _begin(self, at: float) -> None:
        self._since = at if self._since is None else min(self._since, at)

    def _count_tokens(self, status: ServiceStatus) -> None:
        fresh = 0
        for node, numbers in self.numbers():
            if numbers is None:
                continue
            before = self._sampled.get(node.node_id, numbers.sampled_tokens)
            # A restarted node counts from zero.
            fresh += numbers.sampled_tokens - (before if numbers.sampled_tokens >= before else 0)
            self._sampled[node.node_id] = numbers.sampled_tokens
        self._fresh.append((status.at, fresh))
