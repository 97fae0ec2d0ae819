"""`gangline eval` and `compare`: through a real service, killed and resumed, and as reports."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from gangline.wire.client.running import find_service
from support.service.cli_process import COMMAND, UpProcess, clean_environment, gangline, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "families"
sys.path.insert(0, str(EXAMPLE))
try:
    build_tasks = runpy.run_path(str(EXAMPLE / "tasks.py"))["build_tasks"]
finally:
    sys.path.remove(str(EXAMPLE))

NUM_TASKS, NUM_SAMPLES = 8, 2
SOLVED = {"read", "find", "edit"}
"""Families that the agent of the first arm solves."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    service = UpProcess(tmp_path_factory.mktemp("up"), script={"default": {"text": "I do not know."}})
    try:
        assert "server_url" in service.ready()
        yield service
    finally:
        service.close()


def tasks(path: Path, solved: set[str]) -> Path:
    """Each solved by the right commands, or by nothing at all."""
    right, nothing = (list(build_tasks(NUM_TASKS, style=style)) for style in ("oracle", "nothing"))
    chosen = [one if one["metadata"]["family"] in solved else none for one, none in zip(right, nothing, strict=True)]
    named = [{**task, "task_id": task["metadata"]["family"]} for task in chosen]
    path.write_text("".join(json.dumps(task) + "\n" for task in named))
    return path


def arguments(up: UpProcess, path: Path, name: str, *more: object) -> list[str]:
    given = (
        "eval",
        path,
        "--name",
        name,
        "--samples",
        NUM_SAMPLES,
        "--by",
        "family",
        "--data",
        up.data,
        "--json",
        *more,
    )
    return [str(one) for one in given]


def evaluated(up: UpProcess, path: Path, name: str, *more: object) -> dict[str, Any]:
    done = gangline(*arguments(up, path, name, *more))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def asked(up: UpProcess, path: str) -> Any:
    service = find_service(up.data)
    asking = Request(service.server_url + path, headers={"Authorization": f"Bearer {service.control_token}"})
    with urlopen(asking) as answer:
        return json.load(answer)


def listed(up: UpProcess) -> list[dict[str, Any]]:
    return asked(up, "/v1/evaluations")["evaluations"]


def at_the_service(up: UpProcess, name: str) -> dict[str, Any]:
    (one,) = [one for one in listed(up) if one["name"] == name]
    return asked(up, f"/v1/evaluations/{one['evaluation_id']}")


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    slices = [report["whole"], *(one for mine in report["by"].values() for one in mine)]
    return {
        **{name: report[name] for name in ("bar", "num_samples", "tasks")},
        "slices": [_bare(one) for one in slices],
    }


def _bare(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "seconds"}


def test_another_evaluator_may_stand_in_for_the_tasks_own(up: UpProcess, tmp_path: Path) -> None:
    path = tasks(tmp_path / "two.jsonl", set())
    path.write_text("".join(path.read_text().splitlines(True)[:2]))
    other = tmp_path / "evaluator.json"
    other.write_text(json.dumps({"strategy": "session_completed"}))
    assert evaluated(up, path, "lenient", "--evaluator", f"@{other}")["whole"]["reward"]["mean"] == 1.0
    assert "unknown evaluator 'lenient'" in gangline("eval", path, "--evaluator", "lenient").stderr


def test_a_submission_takes_another_evaluator_whole(tmp_path: Path) -> None:
    own = {"strategy": "script", "config": {"command": "true", "reward_file": "reward.txt"}}
    other = {"strategy": "test_on_output", "config": {"checks": [{"kind": "contains", "value": "hello"}]}}
    task = {"instruction": "x", "agent": {"harness": "shell", "settings": {"command": "true"}}, "evaluator": own}
    (tmp_path / "task.json").write_text(json.dumps(task))
    done = gangline("submit", tmp_path / "task.json", "--dry-run", "--evaluator", json.dumps(other))
    assert json.loads(done.stdout)[0]["evaluator"] == other, done.stderr


def test_killed_and_resumed_it_reports_as_if_undisturbed_and_compare_finds_what_differs(
    up: UpProcess, tmp_path: Path
) -> None:
    some, all_of_them = tasks(tmp_path / "some.jsonl", SOLVED), tasks(tmp_path / "all.jsonl", SOLVED | {"count", "log"})
    whole = evaluated(up, some, "whole")
    assert whole["whole"]["reward"]["mean"] == pytest.approx(len(SOLVED) / NUM_TASKS)
    assert whole["whole"]["num_counted"] == NUM_TASKS * NUM_SAMPLES
    assert {one["name"] for one in whole["by"]["family"] if one["passed"]["mean"] == 1.0} == SOLVED
    assert whole["whole"]["pass_at"]["2"]["mean"] == whole["whole"]["pass_hat"]["2"]["mean"]

    kept = up.data / "evals" / "killed" / "sessions.jsonl"
    running = subprocess.Popen(
        [*COMMAND, *arguments(up, some, "killed", "--in-flight", 1)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )
    wait_for(lambda: kept.exists() and len(kept.read_bytes().splitlines()) >= 2 * NUM_SAMPLES)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    num_before = len(kept.read_bytes().splitlines())
    assert num_before < NUM_TASKS * NUM_SAMPLES
    (stopped,) = [one for one in listed(up) if one["name"] == "killed"]
    assert stopped["num_left"] > 0, "what a killed command had sent is still there"
    report = evaluated(up, some, "killed")
    assert without_times(report) == without_times(whole)
    assert at_the_service(up, "killed") == report, "the page has what the command prints"
    (ended,) = [one for one in listed(up) if one["name"] == "killed"]
    assert (ended["evaluation_id"], ended["num_left"]) == (stopped["evaluation_id"], 0)

    evaluated(up, all_of_them, "better")
    found = gangline("compare", "whole", "better", "--data", up.data, "--json")
    difference = json.loads(found.stdout)["difference"]
    assert set(difference["better"]) == {"count", "log"}
    assert (difference["mean"], difference["worse"]) == (2 / NUM_TASKS, [])
    page = tmp_path / "compared.html"
    told = gangline("compare", "whole", "better", "--data", up.data, "--html", page).stdout
    assert len(re.findall(r'href="http://127.0.0.1:\d+/#/sessions/([^"]+)"', page.read_text())) == 32
    ids = [one["evaluation_id"] for name in ("better", "whole") for one in listed(up) if one["name"] == name]
    assert f"gangline open 'evaluations/{ids[0]}?with={ids[1]}' --data {up.data}" in told
    compared = asked(up, f"/v1/evaluations/{ids[0]}/compared?with={ids[1]}")
    assert compared["difference"] == difference, "page and command compute the same"
    same = gangline("compare", "whole", "killed", "--data", up.data)
    assert "No difference can be seen" in same.stdout, same.stderr


def test_the_page_of_a_service_elsewhere_has_it_too_and_the_command_says_where(up: UpProcess, tmp_path: Path) -> None:
    path = tasks(tmp_path / "two.jsonl", SOLVED)
    path.write_text("".join(path.read_text().splitlines(True)[:2]))
    service = find_service(up.data)
    far = {"GANGLINE_SERVER": service.server_url, "GANGLINE_TOKEN": service.control_token or ""}
    done = gangline("eval", path, "--name", "far", "--data", tmp_path / "own", "--server", service.server_url, env=far)
    assert done.returncode == 0, done.stderr
    (there,) = [one for one in listed(up) if one["name"] == "far"]
    where = f"evaluations/{there['evaluation_id']}"
    command = f"gangline open {where} --data {tmp_path / 'own'} --server {service.server_url}"
    assert done.stdout.splitlines()[-1] == f"On the page: {command}"
    opened = gangline(*command.split()[1:], env=far)
    assert re.fullmatch(rf"{service.server_url}/open/link-\S+#/{where}\n", opened.stdout), opened.stderr
    assert at_the_service(up, "far") == json.loads((tmp_path / "own" / "evals" / "far" / "report.json").read_text())


def test_a_report_is_written_and_a_spent_budget_is_said(up: UpProcess, tmp_path: Path) -> None:
    path = tasks(tmp_path / "some.jsonl", SOLVED)
    files = {kind: tmp_path / f"report.{kind}" for kind in ("markdown", "html")}
    options = [part for kind, file in files.items() for part in (f"--{kind}", file)]
    evaluated(up, path, "written", *options, "--predictions", tmp_path / "predictions.jsonl", "--prices", "1,2")
    assert "| all | 8 | 16 | 16 | 0.375" in files["markdown"].read_text()
    page = files["html"].read_text()
    assert "evaluation written" in page
    links = re.findall(r'href="http://127.0.0.1:\d+/#/sessions/([^"]+)"', page)
    assert len(links) == 16
    assert gangline("show", links[0], "--data", up.data).returncode == 0
    assert (tmp_path / "predictions.jsonl").read_text() == "", "no task is of SWE-bench"
    spent = gangline(*arguments(up, path, "spent", "--max-hours", 0))
    assert spent.returncode == 1, "nothing was measured"
    assert "8 tasks were not run" in spent.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--k", "3"], "k lies between 1 and --samples, 2"),
        (["--max-cost", "1"], "--max-cost needs --prices"),
        (["--prices", "1"], "--prices are two numbers"),
        (["--capture", "text"], "of a service that --engine starts"),
        (["--harness", "shel"], "shell"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_what_does_not_fit_is_said_before_anything_runs(
    up: UpProcess, tmp_path: Path, options: list[str], message: str
) -> None:
    done = gangline(*arguments(up, tasks(tmp_path / "some.jsonl", SOLVED), "wrong", *options))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_an_evaluation_that_is_not_there_names_those_that_are(up: UpProcess) -> None:
    done = gangline("compare", "nothing", "nothing", "--data", up.data)
    assert done.returncode == 4
    assert "there is no report of 'nothing'" in done.stderr


def test_sigterm_ends_it_with_its_code_and_cancels_what_runs(up: UpProcess, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    agent = {"harness": "shell", "settings": {"command": "sleep 600"}}
    path.write_text(json.dumps({"task_id": "long", "instruction": "Wait.", "agent": agent}) + "\n")
    running = subprocess.Popen(
        [*COMMAND, *arguments(up, path, "stopped")], stderr=subprocess.PIPE, text=True, env=clean_environment()
    )

    def states() -> list[str]:
        listed = gangline("list", "sessions", "--json", "--data", up.data)
        return [one["state"] for one in json.loads(listed.stdout)["sessions"] if one["task_id"].startswith("stopped-")]

    try:
        wait_for(lambda: "leased" in states())
    finally:
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 143
    assert "Start it again to continue." in said
    assert set(states()) == {"ended"}
