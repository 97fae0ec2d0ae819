"""Rows of the SWE family: the columns of each dataset, read as one instance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.tasks.files import validated
from gangline.domain.errors import InvalidRequest
from gangline.grading.swe_bench_rows import PROTECTED
from gangline.machine.reading.imported import Choices
from gangline.settings import plugins
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.importers.swe import InstanceChoices, read_instance
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable
from support.service.field_tasks import write
from support.service.swe_rows import FAMILIES, family_row

ROW: dict[str, Any] = {
    "instance_id": "Dogs__kennel-1",
    "repo": "dogs/kennel",
    "base_commit": "0" * 40,
    "problem_statement": "{broken}",
    "patch": "p",
    "test_patch": "--- a/t/test_a.py\n+++ b/t/test_a.py\n--- /dev/null\n+++ b/t/data.txt\n",
    "FAIL_TO_PASS": '["t/test_a.py::test_x"]',
    "PASS_TO_PASS": [],
}


def instance(choices: Choices | None = None, how: InstanceChoices | None = None, **changes: Any) -> dict[str, Any]:
    return read({**ROW, **changes}, choices, how)


def read(row: dict[str, Any], choices: Choices | None = None, how: InstanceChoices | None = None) -> dict[str, Any]:
    """The body of a row's task, which the evaluator and a submit take."""
    found = read_instance(row, "rows.jsonl, row 1", choices or Choices(), how or InstanceChoices())
    validated({**found.body, "agent": {"harness": "pi"}}, found.name)
    plugins.make_evaluator("swe_bench", found.body["evaluator"]["config"])
    return found.body


def test_a_row_is_a_task_in_the_image_of_its_name() -> None:
    body = instance()
    assert body["runtime"]["image"] == "swebench/sweb.eval.x86_64.dogs_1776_kennel-1:latest"
    assert "{broken}" in body["instruction"]
    config = body["evaluator"]["config"]
    assert config["fail_to_pass"] == ["t/test_a.py::test_x"]
    assert config["test_command"].endswith("-m pytest -rA -v -p no:cacheprovider t/test_a.py")
    assert body["evaluator"]["refresh_runtime"] is True
    assert instance(image="a/b:1")["runtime"]["image"] == "a/b:1"
    pattern = Choices(image="me/{instance_id}:2")
    assert instance(pattern, image="a/b:1")["runtime"]["image"] == "me/dogs_1776_kennel-1:2"


def test_a_row_may_bring_its_own_script_and_parser() -> None:
    config = instance(eval_script="run me", log_parser="parse_log_django")["evaluator"]["config"]
    assert (config["eval_script"], config["log_parser"]) == ("run me", "parse_log_django")
    assert "test_patch" not in config
    assert set(config["protected"]) == {*PROTECTED, "t/test_a.py", "t/data.txt"}, "its own cannot replace new ones"
    for parser in ("parse_log_pytest_options", "parse_log_flask", "parse_log_matplotlib"):
        assert instance(eval_script="run me", log_parser=parser)["evaluator"]["config"]["log_parser"] == "pytest"
    how = InstanceChoices(test_command="nox {tests}", log_parser="unittest")
    config = instance(how=how, eval_script="run me")["evaluator"]["config"]
    assert (config["test_command"], config["log_parser"]) == ("nox t/test_a.py", "unittest")
    assert instance(test_cmd="tox")["evaluator"]["config"]["test_command"] == "tox"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"FAIL_TO_PASS": []}, "row 1: FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "["}, "row 1: FAIL_TO_PASS"),
        ({"base_commit": "main; rm -rf /"}, "base_commit"),
        ({"eval_type": "fail_only"}, "by its failures alone"),
        ({"repo": "django/django"}, "on import: --test-command and --log-parser"),
    ],
)
def test_what_a_row_cannot_be_given_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        instance(**changes)


def test_the_sandbox_needs_repositories() -> None:
    with pytest.raises(InvalidRequest, match="--repositories FOLDER"):
        instance(Choices(runtime="sandbox"))
    runtime = instance(how=InstanceChoices(repositories="/srv/it's/"))["runtime"]
    assert runtime["backend"] == "sandbox"
    assert "'/srv/it'\"'\"'s/dogs__kennel'" in runtime["prepare"][0]["command"]


def test_a_row_without_a_patch_has_no_solution() -> None:
    assert instance()["solution"] == {"patch": "p"}
    assert "solution" not in instance(patch="")


TESTS = "from kennel import add, double"
PATCH = """diff --git a/kennel.py b/kennel.py
index 1..2 100644
--- a/kennel.py
+++ b/kennel.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
BUG = {**ROW, "patch": PATCH, "FAIL_TO_PASS": '["test_kennel.py::test_add"]', "PASS_TO_PASS": "[]"}
IMAGES = {
    "swe-bench": "swebench/sweb.eval.x86_64.dogs_1776_kennel-1:latest",
    "swe-gym": "xingyaoww/sweb.eval.x86_64.dogs_s_kennel-1:latest",
    "skyrl": "xingyaoww/sweb.eval.x86_64.dogs_s_kennel-1:latest",
    "skyrl-json": "xingyaoww/sweb.eval.x86_64.dogs_s_kennel-1:latest",
    "swe-smith": "swebench/swesmith.x86_64.dogs_1776_kennel.01234567",
    "r2e-gym": "namanjain12/kennel_final:" + "ab" * 20,
    "rebench": "swerebench/sweb.eval.x86_64.dogs_1776_kennel-1:latest",
    "rebench-v2": "docker.io/swerebenchv2/dogs-kennel:1",
    "openswe": "openswe/k:1",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_dataset_is_recognized_by_its_columns_and_kept_whole(tmp_path: Path, family: str) -> None:
    row = family_row(family, BUG, TESTS)
    body = read(row)
    assert (body["runtime"]["backend"], body["runtime"]["image"]) == ("docker", IMAGES[family])
    assert body["runtime"]["workdir"] == ("/kennel" if family == "rebench-v2" else "/testbed")
    assert body["metadata"]["instance"] == row
    path = write(tmp_path / "rows.jsonl", json.dumps(row) + "\n")
    (found,) = read_source(path, Wanted())
    assert getattr(found, "body", None) == body, "without a word about its format"


def test_the_patch_of_swe_smith_is_the_bug_and_its_reverse_the_solution() -> None:
    body = read(family_row("swe-smith", BUG, TESTS))
    bug, brk, forget = body["runtime"]["prepare"]
    assert "+    return a - b" in bug["content"]
    assert "commit-tree" in brk["command"]
    assert "gc -q --prune=now" in forget["command"]
    assert body["solution"]["command"][:3] == ["git", "apply", "-R"]
    assert "test_kennel.py" in body["evaluator"]["config"]["protected"], "its tests are in the agent's sight"


def test_r2e_gym_wants_the_statuses_of_all_tests_and_hides_them() -> None:
    row = family_row("r2e-gym", BUG, TESTS)
    config = read(row)["evaluator"]["config"]
    assert config["expected_statuses"] == {"test_add": "passed", "test_double": "passed"}
    assert read(row)["runtime"]["prepare"][0]["command"] == "rm -rf /r2e_tests r2e_tests"
    assert read(row)["solution"]["patch"].splitlines() == [*PATCH.splitlines()[:1], *PATCH.splitlines()[2:]]
    bare = read({**row, "execution_result_content": None})
    assert "cp -r /r2e_tests r2e_tests" in bare["evaluator"]["config"]["eval_script"]
    assert "/r2e_tests" not in bare["runtime"]["prepare"][0]["command"]


def test_the_second_rebench_runs_its_commands_as_they_are() -> None:
    row = family_row("rebench-v2", BUG, TESTS)
    row["install_config"] = json.dumps({"test_cmd": ["make", "make test"], "log_parser": "parse_log_gotest"})
    config = read(row)["evaluator"]["config"]
    assert (config["test_command"], config["log_parser"]) == ("make\nmake test", "parse_log_gotest")
    assert config["ignore_timings"] is True
    first = read(family_row("rebench", {**BUG, "test_patch": ROW["test_patch"]}, TESTS))
    assert first["evaluator"]["config"]["test_command"].endswith("no:cacheprovider t/test_a.py")


def test_openswe_is_graded_by_the_exit_code_of_its_script() -> None:
    config = read(family_row("openswe", BUG, TESTS))["evaluator"]["config"]
    assert config["exit_code_line"] == "OPENSWE_EXIT_CODE"
    assert "fail_to_pass" not in config


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("openswe", {"eval_script": f"git apply <<E\n{PATCH}E\necho OPENSWE_EXIT_CODE=0"}, "applies the solution"),
        ("swe-smith", {"problem_statement": ""}, "row 1: problem_statement: is empty"),
        ("rebench-v2", {"install_config": {"test_cmd": "x", "log_parser": "parse_lua_nvim"}}, "log_parser: 'parse_lua"),
    ],
)
def test_rows_that_nothing_can_grade_are_left_out(family: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RowUnsuitable, match=told):
        read(family_row(family, BUG, TESTS) | changes)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("skyrl-json", {"instance": "{"}, "row 1: instance: is not valid JSON"),
        ("skyrl", {"instance": 3}, "row 1: instance: is neither an object"),
        ("swe-smith", {"FAIL_TO_PASS": ["TestAdd"], "PASS_TO_PASS": []}, r"test_cmd: SWE-smith's rows have none"),
        ("swe-smith", {"FAIL_TO_PASS": "["}, "FAIL_TO_PASS: is neither JSON nor a list of texts"),
        ("r2e-gym", {"expected_output_json": '{"test_a": "GREEN"}'}, "expected_output_json: 'test_a' is 'GREEN'"),
        ("r2e-gym", {"parsed_commit_content": '{"file_diffs": [{}]}'}, "file_diffs.0.header: Field required"),
        ("rebench-v2", {"install_config": {"log_parser": "pytest"}}, "install_config.test_cmd: is empty"),
    ],
)
def test_a_column_that_cannot_be_read_is_named(family: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read(family_row(family, BUG, TESTS) | changes)
