"""Presets: rows in the columns of published datasets become tasks, and generated samples are such rows."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.agents.tools.search.shipped import shipped_sources
from gangline.cli.tasks.files import validated
from gangline.domain.errors import InvalidRequest
from gangline.domain.task_template import filled
from gangline.grading.cases.evaluator import CasesConfig
from gangline.grading.swe_bench import SweBenchConfig
from gangline.interop.prorl.templates import Templates
from gangline.machine.reading.imported import Imported, LeftOut
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.presets.preset import NUM_SAMPLES, PRESETS, Preset, find_preset
from gangline.tasks.presets.samples.stem import stem_documents
from support.service.cli_process import gangline

DEEPSCALER = {"problem": "What is $1+1$?", "answer": "2", "solution": "Count."}
SCP = {
    "domain": "Physics",
    "problem": "What is $g$ in m/s^2?",
    "matched_solution": r"It is \(\boxed{\frac{981}{100}}\), which is \boxed{9.81}.",
    "o1_solution": "9.81",
    "is_o1_solution_same_with_matched_solution": True,
    "qwq_solution": "9.8",
    "is_qwq_solution_same_with_matched_solution": False,
}
EURUS: dict[str, Any] = {
    "data_source": "taco",
    "prompt": [
        {"role": "system", "content": "When tackling complex reasoning tasks, you have access to actions."},
        {
            "role": "user",
            "content": "Double the number.\n\nWrite Python code to solve the problem. Present the code in \n"
            "```python\nYour code\n```\nat the end.",
        },
    ],
    "ability": "code",
    "reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})},
    "extra_info": {"split": "train", "index": 7},
}
SWE_GYM: dict[str, Any] = {
    "instance_id": "Project-MONAI__MONAI-1234",
    "hints_text": "",
    "patch": "",
    "test_patch": "--- a/tests/test_x.py\n+++ b/tests/test_x.py\n",
    "created_at": "2022-01-01 00:00:00",
    "problem_statement": "It fails.",
    "repo": "Project-MONAI/MONAI",
    "base_commit": "a" * 40,
    "version": "0.8",
    "PASS_TO_PASS": ["tests/test_x.py::test_old"],
    "FAIL_TO_PASS": ["tests/test_x.py::test_new"],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def one():\n    """One."""\n',
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}
MBPP = {"task_id": 2, "text": "Return one.", "code": "one = lambda: 1", "test_list": ["assert one() == 1"]}
MBPP |= {"test_setup_code": "", "challenge_test_list": []}
LIVE = {"question_content": "Double it.", "starter_code": "", "public_test_cases": "[]", "metadata": "{}"}
ROWS: dict[str, Mapping[str, Any]] = {"math": DEEPSCALER, "stem": SCP, "code": EURUS, "swe": SWE_GYM}


def read_rows(path: Path, name: str) -> list[Imported | LeftOut]:
    return list(read_source(path, Wanted(preset=preset(name))))


def preset(name: str) -> Preset:
    found = find_preset(name)
    assert found is not None
    return found


def with_tests(**tests: Any) -> dict[str, Any]:
    return EURUS | {"reward_model": {"style": "rule", "ground_truth": json.dumps(tests)}}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_its_dataset_is_a_task_that_any_server_takes(name: str) -> None:
    body = preset(name).task(ROWS[name])
    task = validated(body, name)
    assert task.metadata == {"preset": name, "instance": ROWS[name]}
    assert task.runtime.network == "none"
    assert (task.agent.harness, task.agent.max_turns is None) == ("native", False)


def test_columns_become_the_instruction_and_the_grading() -> None:
    math, stem, code, swe = (preset(name).task(ROWS[name]) for name in ("math", "stem", "code", "swe"))
    assert (math["instruction"], math["evaluator"]["config"]["answer"]) == ("What is $1+1$?", "2")
    assert stem["evaluator"]["config"]["answer"] == "9.81"
    assert code["instruction"].startswith("Double the number.\n\nWrite a Python program")
    assert CasesConfig.model_validate(code["evaluator"]["config"]).cases[0].output == "4\n"
    assert "It fails." in swe["instruction"]
    assert swe["runtime"]["image"] == "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1234:latest"
    assert SweBenchConfig.model_validate(swe["evaluator"]["config"]).fail_to_pass == ("tests/test_x.py::test_new",)
    named = preset("swe").task(SWE_GYM | {"docker_image": "own/image:1"})
    assert (named["runtime"]["image"], named["runtime"]["backend"]) == ("own/image:1", "docker")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So \boxed{\frac{1}{2}} and then \boxed{x^{2}}", "x^{2}"),
        (r"An open \boxed{3} and \boxed{4", "3"),
        ("Some steps.\nTherefore the answer is 12 kJ.", "12 kJ"),
        ("ANSWER: (B)", "(B)"),
    ],
)
def test_a_solution_without_an_answer_column_states_it(solution: str, answer: str) -> None:
    body = preset("stem").task({"problem": "How much?", "matched_solution": solution})
    assert body["evaluator"]["config"] == body["evaluator"]["config"] | {"answer": answer, "choices": []}


def test_letters_of_choices_are_graded_as_letters() -> None:
    row = {"problem": "Which?\nA. red\n(B) blue\nC) green", "matched_solution": r"\boxed{(B)}"}
    config = preset("stem").task(row)["evaluator"]["config"]
    assert (config["answer"], config["choices"]) == ("B", ["A", "B", "C"])


def test_a_conversation_as_verl_has_it_is_a_row_too() -> None:
    row = {"prompt": json.dumps([{"role": "user", "content": "1+1?"}]), "reward_model": {"ground_truth": "2"}}
    for name in ("math", "stem"):
        body = preset(name).task(row)
        assert (body["instruction"], body["evaluator"]["config"]["answer"]) == ("1+1?", "2")


def test_functions_are_called_with_arguments_in_either_form() -> None:
    both = with_tests(fn_name="add", inputs=["1\n2", [3, 4]], outputs=["3", 7])
    body = preset("code").task(both)
    config = CasesConfig.model_validate(body["evaluator"]["config"])
    assert [(case.arguments, case.result) for case in config.cases] == [([1, 2], 3), ([3, 4], 7)]
    assert (config.function, "`add`" in body["instruction"]) == ("add", True)
    lines = preset("code").task(with_tests(inputs=[["1", "2"]], outputs=["3\n"]))
    assert lines["evaluator"]["config"]["cases"] == [{"input": "1\n2", "output": "3\n"}]


def packed(value: object) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def live(*tests: tuple[str, str], **changes: Any) -> dict[str, Any]:
    listed = [{"input": given, "output": wanted, "testtype": "stdin"} for given, wanted in tests]
    return {**LIVE, "private_test_cases": packed(json.dumps(listed)), **changes}


@pytest.mark.parametrize(
    "row", [HUMANEVAL, MBPP, {**MBPP, "text": "", "prompt": "One.", "test_imports": ["import math"]}]
)
def test_tests_in_python_become_a_command_and_the_published_solution_the_tasks(row: dict[str, Any]) -> None:
    body = preset("code").task(row)
    task = validated(body, "row")
    assert (task.evaluator.strategy, task.evaluator.refresh_runtime) == ("script", True)
    assert set(body["evaluator"]["config"]["files"]) == {".tests/asserts.py", ".tests/tests.json"}
    assert body["evaluator"]["config"]["collect"] == ["solution.py"]
    exec(body["solution"]["files"]["solution.py"], space := {})
    assert space["one"]() == 1
    assert "solution.py" in body["instruction"]


def test_packed_tests_are_unpacked_and_kept_once(tmp_path: Path) -> None:
    row = live(("1\n", "2\n"), public_test_cases=json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}]))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_rows(tmp_path / "rows.jsonl", "code")
    assert isinstance(found, Imported)
    config = found.body["evaluator"]["config"]
    assert config["cases"] == [{"input": "2", "output": "4"}, {"input": "1\n", "output": "2\n"}]
    assert (config["compare"], config["function"]) == ("lines", None)
    assert "private_test_cases" not in found.body["metadata"]["instance"]
    method = live(("[1]\n2", "[[1]]"), metadata='{"func_name": "cut"}', starter_code="class Solution:\n  def cut(self")
    body = preset("code").task(method)
    assert body["evaluator"]["config"]["cases"] == [{"arguments": [[1], 2], "result": [[1]]}]
    assert "class Solution" in body["instruction"]
    assert "The tests call the function `cut`" in body["instruction"]


def test_an_operators_template_keeps_its_own_evaluator() -> None:
    own = {"strategy": "session_completed"}
    assert preset("code").task(HUMANEVAL, {"evaluator": own})["evaluator"] == own


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("code", {**HUMANEVAL, "test": "class TestCases: pass"}, "test: String should match"),
        ("code", {**HUMANEVAL, "entry_point": "a b"}, "entry_point: String should match"),
        ("code", {**MBPP, "test_list": []}, "test_list: "),
        ("code", live(), "inputs: List should have at least 1"),
        ("code", live(private_test_cases="[[1]]"), "are not those of LiveCodeBench"),
        ("code", live(private_test_cases="null"), "are not those of LiveCodeBench"),
        ("code", live(private_test_cases="[" * 100_000), "private_test_cases: is neither JSON"),
        ("code", live(private_test_cases="x"), "private_test_cases: is neither JSON"),
        ("code", live(private_test_cases=packed(Path("x"))), "is not one text alone"),
        ("code", live(private_test_cases=packed("[]")[:20]), "private_test_cases: "),
        ("code", live(("1", "2"), metadata="[]"), "metadata or test cases"),
        ("math", {"problem": "x"}, "answer: Field required"),
        ("math", {"problem": "x", "answer": ""}, "answer: is empty"),
        ("stem", {"problem": "x", "matched_solution": "It depends."}, "matched_solution: has no"),
        ("code", EURUS | {"ability": "math"}, "ability: 'math' is not `code`"),
        ("code", EURUS | {"reward_model": {"ground_truth": "{"}}, "reward_model.ground_truth: is not valid JSON"),
        ("code", with_tests(inputs=["1"], outputs=["1", "2"]), "has 1 inputs and 2 outputs"),
        ("code", with_tests(inputs=[{}], outputs=["1"]), "inputs.0 is neither a text nor a list of lines"),
        ("code", with_tests(inputs=[7], outputs=[7], fn_name="f"), "inputs.0 is not a list of arguments"),
        ("code", {**EURUS, "prompt": []}, "prompt: Value should have at least 1 item"),
        ("swe", {**SWE_GYM, "FAIL_TO_PASS": []}, "FAIL_TO_PASS: names no test"),
        ("swe", {**SWE_GYM, "repo": None}, "repo: Field required"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_by_its_field(name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        preset(name).task(row)
    assert message in caught.value.message


def test_files_of_rows_name_the_row_and_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    without = {"problem": "Why?", "matched_solution": "It depends."}
    path.write_text("\n".join(map(json.dumps, [SCP, without, SCP])))
    kinds = [type(row) for row in read_rows(path, "stem")]
    assert kinds == [Imported, LeftOut, Imported]
    path.write_text("\n".join(map(json.dumps, [SCP, {"problem": 3.5, "matched_solution": None}])))
    _, wrong = read_rows(path, "stem")
    assert isinstance(wrong, LeftOut)
    assert "rows.jsonl, row 2: " in wrong.why
    assert "matched_solution: Input should be a valid string" in wrong.why
    path.write_text("[1]\n")
    with pytest.raises(InvalidRequest, match="row 1: is not an object"):
        read_rows(path, "stem")


def test_parquet_and_json_hold_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = EURUS | {"extra_info": {"split": "train", "index": 7, "made": datetime(2025, 1, 1, tzinfo=UTC)}}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps([EURUS]))
    (one,) = read_rows(tmp_path / "rows.parquet", "code")
    (other,) = read_rows(tmp_path / "rows.json", "code")
    assert isinstance(one, Imported)
    assert isinstance(other, Imported)
    assert one.body["metadata"]["instance"]["extra_info"]["made"] == "2025-01-01T00:00:00Z"
    assert one.body["evaluator"] == other.body["evaluator"]


@given(name=st.sampled_from([one.name for one in PRESETS]), seed=st.integers(0, 10_000))
@settings(max_examples=30)
def test_samples_are_rows_the_same_for_a_seed_and_right_is_not_wrong(name: str, seed: int) -> None:
    samples = preset(name).samples(10, seed)
    assert samples == preset(name).samples(10, seed)
    assert json.loads(json.dumps([one.row for one in samples])) == [one.row for one in samples]
    for sample in samples:
        assert sample.right != sample.wrong
        body = preset(name).task(sample.row)
        assert body["metadata"]["instance"] == sample.row
        if name in ("math", "stem"):
            assert body["evaluator"]["config"]["answer"] == sample.right


def test_the_shipped_documents_are_the_generated_ones_and_have_every_fact() -> None:
    source = shipped_sources()["gangline:stem"]
    assert source.path is not None
    shipped = {path.name: path.read_text() for path in Path(source.path).iterdir()}
    assert shipped == stem_documents()
    for sample in preset("stem").samples():
        (address,) = sample.sources
        assert shipped[address].splitlines()[0].removeprefix("# ") in sample.row["problem"]


def test_a_field_of_a_template_keeps_its_kind_where_it_stands_alone() -> None:
    template = {"a": "{list}", "b": ["{null}", "{text}"], "c": {"d": "{number} {list} {unknown}"}, "e": "{number}"}
    fields = {"list": [1, "{text}"], "null": None, "text": "{number}", "number": 7}
    assert filled(template, fields) == {
        "a": [1, "{text}"],
        "b": [None, "{number}"],
        "c": {"d": '7 [1,"{text}"] {unknown}'},
        "e": "7",
    }


def test_a_data_source_is_a_preset_that_an_operator_may_change(tmp_path: Path) -> None:
    instance = DEEPSCALER | {"data_source": "math"}
    templates = Templates(tmp_path)
    assert templates.task_of(instance)["timeout_seconds"] == 1200
    (tmp_path / "math.json").write_text('{"preset": "math", "timeout_seconds": 60}')
    changed = templates.task_of(instance)
    assert (changed["timeout_seconds"], changed["instruction"], "preset" in changed) == (60, "What is $1+1$?", False)
    (tmp_path / "taco.json").write_text('{"preset": "code"}')
    assert templates.task_of(EURUS)["evaluator"]["strategy"] == "cases"
    (tmp_path / "math.json").write_text('{"instruction": "Own: {problem}"}')
    assert templates.task_of(instance) == {"instruction": "Own: What is $1+1$?"}
    (tmp_path / "math.json").write_text('{"preset": "maths"}')
    with pytest.raises(InvalidRequest, match=r"preset 'maths'. Known: swe, stem, math, code"):
        templates.task_of(instance)


def test_the_command_prints_tasks_that_submit_reads(tmp_path: Path) -> None:
    listed = json.loads(gangline("preset", "list", "--json").stdout)
    assert [one["name"] for one in listed] == ["swe", "stem", "math", "code"]
    assert json.loads(gangline("preset", "show", "math").stdout) == preset("math").template
    printed = gangline("preset", "tasks", "math").stdout
    assert len(printed.splitlines()) == NUM_SAMPLES
    dry = gangline("submit", "-", "--dry-run", stdin=printed)
    assert len(json.loads(dry.stdout)) == NUM_SAMPLES, dry.stderr
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, [EURUS, EURUS | {"ability": "math"}])))
    some = gangline("tasks", "from", rows, "--preset", "code")
    assert (len(some.stdout.splitlines()), "row 2: ability: 'math' is not `code`" in some.stderr) == (1, True)
    unknown = gangline("preset", "show", "maths")
    assert (unknown.returncode, "Did you mean 'math'?" in unknown.stderr) == (2, True)
