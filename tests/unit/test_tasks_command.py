"""`gangline tasks`: a source on the command line becomes a file of tasks, which `submit` and `vet` take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.service.cli_process import gangline
from support.service.field_tasks import HARBOR_TOML, harbor_task, write

ROWS = [{"question": f"What is {n} + 1?", "solution": str(n + 1)} for n in range(3)]


def math_rows(folder: Path) -> Path:
    lines = [*map(json.dumps, ROWS), json.dumps({"question": "Why?", "solution": None})]
    return write(folder / "rows.jsonl", "\n".join(lines))


def test_a_file_of_tasks_is_made_listed_shown_and_ready_to_submit(tmp_path: Path) -> None:
    for name in ("a", "b"):
        harbor_task(tmp_path / "tasks" / name, HARBOR_TOML.replace("count-bytes", name))
    file = tmp_path / "tasks.jsonl"
    made = gangline("tasks", "from", tmp_path / "tasks", "--prefix", "p", "--out", file, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["num_tasks"] == 2
    listed = json.loads(gangline("tasks", "list", file, "--json").stdout)
    assert [(one["name"], one["source"], one["solution"]) for one in listed] == [
        ("p-kennel-a", "harbor", True),
        ("p-kennel-b", "harbor", True),
    ]
    assert "p-kennel-b" in gangline("tasks", "list", file).stdout
    shown = gangline("tasks", "show", file, "p-kennel-a")
    assert "Write the number of bytes" in shown.stdout
    assert json.loads(gangline("tasks", "show", file, "p-kennel-a", "--json").stdout)["task_id"] == "p-kennel-a"
    unknown = gangline("tasks", "show", file, "c")
    assert (unknown.returncode != 0, "holds no task 'c'" in unknown.stderr) == (True, True)
    no_agent = gangline("submit", file, "--dry-run")
    assert (no_agent.returncode, "--harness NAME or --command, or --oracle" in no_agent.stderr) == (2, True)
    dry = json.loads(gangline("submit", file, "--harness", "pi", "--samples", "4", "--dry-run").stdout)
    assert [(one["agent"], one["num_samples"]) for one in dry] == [({"harness": "pi"}, 4)] * 2


def test_rows_that_a_preset_cannot_read_are_named_by_file_row_and_field(tmp_path: Path) -> None:
    path = math_rows(tmp_path)
    mapping = ("--preset", "math", "--map", "instruction=question", "--map", "answer=solution")
    failed = gangline("tasks", "from", path, *mapping, "--json", "--strict")
    assert json.loads(failed.stdout)["error"]["code"] == "invalid_request"
    (left,) = json.loads(gangline("tasks", "from", path, *mapping, "--json").stdout)["left_out"]
    assert "rows.jsonl, row 4: answer: is null" in left
    some = json.loads(gangline("tasks", "from", path, *mapping, "--limit", "2", "--json").stdout)
    assert [task["metadata"]["instance"] for task in some["tasks"]] == ROWS[:2]
    assert some["left_out"] == some["notes"] == []
    dry = gangline("submit", "-", "--oracle", "--dry-run", stdin="\n".join(map(json.dumps, some["tasks"])))
    assert [task["evaluator"]["config"]["source"] for task in json.loads(dry.stdout)] == ["stdout"] * 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--map", "answer"), "write FIELD=COLUMN"),
        (("--map", "a=b", "--map", "a=c"), "is given twice"),
        (("--network", "internet"), "must be one of none, proxy"),
        (("--format", "gym"), "must be one of harbor, terminal-bench, swe, rows"),
        (("--preset", "maths"), "Did you mean 'math'?"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    failed = gangline("tasks", "from", math_rows(tmp_path), *options)
    assert (failed.returncode, told in failed.stderr) == (2, True), failed.stderr


def test_the_oracle_needs_a_file_and_no_other_agent(tmp_path: Path) -> None:
    task = write(tmp_path / "task.json", '{"instruction": "go"}')
    for options, told in (
        (("--oracle", "--instruction", "go", "--command", "true"), "--oracle is the agent of the tasks of a FILE"),
        ((task, "--oracle", "--harness", "pi"), "neither --harness nor --command"),
        ((task, "--oracle"), "has no solution for --oracle"),
    ):
        failed = gangline("submit", *options, "--dry-run")
        assert (failed.returncode, told in failed.stderr) == (2, True), failed.stderr
