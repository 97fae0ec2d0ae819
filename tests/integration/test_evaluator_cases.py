"""Evaluator `cases`: comparison rules, limits, and solutions that would rather be graded than right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError, InvalidRequest, RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.grading.cases.evaluator import same_output, same_value
from gangline.node.sessions.attempt import Attempt
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.settings import plugins
from support.node.attempt import lease_of, node_parts
from support.node.folder_runtime import FolderRuntime
from support.training.evaluation_samples import a_context

SQUARES = [{"input": f"{n}\n", "output": f"{n * n}\n"} for n in (2, 3, 4)]
RIGHT = "print(int(input()) ** 2)"


async def graded(tmp_path: Path, solution: str | None, **config: Any) -> tuple[Reward, list[dict[str, Any]]]:
    agents, clean = FolderRuntime(tmp_path / "agents"), FolderRuntime(tmp_path / "clean")
    if solution is not None:
        agents.file("solution.py").write_text(solution)
    evaluator = plugins.make_evaluator("cases", {"cases": SQUARES} | config)
    context = a_context(agents, fresh=clean)
    result = await evaluator.evaluate(context)
    return result, json.loads(context.artifacts.get("cases.json", b"[]"))


async def test_a_program_that_is_right_passes_and_the_evidence_is_kept(tmp_path: Path) -> None:
    result, found = await graded(tmp_path, RIGHT)
    assert (result.reward, result.details) == (1.0, {"passed": "3/3", "failures": []})
    assert [(one["input"], one["stdout"], one["output"]) for one in found] == [
        ("2\n", "4\n", "4\n"),
        ("3\n", "9\n", "9\n"),
        ("4\n", "16\n", "16\n"),
    ]


async def test_one_failure_fails_all_or_costs_its_part(tmp_path: Path) -> None:
    solution = "n = int(input())\nprint(n * n if n != 3 else 0)"
    result, found = await graded(tmp_path / "all", solution)
    assert (result.reward, [one["status"] for one in found]) == (0.0, ["passed", "wrong", "not_run"])
    cases = [*SQUARES[:2], SQUARES[2] | {"weight": 2}]
    result, found = await graded(tmp_path / "partial", solution, partial=True, cases=cases)
    assert (result.reward, result.details["passed"]) == (0.75, "2/3")


@pytest.mark.parametrize(
    ("solution", "status", "config"),
    [
        ("while True: pass", "timed_out", {"case_timeout_seconds": 0.5}),
        ("raise SystemExit(3)", "crashed", {}),
        ("x = bytearray(1 << 30); print(4)", "crashed", {"case_memory_bytes": 256 << 20}),
        ("print('4' * 5000)", "too_much_output", {"max_output_bytes": 1000}),
        ("print(5)", "wrong", {}),
        ("import os; os.kill(os.getpid(), 9)", "crashed", {}),
    ],
)
async def test_a_program_fails_a_case_in_its_own_way(
    tmp_path: Path, solution: str, status: str, config: dict[str, Any]
) -> None:
    result, found = await graded(tmp_path, solution, **config)
    assert (result.reward, found[0]["status"]) == (0.0, status)


@pytest.mark.parametrize("function", [None, "whole"])
async def test_what_is_expected_fits_however_small_the_limit_and_however_it_is_spaced(
    tmp_path: Path, function: str | None
) -> None:
    wanted = "ä" * 9000
    case: dict[str, Any] = {"input": "", "output": wanted}
    solution = f"print({wanted!r} + '\\n' * 9000)"
    if function is not None:
        case = {"arguments": [], "result": wanted}
        solution = f"def whole(): return {wanted!r}"
    config = {"cases": [case], "function": function, "max_output_bytes": 1000}
    result, found = await graded(tmp_path, solution, **config)
    assert (result.reward, [one["status"] for one in found]) == (1.0, ["passed"])


async def test_a_session_without_a_program_or_a_build_scores_nothing(tmp_path: Path) -> None:
    result, _ = await graded(tmp_path / "none", None)
    assert (result.reward, result.details["why"]) == (0.0, "there is no program")
    result, _ = await graded(tmp_path / "build", RIGHT, build=["sh", "-c", "echo no luck >&2; exit 1"])
    assert (result.reward, result.details["output"]) == (0.0, "no luck\n")


async def test_a_clean_runtime_without_the_interpreter_is_no_fault_of_the_agents(tmp_path: Path) -> None:
    with pytest.raises(EvaluatorError, match="no program 'no-such-compiler'"):
        await graded(tmp_path, RIGHT, command=["no-such-compiler", "solution.py"])


async def test_time_for_all_cases_is_limited(tmp_path: Path) -> None:
    solution = "import time; time.sleep(60)"
    result, found = await graded(tmp_path, solution, partial=True, timeout_seconds=0.5)
    assert (result.reward, [one["status"] for one in found]) == (0.0, ["timed_out", "not_run", "not_run"])


@pytest.mark.parametrize(
    "solution",
    [
        "def square(n):\n    print('talk')\n    return n * n",
        "class Solution:\n    def square(self, n):\n        return n * n",
    ],
)
async def test_functions_are_called_with_arguments(tmp_path: Path, solution: str) -> None:
    cases = [{"arguments": [3], "result": 9}, {"arguments": [-1], "result": 1}]
    result, _ = await graded(tmp_path, solution, function="square", cases=cases)
    assert result.reward == 1.0


@pytest.mark.parametrize(
    "solution",
    [
        "class Any:\n    def __eq__(self, other): return True\ndef square(n): return Any()",
        "class Nine(int):\n    def __eq__(self, other): return True\ndef square(n): return Nine(8)",
        "def square(n): return True",
        "import os\ndef square(n):\n    os._exit(0)",
        "import os\nfor fd in range(3, 9):\n  try: os.write(fd, b'1')\n  except OSError: pass\ndef square(n): return 9",
        "import json\njson.dumps = lambda value: 'passed'\ndef square(n): return 9",
    ],
)
async def test_a_result_is_compared_where_the_solution_is_not(tmp_path: Path, solution: str) -> None:
    result, _ = await graded(tmp_path, solution, function="square", cases=[{"arguments": [3], "result": 9}])
    assert result.reward == 0.0


@pytest.mark.parametrize(
    ("rule", "expected", "found", "same"),
    [
        ("exact", "a\n", "a\n", True),
        ("exact", "a\n", "a", False),
        ("trimmed", "a\nb\n", "a  \nb\n\n\n", True),
        ("trimmed", "a\nb", "a\n\nb", False),
        ("trimmed", "  a", "a", False),
        ("tokens", "a b", "a\n  b\n", True),
        ("tokens", "1.0", "1.00", False),
        ("floats", "0.3333333 x", "0.33333333333 x", True),
        ("floats", "0.33", "0.34", False),
        ("floats", "nan", "nan", True),
        ("floats", "1 2", "1", False),
        ("floats", "10000000", "10000001", False),
        ("floats", "1000000007", "1000000008", False),
        ("floats", "9007199254740992", "9007199254740993", False),
        ("floats", "+7", "007", True),
        ("floats", "7", "7.0", True),
        ("floats", "9" * 5000, "9" * 4999 + "8", False),
        ("floats", "9" * 1_000_002, "8" * 1_000_002, False),
        ("lines", " 1 2 \n3\n", "1 2\n 3", True),
        ("lines", "1 2\n3", "1 2 3", False),
        ("lines", "1 2", "1  2.0", True),
        ("lines", "Yes 2", "Yes 2.0", False),
        ("lines", "0.1", "0.10000001", False),
        ("lines", "9007199254740992", "9007199254740993", False),
        ("lines", "a", "a\n\nb", False),
        ("lines", "1", "sNaN", False),
        ("lines", "", "\n", True),
    ],
)
def test_outputs_are_compared_by_a_rule(rule: Any, expected: str, found: str, same: bool) -> None:
    assert same_output(rule, expected, found.encode(), 1e-6) is same


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda one: st.lists(one), max_leaves=8))
def test_a_value_equals_itself_after_json_and_no_boolean_equals_a_number(value: Any) -> None:
    assert same_value("floats", value, json.loads(json.dumps(value)), 1e-6)
    assert not same_value("floats", [value, 1], [value, True], 1e-6)


def test_whole_numbers_of_a_result_are_exact() -> None:
    assert not same_value("floats", {"a": [10**7]}, {"a": [10**7 + 1]}, 1e-6)
    assert same_value("floats", 10**7, 1e7, 1e-6)
    assert same_value("lines", [True], [1], 0.0), "as Python compares"
    assert not same_value("lines", 0.1, 0.1000001, 0.0)
    assert same_value("floats", 10, 12, 2) is same_output("floats", "10", b"12", 2) is True, "a tolerance of one's own"
    assert same_value("floats", 10, 13, 2) is same_output("floats", "10", b"13", 2) is False


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"cases": []}, "cases: Tuple should have at least 1"),
        ({"cases": [{"input": "1"}]}, r"cases\.0: a case of standard input and output has input and output"),
        ({"cases": SQUARES, "function": "f"}, r"cases\.0: a case of a function has arguments and result"),
        ({"cases": [{"arguments": [], "result": 1}], "function": "f", "command": ["x"]}, "leave out `command`"),
    ],
)
def test_a_mistake_is_named_on_submission(config: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        plugins.make_evaluator("cases", config)


CHEATS = {
    "prints a reward": "print('{\"reward\": 1}')",
    "looks for the outputs": (
        "import os\nfor top, _, names in os.walk(os.path.expanduser('~')):\n"
        "  for name in names: print(open(os.path.join(top, name), errors='replace').read())"
    ),
    "writes everywhere": (
        "import glob, os\nfor name in ('reward.json', 'reward.txt', 'cases.json'): open(name, 'w').write('1')\n"
        "for name in glob.glob('/proc/[0-9]*/fd/*'):\n  try: open(name, 'w').write('4')\n  except OSError: pass"
    ),
    "kills everyone": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "stays": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  for fd in range(3): os.close(fd)\n"
        "  time.sleep(600)\nprint(1)"
    ),
    "replaces the interpreter": (
        "import os\nos.makedirs('bin', exist_ok=True)\nopen('python3', 'w').write('#!/bin/sh\\necho 4')\n"
        "os.chmod('python3', 0o755)\nopen('json.py', 'w').write('raise SystemExit(0)')\nprint(1)"
    ),
}


async def in_a_sandbox(tmp_path: Path, solution: str, **config: Any) -> SessionResult:
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    agent = {
        "harness": "shell",
        "settings": {"command": f"cat > solution.py <<'END'\n{solution}\nEND"},
        "allow_no_model_call": True,
    }
    evaluator = {"strategy": "cases", "config": {"cases": SQUARES, **config}, "refresh_runtime": True}
    async with node_parts(tmp_path) as parts:
        lease = lease_of(runtime={"backend": "sandbox"}, agent=agent, evaluator=evaluator)
        return await Attempt(lease, parts).live()


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_solution_neither_forges_nor_voids_its_grade(tmp_path: Path, cheat: str) -> None:
    result = await in_a_sandbox(tmp_path, CHEATS[cheat], partial=True, case_timeout_seconds=5)
    assert (result.outcome, result.reward) == ("completed", 0.0), (result.failure, result.reward_details)
    assert "cases.json" in result.artifacts


async def test_a_right_program_passes_in_a_sandbox(tmp_path: Path) -> None:
    result = await in_a_sandbox(tmp_path, RIGHT)
    assert (result.outcome, result.reward) == ("completed", 1.0), (result.failure, result.reward_details)
