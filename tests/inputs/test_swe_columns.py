"""Columns of the SWE family as published data sets write them: lists in any form, names in small letters, nulls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest
from gangline.domain.text_lists import texts_of
from gangline.machine.reading.imported import Imported, LeftOut
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.importers.swe import InstanceChoices

TESTS = ["t/test_a.py::test_x[a, b]", "t/test_a.py::test_y['q' \"r\"]", "t/test_a.py::test_z[\\n]"]
ROW = {
    "instance_id": "dogs__kennel-1",
    "repo": "dogs/kennel",
    "base_commit": "ab" * 20,
    "problem_statement": "It fails.",
    "patch": "",
    "test_patch": "--- a/t/test_a.py\n+++ b/t/test_a.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": TESTS,
    "PASS_TO_PASS": [],
}
FORMS: dict[str, Any] = {
    "a list": TESTS,
    "a tuple": tuple(TESTS),
    "an array": np.array(TESTS, dtype=object),
    "JSON": json.dumps(TESTS),
    "JSON on lines": json.dumps(TESTS, indent=2),
    "JSON in JSON": json.dumps(json.dumps(TESTS)),
    "Python": str(TESTS),
    "a Python tuple": str(tuple(TESTS)),
    "a printed array": str(np.array(TESTS, dtype=object)),
    "an array's form": repr(np.array(TESTS, dtype=object)),
    "lines": "\n".join(TESTS) + "\n",
    "blanks around": f"  {TESTS} \n",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_list_of_tests_is_read_in_any_form(form: str) -> None:
    assert texts_of(FORMS[form]) == TESTS


@pytest.mark.parametrize(
    "given", [None, "", " ", "[]", "()", "nan", "None", "null", float("nan"), [], (), np.array([])]
)
def test_no_tests_are_no_tests(given: Any) -> None:
    assert texts_of(given) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("['a', 1]", "it has '1'"),
        ("[1, 2]", "item 0 is not text: 1"),
        (["a", None], "item 1 is not text"),
        ('{"a": "PASSED"}', "is a dict"),
        ("{'a': 'PASSED'}", "it has ':'"),
        ("['a' ... 'z']", "was cut short"),
        ("['a', b'c']", "item 1 is not text"),
        ("['a', f()]", "it has 'f'"),
        ("['a", "is neither JSON nor a list of texts"),
        ("[" * 100_000, "is neither JSON nor a list of texts"),
        (3, "is a int"),
        ({"a": 1}, "is a dict"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        texts_of(given)


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), min_size=1))
def test_any_names_come_back_from_json_and_from_python(names: list[str]) -> None:
    assert texts_of(json.dumps(names)) == names
    assert texts_of(str(names)) == names
    assert texts_of(str(tuple(names))) == names


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found(path: Path, **how: Any) -> list[Imported | LeftOut]:
    return list(read_source(path, Wanted(**how)))


def test_columns_in_small_letters_are_the_same_row(tmp_path: Path) -> None:
    small = {name.lower(): value for name, value in ROW.items()} | {"fail_to_pass": str(TESTS)}
    one, other = found(write(tmp_path / "rows.jsonl", ROW, small))
    assert isinstance(one, Imported)
    assert isinstance(other, Imported)
    assert other.body["evaluator"]["config"]["fail_to_pass"] == TESTS
    assert other.body["evaluator"] == one.body["evaluator"]
    first, *_ = found(write(tmp_path / "small.jsonl", small))
    assert isinstance(first, Imported), "recognized without --format"


def test_rows_of_swe_bench_pro_need_the_command_that_they_lack(tmp_path: Path) -> None:
    small = {name.lower(): value for name, value in ROW.items()} | {
        "fail_to_pass": str(TESTS),
        "dockerhub_tag": "a.b-1",
    }
    pro = {**small, "before_repo_set_cmd": "git checkout x -- t", "selected_test_files_to_run": "['t']"}
    left, one = found(write(tmp_path / "rows.jsonl", pro, {**pro, "test_cmd": "pytest {tests}"}))
    assert isinstance(left, LeftOut)
    assert "row 1: test_cmd: is missing" in left.why
    assert isinstance(one, Imported)
    assert (one.body["runtime"]["image"], one.body["runtime"]["workdir"]) == ("jefzda/sweap-images:a.b-1", "/app")


def test_rows_of_swe_bench_live_have_their_own_commands_and_images(tmp_path: Path) -> None:
    (one,) = found(write(tmp_path / "rows.jsonl", {**ROW, "test_cmds": ["pytest -rA"], "log_parser": "pytest"}))
    assert isinstance(one, Imported)
    assert one.body["evaluator"]["config"]["test_command"] == "pytest -rA"
    assert one.body["runtime"]["image"] == "starryzhang/sweb.eval.x86_64.dogs_1776_kennel-1:latest"


def test_two_columns_of_one_name_must_agree(tmp_path: Path) -> None:
    same, differ = {**ROW, "fail_to_pass": TESTS}, {**ROW, "fail_to_pass": ["other"]}
    one, other = found(write(tmp_path / "rows.jsonl", same, differ))
    assert isinstance(one, Imported)
    assert isinstance(other, LeftOut)
    assert "row 2: fail_to_pass: differs from the column FAIL_TO_PASS" in other.why


def test_null_columns_are_absent_ones(tmp_path: Path) -> None:
    nulls = dict.fromkeys(("patch", "PASS_TO_PASS", "eval_script", "version", "image", "base_commit", "hints_text"))
    (one,) = found(write(tmp_path / "rows.jsonl", {**ROW, **nulls}))
    assert isinstance(one, Imported), one


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"FAIL_TO_PASS": "['a' ... 'b']"}, "FAIL_TO_PASS: .*was cut short"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS: .*item 0 is not text"),
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS: names no test"),
        ({"PASS_TO_PASS": "[3"}, "PASS_TO_PASS: "),
        ({"problem_statement": "\ud83d"}, "problem_statement: has half of a character"),
        ({"problem_statement": None}, "problem_statement: "),
        ({"instance_id": None}, "instance_id: "),
        ({"base_commit": "main"}, "base_commit: "),
        ({"install_config": "[" * 100_000}, "install_config: is not valid JSON"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_the_others_are_imported(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    one, left, other = found(write(tmp_path / "rows.jsonl", ROW, {**ROW, **changes}, ROW))
    assert isinstance(one, Imported)
    assert isinstance(other, Imported)
    assert isinstance(left, LeftOut)
    with pytest.raises(InvalidRequest, match=f"rows.jsonl, row 2: .*{told}"):
        raise InvalidRequest(left.why)


def test_swe_rows_of_a_csv_file(tmp_path: Path) -> None:
    import csv

    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([name.lower() for name in ROW] + ["eval_script"])
        writer.writerow([*ROW.values(), ""])
    (one,) = found(path, instances=InstanceChoices(repositories="/srv"))
    assert isinstance(one, Imported), one
    assert one.body["evaluator"]["config"]["fail_to_pass"] == TESTS
    assert "eval_script" not in one.body["evaluator"]["config"]


def gangline(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gangline", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_imports_the_rest_and_refuses_all_when_strict(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "problem_statement": "\ud83d"}, {**ROW, "FAIL_TO_PASS": "['a"}, ROW]
    source, out = write(tmp_path / "rows.jsonl", *rows), tmp_path / "tasks.jsonl"
    strict = gangline("tasks", "from", source, "--strict", "--out", out)
    assert strict.returncode == 2
    assert not out.exists()
    assert "--strict: 2 rows would be left out; nothing was written" in strict.stderr
    done = gangline("tasks", "from", source, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "2 tasks in" in done.stderr
    assert "2 rows left out" in done.stderr
    assert f"{source}, row 2: problem_statement: has half" in done.stderr
    assert f"{source}, row 3: FAIL_TO_PASS: " in done.stderr
    ids = [json.loads(line)["task_id"] for line in out.read_text().splitlines()]
    assert ids == ["dogs__kennel-1", "dogs__kennel-1-2"]
    none = gangline("tasks", "from", write(tmp_path / "none.jsonl", rows[1]))
    assert none.returncode == 2
    assert "row 1: problem_statement: has half" in none.stderr


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({"id": 7}, "7"),
        ({"id": 7.0}, "7"),
        ({"id": "a/b c"}, "a-b-c"),
        ({"task_id": "HumanEval/0"}, "HumanEval-0"),
        ({"id": None}, "rows-00001"),
        ({"id": "  "}, "rows-00001"),
        ({"id": True}, "rows-00001"),
        ({"id": "\u65e5\u672c"}, "task"),
        ({"id": "x" * 300}, "x" * 100),
        ({"name": "-.-a"}, "a"),
        ({}, "rows-00001"),
    ],
)
def test_tasks_have_the_ids_of_their_rows(tmp_path: Path, own: dict[str, Any], wanted: str) -> None:
    from gangline.tasks.commands.importing import Made

    row = {"instruction": "?", "answer": "2", **own}
    path = write(tmp_path / "rows.jsonl", row, {**row, **own})
    made = Made(read_source(path, Wanted()), None)
    first, second = (body["task_id"] for body in made.bodies)
    assert first == wanted
    assert second == ("rows-00002" if wanted == "rows-00001" else f"{wanted}-2")
    assert Made(read_source(path, Wanted()), "eval").bodies[0]["task_id"].startswith("eval-")
