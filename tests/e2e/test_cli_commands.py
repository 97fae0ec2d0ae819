"""The commands that talk to a running service, and the example of the README."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.requirements import need_command
from support.service.cli_process import UpProcess, clean_environment, gangline

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    service = UpProcess(tmp_path_factory.mktemp("up"), script={"default": {"text": "hello to you"}})
    assert "server_url" in service.ready()
    yield service
    service.close()


def shell_task(command: str, **fields: object) -> str:
    task = {
        "instruction": "go",
        "runtime": {"backend": "process"},
        "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
        **fields,
    }
    return json.dumps(task)


def test_submit_and_wait_gives_the_ended_task_as_json(up: UpProcess) -> None:
    done = gangline("submit", "-", "--wait", "--json", "--data", up.data, stdin=shell_task("true", num_samples=2))
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout)
    assert task["status"] == "ended"
    assert task["outcomes"] == {"completed": 2}
    assert task["rewards"] == [1.0, 1.0]


def test_tasks_in_flight_are_limited_and_all_are_run(up: UpProcess) -> None:
    tasks = f"[{','.join(shell_task('true', task_id=f'turn-{at}') for at in range(4))}]"
    options = ("--wait", "--in-flight", "1", "--shard", "1/2", "--json")
    done = gangline("submit", "-", *options, "--data", up.data, stdin=tasks)
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["task_id"], one["status"]) for one in ended] == [("turn-0", "ended"), ("turn-2", "ended")]


def test_a_task_from_options_alone(up: UpProcess) -> None:
    options = ("--instruction", "go", "--command", "exit 3", "--runtime", "process", "--task-id", "from-options")
    done = gangline("submit", *options, "--wait", "--data", up.data)
    assert done.returncode == 1, done.stderr  # no session completed
    assert "agent_error" in done.stdout
    shown = gangline("status", "from-options", "--json", "--data", up.data)
    assert json.loads(shown.stdout)["outcomes"] == {"agent_error": 1}


def test_submitting_again_is_harmless_and_other_content_is_a_conflict(up: UpProcess) -> None:
    first, second = (
        gangline("submit", "-", "--json", "--data", up.data, stdin=shell_task("true", task_id="again")) for _ in "ab"
    )
    assert (json.loads(first.stdout)["created"], json.loads(second.stdout)["created"]) == (True, False)
    other = gangline("submit", "-", "--json", "--data", up.data, stdin=shell_task("false", task_id="again"))
    assert other.returncode == 5
    assert json.loads(other.stdout)["error"]["code"] == "conflict"


def test_many_tasks_in_one_toml_file(up: UpProcess, tmp_path: Path) -> None:
    agent = '{harness = "shell", settings = {command = "true"}, allow_no_model_call = true}'
    task = f'instruction = "go"\nruntime = {{backend = "process"}}\nagent = {agent}'
    (tmp_path / "tasks.toml").write_text(f"[[task]]\n{task}\n[[task]]\n{task}\n")
    done = gangline("submit", tmp_path / "tasks.toml", "--wait", "--json", "--data", up.data)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["status"] for line in done.stdout.splitlines()] == ["ended", "ended"]


def test_a_wrong_task_is_refused_before_anything_is_sent(up: UpProcess) -> None:
    done = gangline("submit", "-", "--data", up.data, stdin=shell_task("true", num_sample=2))
    assert done.returncode == 2
    assert "num_sample" in done.stderr
    assert "Traceback" not in done.stderr


def test_tasks_and_sessions_are_listed_page_by_page_and_by_what_they_are(up: UpProcess) -> None:
    for name in ("list-a", "list-b"):
        task = shell_task("true", task_id=name, num_samples=2, submitter="lister")
        assert gangline("submit", "-", "--wait", "--data", up.data, stdin=task).returncode == 0

    def listed(*wanted: str) -> dict[str, Any]:
        return json.loads(gangline("list", *wanted, "--submitter", "lister", "--json", "--data", up.data).stdout)

    assert [task["task_id"] for task in listed("tasks", "--status", "ended")["tasks"]] == ["list-b", "list-a"]
    page = listed("sessions", "--state", "ended", "--outcome", "completed", "--limit", "3")
    rest = listed("sessions", "--before", str(page["next"]))
    found = [session["session_id"] for session in (*page["sessions"], *rest["sessions"])]
    assert found == ["list-b.1", "list-b.0", "list-a.1", "list-a.0"]
    assert listed("sessions", "--outcome", "infra_error")["sessions"] == []
    of_one = listed("sessions", "--task", "list-a")["sessions"]
    assert [session["session_id"] for session in of_one] == ["list-a.1", "list-a.0"]
    unknown = gangline("list", "sessions", "--task", "list-c", "--data", up.data)
    assert (unknown.returncode, "no task 'list-c'" in unknown.stderr) == (4, True)
    shown = gangline("list", "tasks", "--submitter", "lister", "--limit", "1", "--data", up.data)
    assert "list-b" in shown.stdout
    assert "--before" in shown.stderr
    refused = gangline("list", "sessions", "--state", "gone", "--data", up.data)
    assert (refused.returncode, "queued" in refused.stderr) == (2, True)


def test_watching_a_task_tells_its_events_and_ends_with_it(up: UpProcess) -> None:
    gangline("submit", "-", "--data", up.data, stdin=shell_task("true", task_id="watched"))
    done = gangline("watch", "watched", "--json", "--data", up.data)
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert kinds[0] == "task.submitted"
    assert kinds[-2:] == ["session.ended", "task.ended"]
    plain = gangline("watch", "watched", "--data", up.data)
    assert len(plain.stdout.splitlines()) == len(kinds)


def test_waiting_for_a_task_of_which_no_session_completed_is_a_failure(up: UpProcess) -> None:
    failing = shell_task("echo no such model >&2; exit 3", task_id="failing", num_samples=2)
    waited = gangline("submit", "-", "--wait", "--data", up.data, stdin=failing)
    assert waited.returncode == 1
    assert "gangline logs failing.0" in waited.stderr
    assert "no such model" in gangline("logs", "failing.0", "--data", up.data).stdout
    mixed = "case $GANGLINE_SESSION_ID in *.0) exit 3;; esac"
    assert gangline("submit", "-", "--wait", "--data", up.data, stdin=shell_task(mixed, num_samples=2)).returncode == 0


def test_the_patch_of_a_graded_session_is_printed_whole(up: UpProcess) -> None:
    need_command("git", "apt-get install git")
    who = "-c user.name=kennel -c user.email=kennel@example.com"
    prepare = f"git init -q && seq 9 > a.txt && git add . && git {who} commit -q -m Begin"
    task = shell_task(
        "seq 2000 > a.txt; rm -rf .git",
        task_id="patched",
        runtime={"backend": "process", "prepare": [{"type": "exec", "command": prepare}]},
        evaluator={
            "strategy": "swe_bench",
            "refresh_runtime": True,
            "config": {"fail_to_pass": ["t"], "test_command": "grep -q 2000 a.txt && echo PASSED t"},
        },
    )
    waited = gangline("submit", "-", "--wait", "--json", "--data", up.data, stdin=task)
    assert json.loads(waited.stdout)["rewards"] == [1.0], waited.stderr
    lines = gangline("logs", "patched.0", "patch.diff", "--data", up.data).stdout.splitlines()
    assert lines[0] == "diff --git a/a.txt b/a.txt"
    assert [line for line in lines if line.startswith("+")][1:] == [f"+{number}" for number in range(10, 2001)]


def test_a_running_task_and_one_session_can_be_cancelled(up: UpProcess) -> None:
    gangline("submit", "-", "--data", up.data, stdin=shell_task("sleep 600", task_id="stopped", num_samples=2))
    one = gangline("cancel", "stopped.0", "--json", "--data", up.data)
    assert json.loads(one.stdout)["outcome"] == "cancelled"
    both = gangline("cancel", "stopped", "--json", "--data", up.data)
    assert json.loads(both.stdout)["outcomes"] == {"cancelled": 2}
    waited = gangline(
        "submit", "-", "--wait", "--data", up.data, stdin=shell_task("sleep 600", task_id="stopped", num_samples=2)
    )
    assert waited.returncode == 1


def test_what_is_not_there_is_code_4(up: UpProcess) -> None:
    for command in (("status", "nothing"), ("cancel", "nothing"), ("watch", "nothing")):
        done = gangline(*command, "--data", up.data)
        assert done.returncode == 4, done.stderr
        assert "nothing" in done.stderr


def test_a_wrong_token_is_code_6(up: UpProcess) -> None:
    url = up.running()["server_url"]
    done = gangline("status", "--server", url, env={"GANGLINE_TOKEN": "wrong"})
    assert done.returncode == 6


def test_status_shows_the_node(up: UpProcess) -> None:
    done = gangline("status", "--json", "--data", up.data)
    document = json.loads(done.stdout)
    assert [node["node_id"] for node in document["status"]["nodes"]] == ["node-1"]
    assert "node-1" in gangline("status", "--data", up.data).stdout


def test_doctor_tells_of_every_check_and_of_the_running_service(up: UpProcess) -> None:
    done = gangline("doctor", "--json", "--data", up.data)
    document = json.loads(done.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert str(up.process.pid) in checks["service"]["found"]
    assert all(check["advice"] for check in checks.values() if check["state"] != "ok")
    assert (done.returncode == 0) == document["ok"]
    assert document["ok"] == all(check["state"] != "missing" for check in checks.values())


def test_wrong_usage_is_code_2() -> None:
    for arguments in (("nonsense",), ("up", "--port", "many"), ("submit",), ("engine", "--scripted", "/nowhere.json")):
        assert gangline(*arguments).returncode == 2


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"gangline \d+\.\d+\.\d+\n", gangline("--version").stdout)


def test_the_readmes_example_runs_as_it_stands(up: UpProcess, tmp_path: Path) -> None:
    [example] = re.findall(
        r"<!-- example: a test runs this -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    running = up.running()
    environment = clean_environment(GANGLINE_SERVER=running["server_url"], GANGLINE_TOKEN=running["control_token"])
    done = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ prompt tokens, \d+ to train on, with log-probs", lines[0]), lines
    assert len(lines) == 2, "one trace"
