"""The log of control actions, of a real server and a real node: who did what, who was refused, and no secret in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.errors import InvalidRequest, Unauthorized
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.store.audit import ActionLog, read_actions
from gangline.wire.client.server import ServerClient
from gangline.wire.http.routes import Action, who
from support.node.node import TOKEN, running_node
from support.sdk.http_calls import status_of
from support.service.cli_process import gangline
from support.service.running import FakeNode, any_plugin, request


def told(action: Action) -> tuple[str, str, int]:
    return action.method, action.path, action.status


async def test_changes_are_written_down_with_who_did_them_and_routine_and_looking_are_not(tmp_path: Path):
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        await client.submit(request("t1"))
        node = FakeNode(client)
        leases = await node.lease()
        await node.beat(leases)
        await node.finish(leases[:1])
        await client.cancel_session(leases[1].session_id)
        await client.status()
        with pytest.raises(InvalidRequest):
            await client.submit({"task_id": "bad"})
    found = read_actions([tmp_path / "server" / "actions"])
    assert [told(action) for action in found] == [
        ("POST", "/v1/tasks", 200),
        ("DELETE", "/v1/sessions/t1.1", 200),
        ("POST", "/v1/tasks", 400),
    ]
    assert [action.subject for action in found] == ["t1", None, None]
    assert {(action.where, action.who, action.address) for action in found} == {("server", who(TOKEN), "127.0.0.1")}
    assert found[0].at <= found[1].at


async def test_who_is_refused_is_written_down_apart(tmp_path: Path):
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN) as running,
        ServerClient(running.url, "stolen-key") as client,
    ):
        with pytest.raises(Unauthorized):
            await client.status()
        with pytest.raises(Unauthorized):
            await client.cancel("t1")
    folders = [tmp_path / "server" / "actions"]
    assert read_actions(folders) == []
    refused = read_actions(folders, refused=True)
    assert [told(action) for action in refused] == [("GET", "/v1/status", 401), ("DELETE", "/v1/tasks/t1", 401)]
    assert {action.who for action in refused} == {who("stolen-key")}


async def test_a_node_writes_down_what_the_control_token_changes_and_not_what_agents_do(tmp_path: Path):
    async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path, engine) as node:
        opened = await node.client.open_session(session_id="s1")
        await node.ask("POST", "/v1/sessions/s1/complete", {}, key=opened.api_key)
        await node.client.set_version(3)
        (one,) = await node.client.backends()
        await node.client.detokenize(one.template.tokenizer_digest, [1])
        assert (await node.ask("DELETE", "/v1/backends", key="wrong"))[0] == 401
    folder = tmp_path / "nodes" / "n1" / "actions"
    assert [told(action) for action in read_actions([folder])] == [
        ("POST", "/v1/sessions", 200),
        ("POST", "/v1/gate/version", 200),
    ]
    assert [told(action) for action in read_actions([folder], refused=True)] == [("DELETE", "/v1/backends", 401)]


async def test_the_command_shows_them_and_no_token_is_anywhere_in_the_data_folder(tmp_path: Path):
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "10.1.2.3"}) as http,
    ):
        await client.submit(request("t1"))
        job = {
            "instance": {"agent": {"harness": "shell"}, "instruction": "x"},
            "sampling_params": {"api_key": "sk-123"},
        }
        await status_of(http, "POST", f"{running.url}/stop")
        await status_of(http, "POST", f"{running.url}/process", json=job)
    shown = gangline("actions", "--data", str(tmp_path))
    assert all(word in shown.stdout for word in ("/v1/tasks", "(t1)", "10.1.2.3", who(TOKEN)))
    lines = gangline("actions", "--data", str(tmp_path), "--json", "--last", "2").stdout.splitlines()
    assert [(json.loads(line)["path"], json.loads(line)["forwarded_for"]) for line in lines] == [
        ("/stop", "10.1.2.3"),
        ("/process", "10.1.2.3"),
    ]
    held = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in held
    assert b"sk-123" not in held


def an_action(**changes: Any) -> Action:
    fields: dict[str, Any] = {"at": 1.0, "where": "server", "who": "no token", "address": "", "method": "POST"}
    return Action(**(fields | {"path": "/stop", "status": 200} | changes))


def test_a_log_is_bounded_and_only_its_owner_may_read_it(tmp_path: Path):
    log = ActionLog(tmp_path / "a", where="server", max_file_bytes=2000, max_files=3)
    for number in range(100):
        log.write(an_action(at=float(number), path="/" + "p" * 10_000))
    files = sorted((tmp_path / "a").iterdir())
    assert [path.name for path in files] == ["actions.1.jsonl", "actions.2.jsonl", "actions.jsonl"]
    assert all(path.stat().st_size <= 2000 for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert read_actions([tmp_path / "a"])[-1].at == 99.0


def test_strangers_who_are_refused_push_no_action_out(tmp_path: Path):
    log = ActionLog(tmp_path, where="server", max_file_bytes=500, max_files=2)
    log.write(an_action(at=0.5))
    for _ in range(50):
        log.write(an_action(status=401))
    assert [action.at for action in read_actions([tmp_path])] == [0.5]


def test_a_log_that_cannot_be_written_stops_no_action(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    ActionLog(tmp_path / "file", where="server").write(an_action())
    assert "actions.not_written" in caplog.text


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path):
    log = ActionLog(tmp_path, where="server")
    log.write(an_action())
    with (tmp_path / "actions.jsonl").open("ab") as file:
        file.write(b'{"at": 2.0, "whe')
    assert len(read_actions([tmp_path])) == 1
