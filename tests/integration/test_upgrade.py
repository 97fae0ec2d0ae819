"""Data folders of earlier versions: each opens, or is refused before anything changes, with the way out."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from gangline.cli.machine.doctor import check_data_folder
from gangline.cli.service.bring_up import Plan, run_service
from gangline.domain.errors import OtherVersion
from gangline.settings.machine import Settings
from gangline.store.journal.log import AttemptKey, Journal
from gangline.store.journal.marker import check_journal
from gangline.store.sql import schema
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.sync import SyncServerClient
from support.service.cli_process import UpProcess, gangline
from support.store.postgres import Cluster

DATA = Path(__file__).parents[1] / "data" / "upgrade"
KEPT = sorted(DATA.glob("*.tar.xz"))
ON_POSTGRESQL = sorted((DATA / "postgresql").glob("*.tar.xz"))
"""Of services whose node was killed while it ran a session."""
WITHOUT_MARKER = ("schema-2-",)
"""Their journals have frames without the marker that later ones have."""
READ = [path for path in KEPT if not path.name.startswith(WITHOUT_MARKER)]
REFUSED = [path for path in KEPT if path.name.startswith(WITHOUT_MARKER)]


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    text = folder / "server" / "gangline.sql"
    with sqlite3.connect(folder / "server" / "gangline.db") as database:
        database.executescript(text.read_text())
    database.close()
    text.unlink()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def name_of(path: Path) -> str:
    return path.name.removesuffix(".tar.xz")


def test_every_schema_since_the_second_has_a_data_folder() -> None:
    assert [name_of(path).split("-")[1] for path in KEPT] == [str(one) for one in range(2, schema.SCHEMA_VERSION + 1)]


@pytest.mark.parametrize("archive", KEPT, ids=name_of)
def test_a_server_brings_the_database_of_an_earlier_version_up_to_date(archive: Path, tmp_path: Path) -> None:
    folder = unpacked(archive, tmp_path)
    TaskStore(str(folder / "server" / "gangline.db")).close()
    with sqlite3.connect(folder / "server" / "gangline.db") as database:
        version = database.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        harnesses = database.execute("SELECT harness, run FROM tasks").fetchall()
        states = database.execute("SELECT session_id, state, reward FROM sessions ORDER BY position").fetchall()
    database.close()
    assert version == (str(schema.SCHEMA_VERSION),)
    assert harnesses == [("shell", "")] * 2
    assert states == [("ended.0", "ended", 1.0), ("open.0", "leased", None)]


@pytest.mark.asyncio
@pytest.mark.parametrize("archive", READ, ids=name_of)
async def test_a_node_finds_the_open_session_of_an_earlier_version_with_its_call(archive: Path, tmp_path: Path) -> None:
    folder = unpacked(archive, tmp_path) / "nodes" / "node-1" / "journal"
    check_journal(folder)
    journal = Journal.open(folder)
    (one,) = [one for one in journal.unclosed() if one.session_id == "open.0"]
    assert len(await journal.read(AttemptKey(one.session_id, one.attempt))) == 1
    await journal.close()


def test_the_last_three_schemas_have_data_on_postgresql() -> None:
    newest = schema.SCHEMA_VERSION
    assert [int(name_of(path).split("-")[0]) for path in ON_POSTGRESQL] == [newest - 2, newest - 1, newest]


@pytest.mark.parametrize("archive", ON_POSTGRESQL, ids=name_of)
def test_a_service_goes_on_with_all_that_an_earlier_version_left_on_postgresql(
    archive: Path, tmp_path: Path, postgres: Cluster
) -> None:
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (tmp_path / "site").rename(tmp_path / "data")
    (tmp_path / "node-1" / "nodes").rename(tmp_path / "data" / "nodes")
    url = postgres.new_database()
    subprocess.run(["psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={tmp_path / 'database.sql'}", url], check=True)
    settings = Settings(data_dir=tmp_path / "data", database_url=url)
    assert check_data_folder(settings).state != "missing"
    options = ("--database", url, "--results", tmp_path / "data" / "results")
    with closing(UpProcess(tmp_path, *options)) as up:
        with SyncServerClient(up.ready()["server_url"], up.running()["control_token"]) as client:
            for task_id in ("ended", "open", "queued"):
                assert client.wait(task_id, timeout_s=120).outcomes == {"completed": 1}
                (session,) = client.task(task_id).sessions
                assert session.node_id == "node-1"
        for task_id in ("ended", "open", "queued"):
            shown = gangline("show", f"{task_id}.0", "--data", up.data)
            assert "as you wish" in shown.stdout, shown.stderr


@pytest.mark.parametrize("archive", REFUSED, ids=name_of)
def test_a_journal_of_a_version_that_is_not_read_is_refused_before_anything_changes(
    archive: Path, tmp_path: Path
) -> None:
    folder = unpacked(archive, tmp_path)
    before = content(folder)

    async def nothing(_running: object) -> None:
        raise AssertionError("it started")

    with pytest.raises(OtherVersion, match=f"mv {folder}/nodes/node-1/journal .*sessions that were open there") as why:
        asyncio.run(run_service(Plan(data_dir=folder), nothing))
    assert not why.value.retryable
    after = content(folder)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) <= {"up.lock"}
    check = check_data_folder(Settings(data_dir=folder))
    assert (check.state, check.advice) == ("missing", why.value.message)


@pytest.mark.parametrize("named", ["folder", "url"])
@pytest.mark.parametrize("is_running", [False, True])
def test_the_database_of_a_later_version_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, is_running: bool
) -> None:
    file = tmp_path / ("data" if named == "folder" else "elsewhere") / "server" / "gangline.db"
    TaskStore(str(file)).close()
    settings = Settings(data_dir=tmp_path / "data")
    if named == "url":
        settings = settings.model_copy(update={"database_url": f"sqlite:///{file}"})
        monkeypatch.setenv("GANGLINE_DATABASE", f"sqlite:///{file}")
    database = sqlite3.connect(file)
    database.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(schema.SCHEMA_VERSION + 1),))
    database.commit()
    if not is_running:
        database.close()
    before = content(file.parent)
    check = check_data_folder(settings)
    with pytest.raises(OtherVersion, match="a newer Gangline made it: use that one, or another data folder") as why:
        asyncio.run(run_service(Plan(data_dir=settings.data_dir), never))
    database.close()
    assert (check.state, check.advice) == ("missing", why.value.message)
    assert str(file) in why.value.message
    assert {path.name for path in settings.data_dir.iterdir()} <= {"server", "logs", "up.lock", ".gitignore"}
    if not is_running:
        after = content(file.parent)
        assert {name: after[name] for name in before} == before


async def never(_running: object) -> None:
    raise AssertionError("it started")


@pytest.mark.parametrize("bytes_there", [b"", b"no database", b"SQLite format 3\0" + b"\xff" * 200])
def test_a_file_that_is_no_database_is_left_to_the_server(tmp_path: Path, bytes_there: bytes) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "gangline.db").write_bytes(bytes_there)
    assert check_data_folder(Settings(data_dir=tmp_path)).found != "the database is of a newer version"
