"""What is on the disk: results whole or absent, a database that others may read, ids that stay in their folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from gangline.domain.errors import InvalidRequest, NotFound, StoreError
from gangline.domain.session import Lease, SessionResult
from gangline.store.results.files import ResultStore
from gangline.store.sql import schema
from gangline.store.sql.reader import TaskReader
from gangline.store.sql.tasks import TaskStore
from support.service.running import NODE_URL, request, result


def some_result(attempt: int = 1, **changes: str) -> SessionResult:
    names = {"task_id": "t", "session_id": "t.0", **changes}
    lease = Lease(**names, sample_index=0, attempt=attempt, fence=attempt, expires_at=0.0, lease_s=1.0, task={})
    return result(lease, reward=0.25)


def test_a_result_is_absent_until_it_is_kept(tmp_path: Path):
    results = ResultStore(tmp_path)
    staged = results.stage(some_result())
    with pytest.raises(NotFound):
        results.read("t", "t.0", 1)
    assert staged.keep() == tmp_path / "t" / "t.0" / "attempt-1.msgpack"
    staged.discard()
    assert results.read("t", "t.0", 1) == some_result()
    assert results.attempts("t", "t.0") == [1]


def test_every_attempt_keeps_its_result(tmp_path: Path):
    results = ResultStore(tmp_path)
    for attempt in (10, 2):
        results.save(some_result(attempt))
    assert results.attempts("t", "t.0") == [2, 10]
    assert results.attempts("t", "t.1") == []
    assert results.read("t", "t.0", 10).attempt == 10


def test_what_a_crash_left_half_written_is_removed_and_results_stay(tmp_path: Path):
    results = ResultStore(tmp_path)
    results.save(some_result())
    results.stage(some_result(2))
    ResultStore(tmp_path).prepare()
    assert list((tmp_path / ".incoming").iterdir()) == []
    assert results.attempts("t", "t.0") == [1]


@pytest.mark.parametrize("name", ["..", "../t", "a/b", ".incoming", "", "t\x00"])
def test_no_id_leaves_the_folder(tmp_path: Path, name: str):
    results = ResultStore(tmp_path / "results")
    with pytest.raises(InvalidRequest):
        results.save(some_result(task_id=name))
    with pytest.raises(InvalidRequest):
        results.read("t", name, 1)


def test_a_data_folder_can_be_read_while_its_server_runs_and_after_it_ended(tmp_path: Path):
    path = tmp_path / "gangline.db"
    store = TaskStore(path)
    store.submit([request(num_samples=1)])
    with TaskReader(path) as reader:
        assert reader.task("t").status == "queued"
        store.lease("n1", NODE_URL, 1)
        assert reader.task("t").status == "running"
    store.close()
    assert not path.with_name("gangline.db-wal").exists()
    with TaskReader(path) as reader:
        assert reader.session("t.0").node_id == "n1"
        assert reader.request("t") == request(num_samples=1)
        with pytest.raises(StoreError, match="readonly"), reader.database.writing() as conn:
            conn.execute(sa.delete(schema.tasks))


def test_a_folder_without_a_database_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(NotFound, match="gangline up"):
        TaskReader(tmp_path / "gangline.db")
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_another_version_is_refused(tmp_path: Path):
    path = tmp_path / "gangline.db"
    with TaskStore(path) as store, store.database.writing() as conn:
        conn.execute(sa.update(schema.meta).values(value="99"))
    with pytest.raises(StoreError, match="schema version 99"):
        TaskStore(path)


def test_writes_are_in_the_log_and_synced_before_they_are_answered(tmp_path: Path):
    with TaskStore(tmp_path / "gangline.db") as store, store.database.writing() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_a_transaction_that_fails_leaves_no_trace_and_tells_nobody(tmp_path: Path):
    heard: list[str] = []
    with TaskStore(tmp_path / "gangline.db", on_events=lambda events: heard.extend(e.kind for e in events)) as store:
        store.submit([request(num_samples=1)])
        (lease,) = store.lease("n1", NODE_URL, 1)
        before, told = store.events(), list(heard)

        def lost_disk() -> None:
            raise StoreError("the disk is gone")

        with pytest.raises(StoreError, match="the disk is gone"):
            store.report(result(lease), lost_disk)
        assert (store.session("t.0").state, store.events(), heard) == ("leased", before, told)
        with pytest.raises(InvalidRequest, match="attempt 7"):
            store.report(msgspec.structs.replace(result(lease), attempt=7), lost_disk)
        with pytest.raises(InvalidRequest, match="task 'other'"):
            store.report(msgspec.structs.replace(result(lease), task_id="other"), lost_disk)
