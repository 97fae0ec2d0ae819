"""Writes that wait for the disk share one commit: answered when it is durable, and undone each for itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gangline.domain.errors import Conflict, DiskFull, StoreError
from gangline.domain.views import Event
from gangline.store.sql import schema
from gangline.store.sql.reader import TaskReader
from gangline.store.sql.tasks import TaskStore
from support.service.running import NODE_URL, request


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TaskStore]:
    with TaskStore(tmp_path / "gangline.db") as opened:
        yield opened


class Commits:
    """Write transactions that were committed."""

    def __init__(self, store: TaskStore) -> None:
        self.count = 0
        sa.event.listen(store.database._engine, "commit", self._saw)

    def _saw(self, conn: sa.Connection) -> None:
        self.count += bool(conn.get_execution_options().get("gangline_writes"))


@asynccontextmanager
async def busy(store: TaskStore) -> AsyncIterator[Callable[..., asyncio.Future[Any]]]:
    """The writer's thread is busy inside the block; gives how to line up a job behind that."""
    go_on, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()

    lined_up: list[asyncio.Future[Any]] = [asyncio.ensure_future(store.run(hold))]

    def line_up(job: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        lined_up.append(asyncio.ensure_future(store.run(job, *arguments)))
        return lined_up[-1]

    await begun.wait()
    yield line_up
    await asyncio.sleep(0)  # each has reached the queue when its task has run once
    go_on.set()
    await asyncio.wait(lined_up)


async def test_jobs_that_wait_share_a_commit_and_are_answered_when_it_is_durable(store: TaskStore, tmp_path: Path):
    commits = Commits(store)
    seen: list[str] = []
    with TaskReader(tmp_path / "gangline.db") as reader:

        def look(task_id: str) -> None:
            seen.append(reader.task(task_id).task_id)

        async with busy(store) as line_up:
            answers = [line_up(store.submit, [request(f"t{number}")]) for number in range(5)]
            for number, answer in enumerate(answers):
                answer.add_done_callback(lambda _, task_id=f"t{number}": look(task_id))
            leased = line_up(store.lease, "n1", NODE_URL, 3)
        await asyncio.sleep(0)
    assert commits.count == 1
    assert seen == [f"t{number}" for number in range(5)]
    assert [lease.session_id for lease in leased.result()] == ["t0.0", "t0.1", "t1.0"]


async def test_a_job_that_is_refused_is_undone_alone(store: TaskStore):
    commits, told = Commits(store), list[Event]()
    store.announce_to(told.extend)
    async with busy(store) as line_up:
        line_up(store.submit, [request("a")])
        refused = line_up(store.submit, [request("b"), request("a", instruction="other")])
        last = line_up(store.submit, [request("c")])
    assert isinstance(refused.exception(), Conflict)
    assert last.result()[0].created
    assert [task.task_id for task in store.tasks().tasks] == ["c", "a"]
    assert [event.task_id for event in told] == ["a", "c"]
    assert [event.task_id for event in store.events()] == ["a", "c"]
    assert commits.count == 1


async def test_when_what_they_share_breaks_each_is_done_again_by_itself(store: TaskStore):
    commits, told, tries = Commits(store), list[Event](), list[str]()
    store.announce_to(told.extend)

    def break_it() -> None:
        tries.append("broken")
        with store.database.writing() as conn:
            conn.execute(sa.text("DELETE FROM sessions"))
            raise StoreError("the database failed")

    async with busy(store) as line_up:
        line_up(store.submit, [request("a", num_samples=1)])
        broken = line_up(break_it)
        leased = line_up(store.lease, "n1", NODE_URL, 3)
    assert isinstance(broken.exception(), StoreError)
    assert tries == ["broken"] * 2
    assert [(lease.session_id, lease.fence) for lease in leased.result()] == [("a.0", 1)]
    kinds = ["task.submitted", "node.joined", "task.started", "session.leased"]
    assert [event.kind for event in told] == [event.kind for event in store.events()] == kinds
    assert commits.count == 2


async def test_of_jobs_that_share_a_full_disk_those_with_room_are_kept(store: TaskStore):
    await store.run(store.submit, [request("first")])
    with store.database.writing() as conn:
        pages = conn.exec_driver_sql("PRAGMA page_count").scalar_one()
    store.database.run_blocking(lambda: _limit_pages(store, pages + 4))
    async with busy(store) as line_up:
        small = line_up(store.submit, [request("small")])
        large = line_up(store.submit, [request("large", instruction="x" * 100_000)])
        leased = line_up(store.lease, "n1", NODE_URL, 3)
    assert isinstance(large.exception(), DiskFull)
    assert small.result()[0].created
    assert {lease.task_id for lease in leased.result()} == {"first", "small"}
    assert {task.task_id for task in store.tasks().tasks} == {"first", "small"}


def _limit_pages(store: TaskStore, pages: int) -> None:
    with store.database.writing() as conn:
        conn.exec_driver_sql(f"PRAGMA max_page_count={pages}")


async def test_what_a_commit_that_failed_has_numbered_is_numbered_again(store: TaskStore, tmp_path: Path):
    """Needs of tasks are numbered once, and the numbers kept."""

    def fail() -> None:
        raise StoreError("the disk does not answer")

    async with busy(store) as line_up:
        answers = [line_up(store.submit, [request(name)]) for name in ("first", "second")]
        failed = line_up(fail)
    assert isinstance(failed.exception(), StoreError)
    assert all(answer.result()[0].created for answer in answers)
    with store.database.reading() as conn:
        numbers = set(conn.scalars(sa.select(schema.sessions.c.needs)))
        assert numbers == set(conn.scalars(sa.select(schema.needs.c.id)))
