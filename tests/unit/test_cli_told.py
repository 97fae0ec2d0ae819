"""What commands say in places where people went wrong."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from gangline.cli.machine.checks import CHECKS
from gangline.cli.machine.checks_service import check_runtimes
from gangline.cli.options.settings import COMMANDS, given_to
from gangline.cli.service import node_addresses, status, up
from gangline.cli.service.bring_up import Plan
from gangline.cli.tasks.files import parse_tasks
from gangline.cli.terminal.exits import Exit, report
from gangline.domain.errors import InvalidRequest, ServerUnavailable, Unauthorized
from gangline.domain.views import NodeView, ServiceStatus, SessionView
from gangline.settings.machine import Settings
from gangline.settings.service import LEAVES
from gangline.wire.client.running import Running

SESSION = SessionView(
    session_id="t.0", task_id="t", sample_index=0, state="queued", attempt=1, max_attempts=3, fence=0, created_at=0
)


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_nothing_on_stdin_is_called_nothing(text: str) -> None:
    with pytest.raises(InvalidRequest, match="standard input is empty: it holds no task"):
        parse_tasks(text, "standard input")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_token_is_told_as_the_command_line_takes_it(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    said = Unauthorized("the token is missing, wrong, expired or revoked; send `Authorization: Bearer TOKEN`.")
    assert report(said, as_json=as_json) == Exit.UNAUTHORIZED
    out, err = capsys.readouterr()
    assert "GANGLINE_TOKEN" in err
    assert "--data" in err
    assert "revoked" in err
    assert "control token" not in err, "a tenant has another, and must not ask for it"
    assert "Bearer" not in out + err
    assert ("GANGLINE_TOKEN" in out) is as_json


@pytest.mark.parametrize(
    ("state", "outcome", "ended_at", "told"),
    [
        ("ended", "completed", 1.0, "had ended; there was nothing to cancel"),
        ("ended", "infra_error", 1.0, "had ended; there was nothing to cancel"),
        ("ended", "cancelled", 1.0, "cancelled"),
        ("leased", None, None, "cancelled"),
    ],
)
def test_a_session_that_had_ended_is_not_called_cancelled(
    state: Any, outcome: Any, ended_at: float | None, told: str
) -> None:
    one = msgspec.structs.replace(SESSION, state=state, outcome=outcome, ended_at=ended_at)
    assert status._cancelled_text(one) == told  # pyright: ignore[reportPrivateUsage]


def test_doctor_names_each_runtime_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = {check.__name__.removeprefix("check_") for check in CHECKS}
    told = check_runtimes(Settings()).found
    assert {"apptainer", "docker", "podman"} <= checked
    assert not [name for name in checked if f"{name}:" in told]
    assert "process: yes" in told


def announced(plan: Plan, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    live = Running(server_url=url, node_urls=(), control_token="t", pid=1, engine_url="", pids={})
    up._announce(live, plan, False)  # pyright: ignore[reportPrivateUsage]
    return capsys.readouterr().out


def test_up_says_that_its_port_was_taken_and_how_the_page_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Plan(data_dir=tmp_path / ".gangline", port=None, engine="")
    told = announced(plan, "http://127.0.0.1:38089", capsys)
    assert "http://127.0.0.1:38089  (port 8700 is taken)" in told
    assert "page    gangline open\n" in told
    assert "taken" not in announced(plan, "http://127.0.0.1:8700", capsys)
    elsewhere = Plan(data_dir=tmp_path / "my data", port=9000, engine="")
    told = announced(elsewhere, "http://127.0.0.1:9000", capsys)
    assert "taken" not in told
    assert f"gangline open --data '{tmp_path}/my data'" in told


class _Client:
    async def status(self) -> ServiceStatus:
        told: dict[str, Any] = {"node_id": "n", "capacity": 1, "draining": False, "num_sessions": 0, "age_s": 0}
        node = NodeView(**told, url="http://far:8701", first_seen_at=0, last_seen_at=0)
        counts: dict[str, Any] = {"tasks": {}, "sessions": {}, "stages": {}, "callbacks": {}}
        return ServiceStatus(version="1", at=0, oldest_queued_s=None, nodes=(node,), **counts)


_TEXTS = {int: "3", float: "3", bool: None}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_understood_by_the_name_of_its_key(command: str) -> None:
    by_key: list[str] = []
    by_option: list[str] = []
    for key in COMMANDS[command].options:
        leaf = LEAVES[key]
        text = get_args(leaf.kind)[0] if get_origin(leaf.kind) is Literal else _TEXTS.get(leaf.kind, "1")
        values = [] if text is None else [text]
        by_key += [f"--{key.rpartition('.')[2].replace('_', '-')}", *values]
        by_option += [leaf.option, *values]
    assert set(given_to(COMMANDS[command], by_key)) == set(COMMANDS[command].options)
    assert given_to(COMMANDS[command], by_key) == given_to(COMMANDS[command], by_option)


def test_an_option_under_both_its_names_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--id is given in two ways"):
        given_to(COMMANDS["node"], ["--id", "a", "--node-id", "b"])


@pytest.mark.parametrize("named", [True, False])
async def test_nodes_are_those_of_the_server_that_is_named(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By --server, and by GANGLINE_SERVER."""

    @asynccontextmanager
    async def client(url: str, token: str | None) -> AsyncGenerator[_Client]:
        assert (url, token) == ("http://far:8700", "secret")
        yield _Client()

    monkeypatch.setattr("gangline.wire.client.server.ServerClient", client)
    monkeypatch.setenv("GANGLINE_TOKEN", "secret")
    monkeypatch.setenv("GANGLINE_DATA", str(tmp_path))
    if not named:
        monkeypatch.setenv("GANGLINE_SERVER", "http://far:8700")
    found = await node_addresses.find_nodes(None, None, "http://far:8700" if named else None)
    assert found == [node_addresses.NodeAddress("http://far:8701", "secret")]


async def test_without_a_service_or_a_server_there_is_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGLINE_SERVER", raising=False)
    with pytest.raises(ServerUnavailable, match="--node URL"):
        await node_addresses.find_nodes(tmp_path, None)
