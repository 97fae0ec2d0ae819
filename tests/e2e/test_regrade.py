"""`gangline regrade` through a real service: another grader for recorded sessions, killed and resumed, and its rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from gangline.cli.main import build_app
from gangline.domain.errors import Conflict, GanglineError
from support.service.cli_process import COMMAND, UpProcess, clean_environment, gangline, wait_for

NUM_TASKS, NUM_SAMPLES = 6, 2
NUM_SESSIONS = NUM_TASKS * NUM_SAMPLES
AGENT = """
import json, os, pathlib, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
pathlib.Path("answer.txt").write_text(os.environ["ANSWER"])
"""
WRONG_GRADER = {"strategy": "script", "config": {"command": "echo 0 > reward.txt"}, "keep_files": True}


def right_grader(*, first: str = "true") -> dict[str, Any]:
    """Even answers are right."""
    command = f"{first}; echo $((1 - $(cat answer.txt) % 2)) > reward.txt"
    return {"strategy": "script", "config": {"command": command}}


def task(number: int, evaluator: dict[str, Any]) -> dict[str, Any]:
    return {
        "task_id": f"count-{number}",
        "instruction": "count",
        "num_samples": NUM_SAMPLES,
        "runtime": {"backend": "process"},
        "agent": {
            "harness": "shell",
            "settings": {"command": ["python3", "-c", AGENT]},
            "env": {"ANSWER": str(number)},
        },
        "evaluator": evaluator,
        "metadata": {"repo": "counting"},
    }


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    folder = tmp_path_factory.mktemp("up")
    service = UpProcess(folder, script={"default": {"text": "hello"}})
    try:
        assert "server_url" in service.ready()
        tasks = [task(number, WRONG_GRADER) for number in range(NUM_TASKS)]
        tasks.append({**task(7, {**WRONG_GRADER, "keep_files": False}), "task_id": "bare"})
        path = folder / "tasks.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in tasks))
        done = gangline("submit", path, "--data", service.data, "--wait", "--json")
        assert done.returncode == 0, done.stderr
        yield service
    finally:
        service.close()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGLINE_SERVER", "GANGLINE_DATA", "GANGLINE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def call(up: UpProcess, *arguments: object) -> Result:
    """A command in this process. Raises: its GanglineError."""
    ran = CliRunner().invoke(build_app(), [*map(str, arguments), "--data", str(up.data)])
    if isinstance(ran.exception, GanglineError):
        raise ran.exception
    return ran


def regraded(up: UpProcess, *arguments: object, code: int = 0) -> dict[str, Any]:
    done = call(up, "regrade", *arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_verdicts_stand_beside_the_recorded_grades_and_give_other_rows(up: UpProcess, tmp_path: Path) -> None:
    found = regraded(up, "count-*", "bare", "--evaluator", json.dumps(right_grader()), "--name", "right")
    assert (found["num_graded"], found["num_changed"]) == (NUM_SESSIONS, NUM_SESSIONS / 2)
    assert (found["mean_before"], found["mean_now"]) == (0.0, 0.5)
    assert found["refused"].keys() == {"bare.0", "bare.1"}
    assert "were not kept: the task did not ask for it" in found["refused"]["bare.0"]
    lines = [json.loads(line) for line in Path(found["path"]).read_text().splitlines()]
    assert {one["before"]["reward"] for one in lines} == {0.0}
    assert json.loads(call(up, "show", "count-0.0", "--json").stdout)["reward"] == 0.0
    shown = json.loads(call(up, "show", "count-0", "--verdicts", "right", "--json").stdout)
    assert [one["reward"] for one in shown] == [1.0, 1.0]

    call(up, "export", "count-*", "--out", tmp_path, "--name", "rows", "--verdicts", "right")
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert sorted(row["reward"] for row in rows) == [0.0] * 6 + [1.0] * 6
    options = ("--keep-duplicates", "--verdicts", "right", "--json")
    done = call(up, "data", "*", "--out", tmp_path / "dataset", *options)
    (line,) = json.loads(done.stdout)["dataset"]["strata"]
    assert (line["num_attempts"], line["num_accepted"]) == (NUM_SESSIONS, NUM_SESSIONS / 2)


def test_killed_and_resumed_it_grades_each_session_once(up: UpProcess, tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    grader = json.dumps(right_grader(first=f"echo x >> {counted}"))
    arguments = ["regrade", "count-*", "--evaluator", grader, "--name", "killed", "--data", str(up.data)]
    running = subprocess.Popen(
        [*COMMAND, *arguments, "--in-flight", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )
    kept = up.data / "regrades" / "killed.jsonl"
    wait_for(lambda: kept.exists() and len(kept.read_bytes().splitlines()) >= 2)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    num_before = len(kept.read_bytes().splitlines())
    assert num_before < NUM_SESSIONS
    with kept.open("ab") as file:
        file.write(b'{"session_id": "cut')
    assert regraded(up, *arguments[1:-2])["mean_now"] == 0.5
    ids = [json.loads(line)["session_id"] for line in kept.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == NUM_SESSIONS
    assert len(counted.read_text().split()) <= NUM_SESSIONS + 1, "at most the one that was under way is repeated"
    with pytest.raises(Conflict, match="give this run another --name"):
        regraded(up, "count-0", "--evaluator", "session_completed", "--name", "killed")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_leaves_no_sandbox(up: UpProcess, number: signal.Signals, code: int) -> None:
    grader = json.dumps(right_grader(first="sleep 60"))
    arguments = ["regrade", "count-0", "--evaluator", grader, "--name", "stopped", "--data", str(up.data)]
    running = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=clean_environment())
    wait_for(lambda: list((up.data / "nodes").glob("*/runtimes/regrade-*")))
    running.send_signal(number)
    _, told = running.communicate()
    assert (running.returncode, "Start it again to continue" in told) == (code, True), told
    wait_for(lambda: not list((up.data / "nodes").glob("*/runtimes/regrade-*")))


def test_the_tasks_changed_evaluators_grade_and_all_that_is_wrong_is_said(up: UpProcess, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task(4, right_grader())) + "\n")
    assert regraded(up, "count-4", "--tasks", path, "--name", "changed")["mean_now"] == 1.0
    assert regraded(up, "bare", "--name", "own", code=1)["num_graded"] == 0
    for options, message in (
        (["count-5", "--tasks", path], "has no task of the id 'count-5'"),
        (["count-4", "--evaluator", "scrip"], "script"),
        (["count-4", "--evaluator", "{"], "is not valid JSON"),
        (["count-4", "--evaluator", "@nowhere"], "cannot read nowhere"),
        (["count-4", "--name", "../up"], "the name of verdicts"),
        (["nothing"], "no result of a task or session 'nothing'"),
    ):
        with pytest.raises(GanglineError, match=message):
            regraded(up, *options)
