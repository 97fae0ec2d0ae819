"""How commands find a running service, and how errors become exit codes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gangline.cli.terminal.exits import EXPLAINED, Exit, exit_code, report
from gangline.domain.errors import (
    Conflict,
    EngineIncapable,
    EngineUnavailable,
    GanglineError,
    InvalidRequest,
    LeaseLost,
    NotFound,
    PortUnavailable,
    ServerUnavailable,
    Unauthorized,
    UnknownPlugin,
)
from gangline.wire.client import running

RUNNING = running.Running(
    server_url="http://127.0.0.1:1",
    node_urls=("http://127.0.0.1:2",),
    control_token="secret",
    pid=7,
    engine_url="http://127.0.0.1:3",
    pids={"server": 8},
)


def test_a_service_is_found_while_its_lock_is_held_and_not_after(tmp_path: Path) -> None:
    with running.held(tmp_path):
        running.publish(tmp_path, RUNNING)
        assert running.read_running(tmp_path) == RUNNING
        found = running.find_service(tmp_path, None)
        assert found == running.Service(server_url="http://127.0.0.1:1", control_token="secret")
    assert running.read_running(tmp_path) is None  # as after a kill -9: the file is there, the lock is not
    with pytest.raises(ServerUnavailable, match="gangline up --data"):
        running.find_service(tmp_path, None)


def test_a_folder_is_held_once(tmp_path: Path) -> None:
    with running.held(tmp_path):
        running.publish(tmp_path, RUNNING)
        with pytest.raises(Conflict, match="pid 7"), running.held(tmp_path):
            pass
    with running.held(tmp_path):
        pass


def test_a_named_server_wins_and_takes_its_token_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_TOKEN", "mine")
    found = running.find_service(tmp_path, "http://elsewhere:1/")
    assert found == running.Service(server_url="http://elsewhere:1", control_token="mine")


def test_a_named_folder_wins_over_the_environments_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_SERVER", "http://elsewhere:1")
    with running.held(tmp_path):
        running.publish(tmp_path, RUNNING)
        assert running.find_service(tmp_path, None).server_url == RUNNING.server_url
    assert running.find_service(None, None).server_url == "http://elsewhere:1"


def test_the_token_is_private_and_the_same_over_restarts(tmp_path: Path) -> None:
    first = running.keep_token(tmp_path, None)
    assert running.keep_token(tmp_path, None) == first
    assert stat.S_IMODE((tmp_path / "control_token").stat().st_mode) == 0o600
    assert running.keep_token(tmp_path, "given") == "given"
    assert running.keep_token(tmp_path, None) == first


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x"), 2),
        (UnknownPlugin("x"), 2),
        (ServerUnavailable("x"), 3),
        (EngineUnavailable("x"), 3),
        (NotFound("x"), 4),
        (Conflict("x"), 5),
        (Unauthorized("x"), 6),
        (PortUnavailable("x"), 1),
        (EngineIncapable("x"), 1),
        (LeaseLost("x"), 1),
        (GanglineError("x"), 1),
    ],
)
def test_exit_codes_are_a_promise(error: GanglineError, code: int) -> None:
    assert exit_code(error) == code


def test_every_exit_code_is_explained() -> None:
    assert set(EXPLAINED) == set(Exit)


def test_an_error_is_one_line_on_stderr_and_a_document_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(NotFound("no such thing."), as_json=True) == Exit.NOT_FOUND
    told = capsys.readouterr()
    assert told.err == "gangline: no such thing.\n"
    assert told.out == '{"error":{"code":"not_found","message":"no such thing.","retryable":false}}\n'
