"""What test runners print, read as test -> status."""

from __future__ import annotations

import importlib.util
import time

import pytest

from gangline.domain.errors import EvaluatorError
from gangline.grading.untrusted.outcomes import Outcome, Status, TestLog
from gangline.grading.untrusted.test_logs import PARSERS, last_exit_code, read_log, without_timing
from support.requirements import need

PYTEST = """
tests/test_a.py::test_old PASSED                                         [ 25%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_words[two words - more]
FAILED tests/test_a.py::test_two - AssertionError: PASSED is not it
ERROR tests/test_b.py::test_setup - RuntimeError
XFAIL tests/test_a.py::test_known - a reason
XPASS tests/test_a.py::test_fixed
SKIPPED [1] tests/test_a.py:12: not here
SKIPPED tests/test_a.py::test_other
  PASSED tests/test_a.py::test_indented
PASSED
"""
UNITTEST = """
test_one (a.tests.Case) ... ok
test_two (a.tests.Case) ... FAIL
test_three (a.tests.Case) ... skipped 'no'
test_four (a.tests.Case) ... expected failure
test_five (a.tests.Case) ... unexpected success
Ran 5 tests ... and more
"""

UNITTEST_NAMES = [f"test_{number} (a.tests.Case)" for number in ("one", "two", "three", "four", "five")]


async def test_pytests_summary_and_its_verbose_lines() -> None:
    found = await read_log("pytest", PYTEST, timeout_s=10)
    expected: dict[str, Status] = {
        "tests/test_a.py::test_old": "passed",
        "tests/test_a.py::test_one": "passed",
        "tests/test_a.py::test_words[two words - more]": "passed",
        "tests/test_a.py::test_words[two": "passed",
        "tests/test_a.py::test_two": "failed",
        "tests/test_b.py::test_setup": "failed",
        "tests/test_a.py::test_known": "passed",
        "tests/test_a.py::test_fixed": "failed",
        "tests/test_a.py::test_other": "skipped",
    }
    assert {name: found.status_of(name) for name in expected} == expected
    assert not any("indented" in name for name in found.statuses)


@pytest.mark.parametrize(
    ("line", "name", "status"),
    [
        ("PASSED t.py::test_path[/etc/dogs/rex]", "t.py::test_path[/rex]", "passed"),
        ("FAILED t.py::test_path[/etc/dogs/rex] - no", "t.py::test_path[/rex]", "failed"),
        ("PASSED t.py::test_path[//host/rex]", "t.py::test_path[//host/rex]", "passed"),
        ("PASSED t.py::test_path[/dogs/*]", "t.py::test_path[/dogs/*]", "passed"),
        ("PASSED t.py::test_click[MouseButton.LEFT]", "t.py::test_click[1]", "passed"),
        ("\x1b[32mPASSED\x1b[0m t.py::\x1b[1mtest_red\x1b[0m", "t.py::test_red", "passed"),
        ("t.py::test_red \x1b[31mFAILED\x1b[0m\x1b[31m  [ 50%]\x1b[0m", "t.py::test_red", "failed"),
    ],
)
async def test_names_are_read_as_swe_bench_lists_them(line: str, name: str, status: Status) -> None:
    assert (await read_log("pytest", line, timeout_s=10)).status_of(name) == status


R2E = """
tests/test_a.py::TestX::test_old PASSED
=========================== short test summary info ============================
PASSED tests/test_a.py::TestX::test_one
FAILED tests/test_a.py::test_two - AssertionError: no
ERROR tests/test_b.py::test_setup
SKIPPED [1] tests/test_a.py:12: not here
"""


STATUS_LINES = """
collected 2 items
PASSED test_calculator
PASSED tests/test_a.py::test_one
FAILED tests/test_a.py::TestCase::test_two - AssertionError: PASSED is not it
\x1b[31mERROR\x1b[0m\ttests/test_b.py::test_setup
  SKIPPED it is not here
PASSED
FAILED twice
PASSED twice
PASSEDX odd
XFAIL other
"""


async def test_lines_that_begin_with_a_status_are_read_as_polar_reads_them() -> None:
    read = await read_log("status_lines", STATUS_LINES, timeout_s=5)
    assert read.statuses == {
        "test_calculator": "passed",
        "test_one": "passed",
        "TestCase.test_two": "failed",
        "test_setup": "failed",
        "it is not here": "skipped",
        "twice": "passed",
        "odd": "failed",
    }


async def test_names_of_r2e_gym_are_the_parts_behind_the_file() -> None:
    found = await read_log("r2e", R2E, timeout_s=10)
    assert found.statuses == {"TestX.test_one": "passed", "test_two": "failed", "test_setup": "failed"}


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("it barks [1.34 ms]", "it barks"),
        ("it barks [12 s ]", "it barks"),
        ("it barks (0.021s)", "it barks"),
        ("Botan in 29.08 msec", "Botan"),
        ("Botan in 1 sec ran", "Botan ran"),
        ("tests/a.py::test_x[1 ms or 2]", "tests/a.py::test_x[1 ms or 2]"),
        ("test (1)", "test (1)"),
    ],
)
def test_durations_are_no_part_of_a_name(name: str, bare: str) -> None:
    assert without_timing(name) == without_timing(bare) == bare


def test_the_last_line_of_a_name_has_the_exit_code() -> None:
    assert last_exit_code("CODE=1\nCODE=0 \nXCODE=3\n CODE=4\n", "CODE") == 0
    assert last_exit_code("CODE=\n", "CODE") is None


async def test_unittests_lines() -> None:
    found = await read_log("unittest", UNITTEST, timeout_s=10)
    statuses = [found.status_of(f"test_{number} (a.tests.Case)") for number in ("one", "two", "three", "four", "five")]
    assert statuses == ["passed", "failed", "skipped", "passed", "failed"]
    assert {name for name in found.statuses if name.startswith("test_")} == set(UNITTEST_NAMES)


@pytest.mark.parametrize("text", ["FAILED a::b - x\nPASSED a::b\n", "PASSED a::b\nERROR a::b - teardown\n"])
async def test_of_two_results_the_worse_counts(text: str) -> None:
    assert (await read_log("pytest", text, timeout_s=10)).status_of("a::b") == "failed"


LONG = (
    "PASSED ",
    "a::b ",
    "x ... ",
    " - ",
    "[",
    "] ",
    " SKIPPED (",
    "a::b PASSED [",
    "=",
    "= ",
    ".",
    "1 passed ",
    "\x1b[",
)


async def test_long_lines_take_no_longer_than_they_are() -> None:
    for piece in LONG:
        for text in (
            piece * 200_000,
            f"a::b {piece * 200_000}",
            f"FAILED {piece * 200_000}",
            f"t (a.t) ... {piece * 200_000}",
        ):
            for parser in ("pytest", "unittest", "r2e"):
                started = time.monotonic()
                assert len((await read_log(parser, text, timeout_s=10)).statuses) <= 3
                assert time.monotonic() - started < 10, (parser, piece)


async def test_an_unknown_parser_names_the_known_ones() -> None:
    with pytest.raises(EvaluatorError, match="known are pytest, unittest"):
        await read_log("jest", "", timeout_s=10)


async def test_parsers_of_swebench_are_asked_for_with_the_line_that_installs_them() -> None:
    need(importlib.util.find_spec("swebench") is None, "does not apply: swebench is installed")
    with pytest.raises(EvaluatorError, match=r"No module named 'swebench'.*pip install --no-deps swebench unidiff"):
        await read_log("parse_log_django", UNITTEST, timeout_s=60)


def test_an_own_name_counts_before_an_alias_and_a_group_for_tests_without_results() -> None:
    log = TestLog(
        [
            Outcome("a", "passed", ("b", "c")),
            Outcome("b", "failed", ("c",)),
            Outcome("t.py", "skipped", is_group=True),
            Outcome("u.py::x[a b]", "passed"),
            Outcome("u.py::x[a c]", "skipped"),
        ]
    )
    names = ("a", "b", "c", "d", "t.py::x", "u.py::x", "u.py::x[a", "u.py::x[a c", "u.py::y[a")
    statuses = ["passed", "failed", "failed", None, "skipped", None, "passed", "skipped", None]
    assert [log.status_of(name) for name in names] == statuses
    assert log.renamed(lambda name: "one").status_of("one") == "failed"


@pytest.mark.parametrize(
    ("log", "has_some"),
    [
        ("..\nRan 2 tests in 0.0s\n\nOK\n", True),
        ("x\nRan 1 test in 0.0s\n\nOK (expected failures=1)\n", True),
        ("E.\nRan 2 tests in 0.1s\n\nFAILED (errors=1)\n", True),
        ("s\nRan 1 test in 0.0s\n\nOK (skipped=1)\n", False),
        ("EF\nRan 2 tests in 0.0s\n\nFAILED (failures=1, errors=1)\n", False),
        ("\nRan 0 tests in 0.0s\n\nFAILED (errors=1)\n", False),
    ],
)
def test_a_log_without_names_says_whether_any_test_passed(log: str, has_some: bool) -> None:
    """Where none did, none of those that must pass did, and the agent earned nothing."""
    assert PARSERS["unittest"].has_unnamed_tests(log) is has_some
