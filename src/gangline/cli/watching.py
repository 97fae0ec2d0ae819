"""What `gangline watch` knows: the newest picture of the service, and what its events add up to. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from gangline.cli.views import groups_table, nodes_table, stages_line
from gangline.domain.views import Event, ServiceStatus, TaskView

__all__ = ["Watched", "event_line"]

_WINDOW_S = 60.0
_LAST_FAILURES = 6


def event_line(event: Event) -> str:
    """One event for people: time, kind, what it is about."""
    at = datetime.fromtimestamp(event.at, UTC).strftime("%H:%M:%S")
    told = " ".join(f"{name}={value}" for name, value in event.data.items() if value is not None)
    return " ".join(piece for piece in (at, event.kind, event.session_id or event.task_id or "", told) if piece)


class Watched:
    """Grows with events and fresh views; draws itself."""

    def __init__(self) -> None:
        self.status: ServiceStatus | None = None
        self.tasks: tuple[TaskView, ...] = ()
        self.failures: deque[Event] = deque(maxlen=_LAST_FAILURES)
        self._ended_at: deque[float] = deque()

    def take(self, event: Event) -> None:
        if event.kind == "session.ended":
            self._ended_at.append(event.at)
        if event.data.get("code"):
            self.failures.append(event)

    def look(self, status: ServiceStatus, tasks: Sequence[TaskView]) -> None:
        self.status, self.tasks = status, tuple(tasks)

    def ended_per_minute(self) -> float:
        """Sessions that ended in the last minute of the server's clock."""
        if self.status is None:
            return 0.0
        while self._ended_at and self._ended_at[0] < self.status.at - _WINDOW_S:
            self._ended_at.popleft()
        return len(self._ended_at) * 60.0 / _WINDOW_S

    def __rich__(self) -> RenderableType:
        if self.status is None:
            return Text("connecting ...", style="dim")
        throughput = Text(f"{self.ended_per_minute():.0f} sessions ended in the last minute", style="dim")
        parts: list[RenderableType] = [stages_line(self.status), throughput, Text(), nodes_table(self.status.nodes)]
        if self.tasks:
            parts += [Text(), groups_table(self.tasks)]
        if self.failures:
            parts += [Text(), Text("last failures", style="bold red")]
            parts += [Text.from_markup(f"[red]{escape(event_line(event))}[/]") for event in self.failures]
        return Group(*parts)
