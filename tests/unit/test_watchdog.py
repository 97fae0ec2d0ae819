"""Who is late is told once for each place, with where its tasks stand."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gangline.domain.lifecycle import Stage
from gangline.node.health.watchdog import Watchdog, where_tasks_wait
from gangline.store.journal.log import AttemptKey


class Late:
    def __init__(self, overdue_s: float | None, stage: Stage = "run") -> None:
        self.key = AttemptKey("t.0", 1)
        self.stage: Stage = stage
        self.since = 1000.0
        self.late_s = overdue_s

    def overdue_s(self) -> float | None:
        return self.late_s


async def test_a_late_session_is_logged_once_and_shown_until_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    watchdog, session = Watchdog(margin_s=10), Late(None)
    with caplog.at_level(logging.ERROR, "gangline.node"):
        for late_s in (None, 0.0, 10.0):
            session.late_s = late_s
            watchdog.look([session])
            assert watchdog.stuck == []
        for late_s in (11.0, 12.0, 13.0):
            session.late_s = late_s
            watchdog.look([session])
            assert [(one.session_id, one.overdue_s) for one in watchdog.stuck] == [("t.0", late_s)]
        session.late_s = None
        watchdog.look([session])
        assert watchdog.stuck == []
        session.stage, session.late_s = "postrun", 99.0
        watchdog.look([session])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("session.stuck session=t.0 attempt=1 stage=run since=1000.000 overdue_s=11 waits_at=")
    assert "stage=postrun" in told[1]


async def test_where_a_task_stands_is_told_down_to_what_it_awaits() -> None:
    never = asyncio.Event()

    async def inner() -> None:
        await never.wait()

    async def outer() -> None:
        await inner()

    tasks = [
        asyncio.create_task(outer(), name="session.a"),
        asyncio.create_task(inner(), name="session.a command"),
        asyncio.create_task(inner(), name="session.ab"),
    ]
    await asyncio.sleep(0)
    found = where_tasks_wait("session.a")
    assert list(found) == ["session.a", "session.a command"]
    steps = [line.rpartition(" ")[2].rpartition(".")[2] for line in found["session.a"]]
    assert steps == ["outer", "inner", "wait"]
    assert "test_watchdog.py:" in found["session.a"][0]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
