"""`gangline up` as its users meet it: a real service of real child processes, over a scripted engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.service.cli_process import Start, UpProcess, gangline, processes_with, wait_for, wait_until_gone


def health(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        return answer.status


def sleeping_agent(mark: str) -> dict[str, Any]:
    """A task whose agent leaves a child in its own session, tells so, and sleeps."""
    command = f"setsid sh -c 'sleep 600 # {mark}' & echo > started; sleep 600 # {mark}"
    return {
        "task_id": "sleepers",
        "instruction": "sleep",
        "num_samples": 2,
        "runtime": {"backend": "process"},
        "agent": {"harness": "shell", "settings": {"command": command}},
    }


def submit_and_wait_for_run(up: UpProcess, task: dict[str, Any]) -> None:
    """Returns when every session of the task runs its agent."""
    done = gangline("submit", "-", "--data", up.data, stdin=json.dumps(task))
    assert done.returncode == 0, done.stderr
    running = up.running()
    request = urllib.request.Request(
        f"{running['server_url']}/v1/events?after=0", headers={"Authorization": f"Bearer {running['control_token']}"}
    )
    seen: set[str] = set()
    with urllib.request.urlopen(request, timeout=60) as events:
        for line in events:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line[5:])
            if event["kind"] == "session.stage" and event["data"]["stage"] == "run":
                seen.add(event["session_id"])
            if len(seen) == task["num_samples"]:
                return


def test_ready_is_one_line_with_urls_token_and_pid_and_all_of_them_answer(start: Start) -> None:
    up = start()
    ready = up.ready()
    assert set(ready) == {"server_url", "node_urls", "control_token", "pid"}
    assert ready["pid"] == up.process.pid
    assert health(ready["server_url"]) == 200
    assert [health(url) for url in ready["node_urls"]] == [200]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{ready['server_url']}/v1/status", timeout=10)


def test_the_token_is_in_no_argument_no_log_and_only_in_private_files(start: Start) -> None:
    up = start()
    token = up.ready()["control_token"]
    assert up.running()["control_token"] == token
    assert not [line for line in processes_with(str(up.data)).values() if token in line]
    holders = [path for path in up.data.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert {path.name for path in holders} == {"up.json", "running.json", "control_token"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in holders} == {0o600}


def test_sigterm_under_load_leaves_no_process_no_port_no_sandbox(start: Start) -> None:
    up = start()
    ready = up.ready()
    mark = f"mark-{os.getpid()}-term"
    submit_and_wait_for_run(up, sleeping_agent(mark))
    assert processes_with(mark)
    code, _ = up.end(signal.SIGTERM)
    assert code == 0
    assert processes_with(mark) == {}
    assert processes_with(str(up.data)) == {}
    assert not (up.data / "up.json").exists()
    assert list((up.data / "nodes" / "node-1" / "runtimes").iterdir()) == []
    for url in (ready["server_url"], *ready["node_urls"]):
        with pytest.raises(urllib.error.URLError):
            health(url)


def test_a_second_ctrl_c_is_immediate_and_still_leaves_nothing(start: Start) -> None:
    up = start()
    up.ready()
    mark = f"mark-{os.getpid()}-twice"
    submit_and_wait_for_run(up, sleeping_agent(mark))
    os.kill(up.running()["pids"]["node"], signal.SIGSTOP)  # a node that will not end by itself
    up.process.send_signal(signal.SIGINT)
    assert up.process.stderr is not None
    assert any("Stopping" in line for line in up.process.stderr)
    code, _ = up.end(signal.SIGINT)
    assert code == 0
    assert processes_with(mark) == {}
    assert processes_with(str(up.data)) == {}


def test_ctrl_c_before_it_is_ready_leaves_nothing(start: Start) -> None:
    up = start()
    wait_for((up.data / "logs" / "engine.log").exists)
    code, _ = up.end(signal.SIGINT)
    assert code == 0
    assert processes_with(str(up.data)) == {}


def test_kill_9_of_up_ends_every_child_and_their_sandboxes(start: Start) -> None:
    up = start()
    up.ready()
    mark = f"mark-{os.getpid()}-kill"
    submit_and_wait_for_run(up, sleeping_agent(mark))
    pids = up.running()["pids"]
    up.process.kill()
    assert set(pids) == {"engine", "server", "node"}
    assert all(wait_until_gone(pid) for pid in pids.values())
    assert processes_with(mark) == {}
    status = gangline("status", "--data", up.data, "--json")
    assert status.returncode == 3
    assert json.loads(status.stdout)["error"]["code"] == "server_unavailable"


def test_a_child_that_dies_is_started_again_on_its_port(start: Start) -> None:
    up = start()
    ready = up.ready()
    before = up.running()["pids"]
    for name in ("server", "node", "engine"):
        os.kill(before[name], signal.SIGKILL)
    agent = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
    task = {"instruction": "go", "agent": agent, "runtime": {"backend": "process"}}
    wait_until_gone(before["server"])
    answered = gangline("submit", "-", "--wait", "--json", "--data", up.data, stdin=json.dumps(task))
    while answered.returncode == 3:  # until the server is back
        answered = gangline("submit", "-", "--wait", "--json", "--data", up.data, stdin=json.dumps(task))
    assert answered.returncode == 0, answered.stderr
    after = up.running()
    assert after["server_url"] == ready["server_url"]
    assert after["node_urls"] == ready["node_urls"]
    assert not set(after["pids"].values()) & set(before.values())


def test_a_child_that_keeps_dying_ends_the_service_with_a_clear_message(start: Start) -> None:
    up = start()
    up.ready()
    killed: set[int] = set()
    while up.process.poll() is None and len(killed) < 5:
        try:
            pid = up.running()["pids"]["server"]
        except FileNotFoundError:
            break
        if pid not in killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.02)  # it needs the processor to start the next
    code, errors = up.outcome()
    assert code == 1
    assert "giving up: the server was ended by SIGKILL, 5 times" in errors
    assert "Traceback" not in errors
    assert processes_with(str(up.data)) == {}


def test_two_services_on_one_data_folder_are_refused(start: Start) -> None:
    first = start()
    first.ready()
    second = gangline("up", "--data", first.data, "--port", 0, "--engine", "http://127.0.0.1:9")
    assert second.returncode == 5
    assert "another `gangline up`" in second.stderr
    assert f"pid {first.process.pid}" in second.stderr
    assert first.end()[0] == 0


def test_a_port_in_use_is_a_clear_error(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start("--port", port)
        refused = up.ready()
        code, errors = up.outcome()
    assert code == 1
    assert refused["error"]["code"] == "port_unavailable"
    assert f"port {port}" in errors
    assert "--port" in errors
    assert processes_with(str(up.data)) == {}


def test_an_engine_that_is_down_is_named(start: Start) -> None:
    up = start("--engine", "http://127.0.0.1:9", "--engine-wait", 0.1)
    up.ready()
    code, errors = up.outcome()
    assert code == 3
    assert "http://127.0.0.1:9" in errors
    assert processes_with(str(up.data)) == {}


def test_an_engine_without_token_ids_is_refused_with_what_to_do(start: Start) -> None:
    up = start(script={"default": {"text": "x", "faults": {"no_token_ids": True}}})
    told = up.ready()
    code, errors = up.outcome()
    assert code == 1
    assert told["error"]["code"] == "engine_incapable"
    assert "token" in errors
    assert processes_with(str(up.data)) == {}


def test_a_script_that_is_wrong_is_refused_with_its_field(start: Start) -> None:
    up = start(script={"defalt": {}})
    told = up.ready()
    code, errors = up.outcome()
    assert code == 2
    assert told["error"]["code"] == "invalid_request"
    assert "defalt" in errors


def test_an_unknown_engine_names_what_there_is(tmp_path: Path) -> None:
    done = gangline("up", "--data", tmp_path, "--engine", "embeded:smollm2")
    assert done.returncode == 2
    assert "embedded:MODEL" in done.stderr
    assert "scripted:FILE" in done.stderr


def test_a_data_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = gangline("up", "--data", tmp_path / "file" / "data")
    assert done.returncode == 1
    assert "cannot write to the data folder" in done.stderr
    assert "Traceback" not in done.stderr
