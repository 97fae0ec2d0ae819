"""The report of an evaluation is sent while it runs; a service that does not take it never ends the evaluation."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from gangline.domain.errors import GanglineError, InvalidRequest, NotFound, ServerUnavailable
from gangline.tasks.evals.report import Report
from gangline.tasks.evals.routes import StoredReports
from gangline.tasks.evals.sending import report_sent
from support.evals.reports import report_of_rewards


class FakeReceiver:
    """Takes reports, after the errors that it is given."""

    def __init__(self, *errors: GanglineError) -> None:
        self.received: list[Report] = []
        self.num_asked = 0
        self._errors = list(errors)
        self._came = asyncio.Condition()

    async def request(self, method: str, path: str, *, body: bytes | None = None) -> bytes:
        assert (method, path) == ("POST", "/v1/evaluations")
        async with self._came:
            self.num_asked += 1
            self._came.notify_all()
        if self._errors:
            raise self._errors.pop(0)
        self.received.append(msgspec.json.decode(body or b"", type=Report))
        return b"{}"

    async def until_asked(self, number: int) -> None:
        async with self._came:
            await self._came.wait_for(lambda: self.num_asked >= number)


FIRST = report_of_rewards("e", {"a": (1.0,)}, num_left=1)
LAST = report_of_rewards("e", {"a": (1.0,), "b": (0.0,)})


async def test_the_report_is_sent_at_once_and_when_it_has_grown() -> None:
    service, made, said = FakeReceiver(), [FIRST], list[str]()
    async with report_sent(service, lambda: made[-1], said.append, pause_s=0):
        await service.until_asked(1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert service.received == [FIRST], "the same is not sent again"
        made.append(LAST)
        await service.until_asked(2)
    assert service.received[:2] == [FIRST, LAST]
    assert said == []


async def test_the_last_report_is_sent_at_the_end() -> None:
    service, made = FakeReceiver(), [FIRST]
    async with report_sent(service, lambda: made[-1], pytest.fail, pause_s=60):
        await service.until_asked(1)
        made.append(LAST)
    assert service.received == [FIRST, LAST]


class LateReceiver(FakeReceiver):
    """Writes down a report although its sender has left, as a server does, and the first one late."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: list[asyncio.Task[bytes]] = []

    async def request(self, method: str, path: str, *, body: bytes | None = None) -> bytes:
        self.writing.append(asyncio.create_task(self._written(method, path, body)))
        return await asyncio.shield(self.writing[-1])

    async def _written(self, method: str, path: str, body: bytes | None) -> bytes:
        for _ in range(20 if len(self.writing) == 1 else 0):
            await asyncio.sleep(0)
        return await super().request(method, path, body=body)


async def test_the_last_report_is_written_last_however_late_the_one_before_is() -> None:
    service, made = LateReceiver(), [FIRST]
    async with report_sent(service, lambda: made[-1], pytest.fail, pause_s=60):
        while not service.writing:
            await asyncio.sleep(0)
        made.append(LAST)
    await asyncio.gather(*service.writing)
    assert service.received == [FIRST, LAST]


async def test_a_service_that_restarts_gets_it_once_it_is_back() -> None:
    service = FakeReceiver(ServerUnavailable("it restarts."))
    async with report_sent(service, lambda: FIRST, pytest.fail, pause_s=0):
        await service.until_asked(2)
    assert FIRST in service.received


async def test_a_service_that_knows_no_evaluations_is_said_once_and_ends_nothing() -> None:
    service, said = FakeReceiver(*[NotFound("no route POST /v1/evaluations.")] * 100), list[str]()
    async with report_sent(service, lambda: FIRST, said.append, pause_s=0):
        await service.until_asked(3)
    assert said == ["The page lacks the last figures of this evaluation: no route POST /v1/evaluations."]


async def test_a_stopped_evaluation_sends_nothing_more_and_keeps_its_error() -> None:
    service = FakeReceiver()

    async def stopped() -> None:
        async with report_sent(service, lambda: FIRST, pytest.fail, pause_s=60):
            await service.until_asked(1)
            raise InvalidRequest("mine")

    with pytest.raises(InvalidRequest, match="mine"):
        await stopped()
    assert service.received == [FIRST]


def test_stored_reports_are_listed_the_latest_first_and_read_back(tmp_path: Path) -> None:
    stored = StoredReports(tmp_path / "evaluations")
    assert stored.summaries() == ()
    other = report_of_rewards("f", {"a": (0.0, None)}, num_left=3)
    for report in (FIRST, other, LAST):
        stored.write(report)
    os.utime(tmp_path / "evaluations" / f"{other.evaluation_id}.json", (1, 1))  # a clock's tick may hold all three
    assert [(one.name, one.num_left) for one in stored.summaries()] == [("e", 0), ("f", 3)]
    assert stored.read(LAST.evaluation_id) == LAST, "the newer one has taken the place of the older one"
    assert stored.summaries()[1].whole == other.whole


def test_a_report_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    """A page asks every few seconds, and reports have megabytes."""
    stored = StoredReports(tmp_path)
    stored.write(LAST)
    other = report_of_rewards("f", {"a": (0.0,)})
    stored.write(other)
    before = stored.summaries()
    path = tmp_path / f"{LAST.evaluation_id}.json"
    was = path.stat()
    path.write_bytes(b"x" * was.st_size)  # in place, with the times of before: only who reads it can tell
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert stored.summaries() == before
    assert StoredReports(tmp_path).summaries() != before


@pytest.mark.parametrize("change", ["time", "size", "place", "gone", "new"])
def test_a_report_that_has_changed_is_read_again(tmp_path: Path, change: str) -> None:
    stored = StoredReports(tmp_path)
    stored.write(FIRST)
    stored.summaries()
    path = tmp_path / f"{FIRST.evaluation_id}.json"
    was, text = path.stat(), path.read_text()
    renamed = text.replace('"name":"e"', '"name":"k"' if change != "size" else '"name":"kk"')
    if change == "new":
        stored.write(report_of_rewards("k", {"a": (1.0,)}))
    elif change == "gone":
        path.unlink()
    elif change == "place":
        (tmp_path / "next").write_text(renamed)
        (tmp_path / "next").replace(path)
    else:
        path.write_text(renamed)
    if change in ("size", "place"):
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    if change == "time":
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    names = {"time": ["k"], "size": ["kk"], "place": ["k"], "gone": [], "new": ["e", "k"]}[change]
    assert sorted(one.name for one in stored.summaries()) == names


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    stored = StoredReports(tmp_path)
    stored.write(LAST)
    (tmp_path / "torn.json").write_text('{"name": "torn"')
    (tmp_path / "other.json").write_text('{"name": 1}')
    (tmp_path / "folder.json").mkdir()
    assert [one.name for one in stored.summaries()] == ["e"]
    for name in ("torn", "other", "folder", "none"):
        with pytest.raises(NotFound):
            stored.read(name)


@pytest.mark.parametrize("evaluation_id", ["", "..", "../other", "a/b", ".hidden", "x" * 200, "é"])
def test_an_id_is_never_a_path(tmp_path: Path, evaluation_id: str) -> None:
    stored = StoredReports(tmp_path / "evaluations")
    with pytest.raises(InvalidRequest):
        stored.write(msgspec.structs.replace(LAST, evaluation_id=evaluation_id))
    assert not (tmp_path / "evaluations").exists()


def test_a_server_without_a_data_folder_stores_none() -> None:
    assert StoredReports(None).summaries() == ()
    with pytest.raises(NotFound):
        StoredReports(None).write(LAST)
