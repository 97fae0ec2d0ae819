"""Finds sessions that exceeded their budget, and reports where they wait.

A budget cancels work. Work that ignores the cancel (a hanging kill, a grader's thread, a defect) is found here,
reported once for each place where it hangs, and left alone: cancelling the session or stopping the node ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import gangline
from gangline.domain.lifecycle import Stage
from gangline.domain.node_views import Stuck
from gangline.store.journal.log import AttemptKey

log = logging.getLogger("gangline.node")

_MAX_FRAMES = 6
_PACKAGE = Path(gangline.__file__).parent


class Watched(Protocol):
    """The operations of an attempt that the watchdog needs."""

    key: AttemptKey

    @property
    def stage(self) -> Stage: ...

    @property
    def since(self) -> float: ...

    def overdue_s(self) -> float | None: ...


class Watchdog:
    """Call `look` periodically. margin_s: seconds beyond its budget after which a session is reported."""

    def __init__(self, margin_s: float = 60.0) -> None:
        self._margin_s = margin_s
        self._stuck: dict[tuple[AttemptKey, Stage, float], Stuck] = {}

    @property
    def stuck(self) -> list[Stuck]:
        """Sessions found by the last `look`."""
        return list(self._stuck.values())

    def look(self, attempts: Iterable[Watched]) -> None:
        """Log sessions that became overdue since the last `look`."""
        late: dict[tuple[AttemptKey, Stage, float], Stuck] = {}
        for attempt in attempts:
            overdue_s = attempt.overdue_s()
            if overdue_s is None or overdue_s <= self._margin_s:
                continue
            place = (attempt.key, attempt.stage, attempt.since)
            late[place] = found = _standing(attempt, overdue_s)
            if place not in self._stuck:
                log.error(
                    "session.stuck session=%s attempt=%d stage=%s since=%.3f overdue_s=%.0f waits_at=%s",
                    *(*attempt.key, found.stage, found.since, found.overdue_s, found.waits_at),
                )
        self._stuck = late


def _standing(attempt: Watched, overdue_s: float) -> Stuck:
    return Stuck(
        session_id=attempt.key.session_id,
        attempt=attempt.key.attempt,
        stage=attempt.stage,
        since=attempt.since,
        overdue_s=round(overdue_s, 1),
        waits_at=where_tasks_wait(f"session.{attempt.key.session_id}"),
    )


def where_tasks_wait(name: str) -> dict[str, list[str]]:
    """Returns the positions of the task with that name and of those named `NAME ...`."""
    tasks = {task.get_name(): task for task in asyncio.all_tasks()}
    return {
        place: [_told(code, line) for code, line in _frames(task.get_coro())[-_MAX_FRAMES:]]
        for place, task in sorted(tasks.items())
        if place == name or place.startswith(f"{name} ")
    }


def _frames(awaitable: Any) -> list[tuple[CodeType, int]]:
    """Returns the frames of a suspended coroutine and those it awaits, outermost first."""
    found: list[tuple[CodeType, int]] = []
    while awaitable is not None:
        frame: FrameType | None = _first_of(awaitable, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            found.append((frame.f_code, frame.f_lineno))
        awaitable = _first_of(awaitable, "cr_await", "gi_yieldfrom", "ag_await")
    return found


def _first_of(awaitable: Any, *names: str) -> Any:
    """Returns the first attribute that exists: coroutines, generators and asynchronous generators use different
    names."""
    return next((getattr(awaitable, name) for name in names if hasattr(awaitable, name)), None)


def _told(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{shown}:{line} {code.co_qualname}"
