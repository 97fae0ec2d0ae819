"""`gangline drift` on a data folder with real result files and a real database, and on a running server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from gangline.cli.results import drift
from gangline.cli.results.drift import drift_document
from gangline.cli.results.records import open_records
from gangline.domain.errors import GanglineError, NotFound
from gangline.domain.session import SessionResult
from gangline.server.run import serving
from gangline.store.results.files import ResultStore
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request
from support.strategies import session_result


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGLINE_SERVER", "GANGLINE_DATA"):
        monkeypatch.delenv(name, raising=False)


def result(task_id: str, number: int) -> SessionResult:
    """Two of its completions diverged, each for its own cause."""
    made = session_result(task_id=task_id, session_id=f"{task_id}.{number}")
    own = tuple(msgspec.structs.replace(one, session_id=made.session_id) for one in made.completions)
    return msgspec.structs.replace(made, completions=own)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    store = ResultStore(tmp_path / "server" / "results")
    store.prepare()
    for task_id, number in (("task-1", 0), ("task-1", 1), ("task-2", 0)):
        store.save(result(task_id, number))
    with TaskStore(tmp_path / "server" / "gangline.db") as tasks:
        tasks.submit([request("task-1"), request("task-2", agent={"harness": "pi"})])
    return tmp_path


def call(data: Path, *arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    drift.register(app)
    ran = CliRunner().invoke(app, [*arguments, "--data", str(data)], env={"COLUMNS": "160"})
    if isinstance(ran.exception, GanglineError):
        raise ran.exception
    return ran


def document(data: Path, *arguments: str) -> dict[str, Any]:
    return json.loads(call(data, *arguments, "--json").stdout)


def test_all_tasks_are_counted_each_by_itself_and_together(data: Path) -> None:
    found = document(data)
    assert {name: report["num_sessions"] for name, report in found["groups"].items()} == {"task-1": 2, "task-2": 1}
    assert found["total"]["num_completions"] == 3 * len(session_result().completions)
    assert found["total"]["contexts"]["diverged"] == 6 == len(found["total"]["breaks"])


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("session", ["task-1.0", "task-1.1", "task-2.0"]),
        ("harness", ["shell", "pi"]),
        ("model", ["model"]),
        ("dialect", ["chat"]),
    ],
)
def test_calls_are_counted_by_what_is_asked_for(data: Path, by: str, groups: list[str]) -> None:
    assert list(document(data, "--by", by)["groups"]) == groups


def test_one_task_or_session_is_reported_alone(data: Path) -> None:
    assert document(data, "task-2")["total"]["num_sessions"] == 1
    assert document(data, "task-1.1")["total"]["num_sessions"] == 1


def test_the_table_names_shares_and_causes_and_where_chains_break(data: Path) -> None:
    shown = call(data, "task-1").stdout
    titles, row, *rest = shown.splitlines()
    assert "exact share" in titles
    assert row.split()[:2] == ["task-1", "2"]
    causes = [line for line in rest if line.startswith("causes:")]
    assert causes == ["causes: 2 x bpe_merge", "causes: 2 x unknown"]
    assert sum("diverged at id" in line for line in rest) == 4


def test_without_its_database_a_harness_is_unknown(data: Path) -> None:
    (data / "server" / "gangline.db").unlink()
    assert list(document(data, "--by", "harness")["groups"]) == ["unknown"]


def test_nothing_recorded_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "server" / "results").mkdir(parents=True)
    with pytest.raises(NotFound, match="nothing to report on"):
        call(tmp_path)


async def test_a_server_gives_the_same_report(tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url) as client,
    ):
        await client.submit(request("task-1", num_samples=1))
        node = FakeNode(client)
        await node.finish(await node.lease(), completions=result("task-1", 0).completions)
        records = open_records(None, running.url)
        for by, name in (("task", "task-1"), ("harness", "shell")):
            found = await asyncio.to_thread(drift_document, records, None, by)
            assert list(found["groups"]) == [name]
            assert found["total"].num_completions == len(session_result().completions)
