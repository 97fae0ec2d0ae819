"""`gangline` alone looks at the folder, and says what to do next."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.cli.commands import COMMANDS
from gangline.cli.main import build_app
from gangline.cli.starting.next_steps import Found, next_steps
from gangline.domain.views import NodeView, ServiceStatus


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GANGLINE_DATA", raising=False)
    monkeypatch.delenv("GANGLINE_SERVER", raising=False)
    return tmp_path


def commands(found: Found) -> list[str]:
    return [command.removeprefix("gangline ") for command, _ in next_steps(found)]


def here(folder: Path, *files: str, status: ServiceStatus | None = None, task: str | None = None) -> list[str]:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    found = Found(folder, folder / ".gangline")
    found.status = status
    found.task = task or found.task
    return commands(found)


def running(*nodes: NodeView, **sessions: int) -> ServiceStatus:
    told: dict[str, Any] = {"version": "1", "at": 0.0, "tasks": {}, "stages": {}, "callbacks": {}}
    return ServiceStatus(**told, oldest_queued_s=None, sessions=sessions, nodes=nodes)


NODE = NodeView(
    node_id="n", url="http://n", capacity=1, draining=False, num_sessions=0, first_seen_at=0, last_seen_at=0, age_s=0
)


def test_in_an_empty_folder_it_begins_at_the_beginning(folder: Path) -> None:
    assert here(folder) == ["doctor", "demo", "init FOLDER"]


def test_in_a_folder_of_init_the_service_comes_first(folder: Path) -> None:
    found = here(folder, "tasks.py", "experiment.yaml")
    assert found == ["up", "python3 tasks.py", "submit task.json --wait", "train run experiment.yaml"]
    assert here(folder, "tasks.jsonl")[:2] == ["up", "submit tasks.jsonl --wait"]


def test_unfinished_results_are_no_task(folder: Path) -> None:
    for name in ("first", ".incoming"):
        (folder / ".gangline" / "server" / "results" / name).mkdir(parents=True)
    os.utime(folder / ".gangline" / "server" / "results" / "first", (1, 1))
    assert here(folder)[:2] == ["show first", "export first --format jsonl"]


def test_sessions_that_were_recorded_are_shown_without_a_service(folder: Path) -> None:
    results = ".gangline/server/results"
    assert here(folder, f"{results}/old/old.0/a", f"{results}/new/new.0/a")[0] == "show new"


def test_a_service_without_a_node_or_with_open_sessions_says_so_first(folder: Path) -> None:
    assert here(folder, status=running(queued=3), task="t")[:3] == ["node", "watch", "status t"]
    assert here(folder, status=running(NODE, leased=1), task="t")[0] == "watch"
    assert here(folder, status=running(NODE, ended=1), task="t")[0] == "status t"


def test_a_service_without_a_task_is_given_those_of_the_folder(folder: Path) -> None:
    assert here(folder, "task.json", status=running(NODE)) == ["submit task.json --wait"]


def test_a_training_that_has_not_ended_is_named(folder: Path) -> None:
    assert "runs show first" in here(folder, ".gangline/runs/first/lineage.json")
    assert "runs list" in here(folder, ".gangline/runs/first/results.json")


def test_two_evaluations_are_compared(folder: Path) -> None:
    assert here(folder, ".gangline/evals/a/report.json", ".gangline/evals/b/report.json")[-1] == "compare a b"


def test_each_command_that_is_proposed_is_one(folder: Path) -> None:
    every = {
        *here(folder),
        *here(folder, "tasks.py", "experiment.yaml", ".gangline/runs/r/lineage.json", ".gangline/evals/a/report.json"),
        *here(folder, ".gangline/server/results/t/t.0/a", ".gangline/evals/b/report.json", status=running(queued=1)),
        *here(folder, status=running(NODE)),
    }
    assert {command.split()[0] for command in every} - {"python3"} <= set(COMMANDS)


def test_the_command_alone_prints_it_and_leaves_out_what_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = CliRunner().invoke(build_app(), [])
    assert told.exit_code == 0
    assert "gangline demo" in told.output
    assert "gangline --help" in told.output
    monkeypatch.setattr("gangline.cli.main.is_installed", lambda name: name != "demo")  # type: ignore[misc]
    assert "gangline demo" not in CliRunner().invoke(build_app(), []).output


def test_a_server_that_is_silent_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def client(self) -> Silent:
            return self

        async def __aenter__(self) -> None:
            await asyncio.Event().wait()

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr("gangline.cli.starting.next_steps._PATIENCE_S", 0.01)
    monkeypatch.setattr("gangline.cli.starting.next_steps.find_service", Silent)
    told = CliRunner().invoke(build_app(), [])
    assert told.exit_code == 0
    assert "has not answered" in told.output
    assert "gangline doctor" in told.output


def test_a_named_server_that_does_not_answer_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        from gangline.domain.errors import ServerUnavailable

        raise ServerUnavailable("nobody answers at http://far:1.")

    monkeypatch.setenv("GANGLINE_SERVER", "http://far:1")
    monkeypatch.setattr("gangline.cli.starting.next_steps.find_service", refuse)
    told = CliRunner().invoke(build_app(), [])
    assert told.exit_code == 0
    assert "nobody answers at http://far:1." in told.output


@pytest.mark.parametrize("folder", ["server/results", "runs", "evals"])
def test_what_vanishes_while_it_is_looked_at_is_passed_over(tmp_path: Path, folder: str) -> None:
    data = tmp_path / ".gangline"
    for name, file in (("here", "lineage.json"), ("here", "report.json")):
        (data / folder / name).mkdir(parents=True, exist_ok=True)
        (data / folder / name / file).write_text("{}")
    (data / folder / "gone").symlink_to(tmp_path / "nowhere")
    found = Found(tmp_path, data)
    assert {found.task, found.run, *found.evaluations} == {None, "here"}
