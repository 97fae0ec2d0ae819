"""What `gangline doctor` says of engines, ports and services that are really there, or really not."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.machine import checks_service
from gangline.cli.machine.checks_service import (
    check_engine,
    check_open_files,
    check_runtimes,
    check_server_port,
    check_service,
)
from gangline.domain.errors import RuntimeUnavailable
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.settings.installation import extra_command
from gangline.settings.machine import Settings
from gangline.wire.client.server import ServerClient
from support.service.cli_process import gangline
from support.service.running import FakeNode, any_plugin

TOKEN = "control-secret"


def settings(data: Path, **told: Any) -> Settings:
    return Settings.from_environ({"GANGLINE_DATA": str(data), **told})


async def test_an_engine_is_asked_what_it_can_do() -> None:
    async with scripted_server({"default": {"text": "x"}}) as url:
        check = await asyncio.to_thread(check_engine, url)
    assert check.state == "ok"
    assert "scripted" in check.found
    assert "exact prompt ids are taken" in check.found


def test_an_engine_that_is_not_there_fails_the_command(tmp_path: Path) -> None:
    done = gangline("doctor", "--engine", "http://127.0.0.1:9", "--data", tmp_path, "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["engine http://127.0.0.1:9"]["state"] == "missing"
    assert done.returncode == 1


async def test_a_service_without_nodes_is_told_what_to_start(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running:
        named = settings(tmp_path, GANGLINE_SERVER=running.url, GANGLINE_TOKEN=TOKEN)
        check = await asyncio.to_thread(check_service, named)
    assert check.state == "optional"
    assert "gangline node" in check.advice


async def test_a_node_without_an_engine_is_told(tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        await FakeNode(client).beat([])
        named = settings(tmp_path, GANGLINE_SERVER=running.url, GANGLINE_TOKEN=TOKEN)
        check = await asyncio.to_thread(check_service, named)
    assert (check.state, "n1 has no engine" in check.advice) == ("optional", True)


@pytest.mark.parametrize("token", ["wrong", ""])
async def test_a_service_that_refuses_the_token_is_broken(tmp_path: Path, token: str) -> None:
    async with serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running:
        named = settings(tmp_path, GANGLINE_SERVER=running.url, GANGLINE_TOKEN=token)
        check = await asyncio.to_thread(check_service, named)
    assert check.state == "missing"
    assert "token" in check.advice


def test_no_service_is_no_fault(tmp_path: Path) -> None:
    assert check_service(settings(tmp_path)).state == "ok"


def test_a_port_that_is_taken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(checks_service, "_USUAL_PORT", taken.getsockname()[1])
        check = check_server_port(settings(tmp_path))
    assert (check.state, "in use" in check.found) == ("optional", True)
    assert check_server_port(settings(tmp_path)).state == "ok"


def test_few_files_are_told_before_they_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_service.resource, "getrlimit", lambda _which: (1024, 1024))
    check = check_open_files(settings(tmp_path))
    assert (check.state, "128 sessions" in check.advice) == ("optional", True)


def test_a_runtime_that_does_not_run_here_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoHarbor:
        async def check(self) -> None:
            raise RuntimeUnavailable("Harbor has no Docker. Start it.")

    monkeypatch.setattr(checks_service.plugins, "usable", lambda _kind: ["harbor", "sandbox"])
    monkeypatch.setattr(checks_service.plugins, "make_runtime", lambda _name: NoHarbor())
    check = check_runtimes(settings(tmp_path))
    assert (check.state, check.found) == ("optional", "harbor: no")
    assert "Start it." in check.advice


def test_a_collector_without_the_extra_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = settings(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318")
    assert checks_service.check_traces(wanted).state == "ok"
    monkeypatch.setattr(checks_service.importlib.util, "find_spec", lambda _name: None)
    assert extra_command("otel") in checks_service.check_traces(wanted).advice
