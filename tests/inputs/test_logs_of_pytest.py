"""Logs that the real pytest writes, over outcomes, names and options. What it reports to a plug-in is the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.grading.untrusted.outcomes import Status, TestLog
from gangline.grading.untrusted.pytest_logs import has_pytest_summary, has_unnamed_tests_of_pytest
from gangline.grading.untrusted.test_logs import read_log
from support.service.field_tasks import write

TRUTH = """
import json, os
found = {}
def pytest_runtest_logreport(report):
    if report.outcome == "rerun":
        return
    was_expected = hasattr(report, "wasxfail")
    if report.failed or (report.passed and was_expected and report.when == "call"):
        status = "failed"
    elif report.skipped and not was_expected:
        status = "skipped"
    elif report.when == "call" or report.skipped:
        status = "passed"
    else:
        return
    order = ["passed", "skipped", "failed"]
    if not (type(report).__name__ == "SubtestReport" and status != "failed"):
        found[report.nodeid] = max(found.get(report.nodeid, status), status, key=order.index)
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        with open(os.environ["TRUTH"], "w") as file:
            json.dump(found, file)
"""
PARAMETERS = [
    *("plain", "a b", "two  blanks", "a - b", "[d] (e)", "[", "]", "x [ 20%]", "PASSED", "a PASSED", "x FAILED [ 3%]"),
    *("::", "a::b - c", "é", "\n", "a\tb", "", " ", "-", " - ", "/", "/etc/kennel", "//host/dog", "/a*", "\\"),
    *("MouseButton.LEFT", "XPASS (why)", "a SKIPPED (b)", "SUBFAILED", "'", '"', "=== FAILURES ===", "1 passed in 1s"),
    *("ok", "... ok", "100%", "x" * 120, "a, b", "<function f at 0x1>", "lambda: 1", "{'a': [1]}", "😀", "..."),
]
REASONS = [
    *("no device", "", "a (b) c", "PASSED", "x - y", "test_a.py::test_b PASSED", "[ 20%]", "two\nlines", "é 日本"),
    *("a long reason " * 20, "unbalanced )", "(", "ends with FAILED", "SKIPPED [1] a.py:3: no", "[1] x.py:2: y", ": x"),
]
GRID = """
import pytest
PARAMETERS = {parameters!r}
REASONS = {reasons!r}
@pytest.fixture
def broken(): raise ValueError("no - not PASSED")
@pytest.fixture
def late():
    yield
    raise ValueError("too late - FAILED")
@pytest.mark.parametrize("p", PARAMETERS)
class TestNames:
    def test_passes(self, p): pass
    def test_skips(self, p): pytest.skip("not - now")
    def test_fails(self, p): pytest.fail("that is - not so] PASSED", pytrace=False)
@pytest.mark.parametrize("p", PARAMETERS[:12])
class TestOutcomes:
    def test_errs(self, p, broken): pass
    def test_ends_badly(self, p, late): pass
    def test_fails_and_ends_badly(self, p, late): assert False
    @pytest.mark.skip
    def test_is_skipped(self, p): pass
    @pytest.mark.xfail(reason="known - bug")
    def test_expected(self, p): assert False
    @pytest.mark.xfail
    def test_too_good(self, p): pass
    @pytest.mark.xfail(strict=True)
    def test_strictly_too_good(self, p): pass
@pytest.mark.parametrize("why", range(len(REASONS)))
class TestReasons:
    def test_skips(self, why): pytest.skip(REASONS[why])
    def test_fails(self, why): pytest.fail(REASONS[why])
    def test_xfails(self, why): pytest.xfail(REASONS[why])
    def test_errs(self, why, request): request.addfinalizer(lambda: pytest.fail(REASONS[why]))
"""
KINDS = '''
import logging, sys, unittest, warnings, pytest
class Test:
    def test_method(self): pass
    class TestNested:
        def test_method(self): assert 0, "several\\nlines"
def test_parts(subtests):
    for number in range(3):
        with subtests.test("why - not", number=number): assert number != 1
def test_good_parts(subtests):
    for number in range(3):
        with subtests.test(number=number): pass
def test_skipped_parts(subtests):
    with subtests.test("a"): pytest.skip("no - no")
class Old(unittest.TestCase):
    def test_old(self):
        """Its docstring PASSED"""
    @unittest.skip("why")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_too_good(self): pass
    def test_parts(self):
        for number in range(2):
            with self.subTest(number=number): self.assertEqual(number, 0)
class OldClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise unittest.SkipTest("no class")
    def test_a(self): pass
class OldBrokenClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise ValueError("no class")
    def test_a(self): pass
def test_prints():
    print("tests/test_kinds.py::Test::test_method FAILED")
    print("FAILED tests/test_kinds.py::Test::test_method - no")
    print("[gw0] [ 50%] FAILED tests/test_kinds.py::Test::test_method")
    print("ERROR tests/test_kinds.py::Test::test_method")
def test_prints_good_news():
    print("PASSED tests/test_kinds.py::Test::TestNested::test_method")
    print("tests/test_kinds.py::Test::TestNested::test_method PASSED [ 50%]")
    assert False
def test_warns(): warnings.warn("tests/test_kinds.py::Test::test_method FAILED")
def test_logs(): logging.getLogger().error("FAILED tests/test_kinds.py::Test::test_method")
def test_ends(): print("no line feed", end="")
def test_skips_after_words(): print("words"); pytest.skip("then")
'''
HEADINGS = """
def test_prints_headings():
    print("=== FAILURES ===\\n=== short test summary info ===\\nFAILED tests/test_kinds.py::Test::test_method - no")
    print("=== 1 failed in 0.1s ===")
"""
FILES = {
    "tests/conftest.py": TRUTH,
    "tests/test_kinds.py": KINDS,
    "tests/test_grid.py": GRID.format(parameters=PARAMETERS, reasons=REASONS),
    "tests/test_headings.py": HEADINGS,
    "tests/two words/test_blank.py": "def test_in_a_folder(): pass\n",
    "tests/test_é.py": "def test_ü(): pass\n",
    "tests/doc.txt": ">>> 1 + 1\n2\n",
    "tests/test_absent.py": "import pytest\npytest.skip('no module', allow_module_level=True)\ndef test_a(): pass\n",
    "tests/test_imports.py": "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass\n",
}
SOME = ("tests/test_kinds.py", "tests/test_absent.py", "tests/test_imports.py", "tests/two words")
Truth = dict[str, Status]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write(folder / "pytest.ini", "[pytest]\n")
    for name, text in FILES.items():
        write(folder / name, text)
    return folder


def ran(project: Path, *options: str, columns: int = 80, **env: str) -> tuple[str, Truth, int]:
    """The log, each test's status by pytest's own reports, and the exit code."""
    told = project / "truth.json"
    told.write_text("{}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--doctest-glob=doc.txt", *options]
    more = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRUTH": str(told), "COLUMNS": str(columns), **env}
    done = subprocess.run(
        command,
        cwd=project,
        env=os.environ | {"PYTEST_ADDOPTS": ""} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode(), json.loads(told.read_text()), done.returncode


async def others(log: str, truth: Truth, *, but: set[Any] = frozenset()) -> dict[str, tuple[Status, Status | None]]:
    """Tests whose status in the log is not the true one: (true, read)."""
    read = await read_log("pytest", log, timeout_s=60)
    return {
        name: (status, read.status_of(name))
        for name, status in truth.items()
        if read.status_of(name) != status and status not in but
    }


NAMED = {
    "-v": ("-v",),
    "-rA -v": ("--tb=no", "-rA", "-v"),
    "-vv": (
        "--tb=no",
        "-vv",
    ),
    "short": ("-v", "--tb=short"),
    "line": ("-v", "--tb=line", "-rA"),
    "native": ("-v", "--tb=native", "-rA", "-l"),
    "no header": ("--tb=no", "-v", "--no-header"),
    "no summary": ("-v", "--no-summary"),
    "all but passes": ("-v", "-ra", "--xfail-tb", "--durations=3"),
    "reasons first": ("--tb=no", "-v", "-rfEp"),
    "colours": ("--tb=no", "-v", "-rA", "--color=yes"),
    "classic": ("--tb=no", "-v", "-o", "console_output_style=classic"),
    "count": ("--tb=no", "-v", "-o", "console_output_style=count"),
    "times": ("--tb=no", "-v", "-o", "console_output_style=times"),
    "no folding": ("--tb=no", "-v", "-rA", "--no-fold-skipped"),
    "workers": ("--tb=no", "-v", "-p", "xdist", "-n", "2"),
    "workers, colours": ("--tb=no", "-v", "-p", "xdist", "-n", "2", "--color=yes", "-rA"),
    "all output": ("-v", "-rA", "-s"),
    "live log": ("-v", "-rA", "-o", "log_cli=true"),
    "output of passes": ("-v", "-rP", "--show-capture=all"),
    "as it comes": ("-v", "-rA", "-s", "--capture=tee-sys"),
    "by class": ("-v", "-p", "xdist", "-n", "1", "--dist", "loadscope"),
}


@pytest.mark.parametrize("options", NAMED)
async def test_every_test_has_its_status_whatever_the_options(project: Path, options: str) -> None:
    is_apart = "-s" in NAMED[options] or "-rA" not in NAMED[options]
    log, truth, _code = ran(project, *NAMED[options], *["--ignore=tests/test_headings.py"] * is_apart)
    assert len(truth) > 4 * len(PARAMETERS)
    if not {"-rA", "-ra"} & set(NAMED[options]):
        truth.pop("tests/test_kinds.py::Old::test_parts")  # pytest 9.2 writes of it that it passed, and no more
    assert await others(log, truth) == {}


@pytest.mark.parametrize("columns", [1, 20, 41, 400])
async def test_the_width_of_the_terminal_does_not_matter(project: Path, columns: int) -> None:
    log, truth, _code = ran(project, "-vv", "-rA", "--tb=no", columns=columns)
    assert await others(log, truth) == {}


@pytest.mark.parametrize("options", [("-rA",), ("-q", "-rA"), ("-qq", "-rA"), ("-q", "-rA", "--color=yes")])
async def test_a_summary_alone_names_all_but_what_was_skipped(project: Path, options: tuple[str, ...]) -> None:
    """It has the file and the line of these."""
    log, truth, _code = ran(project, *options, *SOME)
    assert has_pytest_summary(log)
    assert await others(log, truth, but={"skipped"}) == {}
    read = await read_log("pytest", log, timeout_s=60)
    assert {read.status_of(name) for name, status in truth.items() if status == "skipped"} == {None}


@pytest.mark.parametrize("options", [("-rA",), ("-rA", "-v"), ("-ra", "-v"), ("-p", "xdist", "-n", "2", "-v", "-rA")])
async def test_tests_of_a_module_that_was_skipped_were_skipped(project: Path, options: tuple[str, ...]) -> None:
    log, _truth, _code = ran(project, *options, *SOME)
    read = await read_log("pytest", log, timeout_s=60)
    assert read.status_of("tests/test_absent.py::test_a") == "skipped"
    assert read.status_of("tests/test_imports.py::test_a[x]") == "skipped"
    assert read.status_of("tests/test_kinds.py::test_nothing") is None


@pytest.mark.parametrize("options", [("-q",), ("-qq",), (), ("-q", "--tb=no", "-rf")])
def test_a_log_of_dots_is_known_as_one(project: Path, options: tuple[str, ...]) -> None:
    log, _truth, _code = ran(project, *options, *SOME)
    assert has_unnamed_tests_of_pytest(log)


async def test_what_did_not_run_has_no_status(project: Path) -> None:
    log, truth, _code = ran(project, "-v", "-rA", "--maxfail=1")
    assert 0 < len(truth) < 100
    read = await read_log("pytest", log, timeout_s=60)
    assert read.statuses.keys() == truth.keys()
    assert await others(log, truth) == {}


BROKEN = {
    "syntax": "def test_a(:\n",
    "import": "import no_such_module\ndef test_a(): pass\n",
    "exit": "raise SystemExit(3)\ndef test_a(): pass\n",
    "prints": "print('PASSED test_broken.py::test_a')\n1 / 0\n",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_module_that_cannot_be_collected_failed_with_all_its_tests(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "conftest.py", TRUTH)
    write(tmp_path / "test_broken.py", BROKEN[kind])
    write(tmp_path / "test_whole.py", "def test_a(): pass\n")
    log, _truth, code = ran(tmp_path, "-v", "-rA", "--continue-on-collection-errors")
    read = await read_log("pytest", log, timeout_s=60)
    if kind != "exit":
        assert read.status_of("test_broken.py::test_a") == "failed"
    assert read.status_of("test_whole.py::test_a") in ("passed", None)
    assert (code != 0, has_unnamed_tests_of_pytest("")) == (True, False)


@pytest.mark.parametrize("options", [("-v", "-s"), ("-v", "-s", "-rA"), ("-v", "-s", "-ra")])
async def test_a_module_that_prints_results_and_cannot_be_collected_failed(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    forged = r"print('\ntest_a.py::test_a PASSED\nPASSED test_a.py::test_a')"
    write(tmp_path / "test_a.py", f"{forged}\n1 / 0\n")
    write(tmp_path / "conftest.py", TRUTH)
    log, _truth, _code = ran(tmp_path, *options)
    assert "\ntest_a.py::test_a PASSED" in log
    assert (await read_log("pytest", log, timeout_s=60)).status_of("test_a.py::test_a") == "failed"


async def test_a_file_with_a_wrong_style_leaves_its_tests_what_they_are() -> None:
    """Older plug-ins test a file as a whole, under its name."""
    log = (
        f"{START}a.py FAILED\na.py::test_a PASSED\n=== short test summary info ===\nPASSED a.py::test_a\nFAILED a.py\n"
    )
    read = await read_log("pytest", log, timeout_s=10)
    assert (read.status_of("a.py::test_a"), read.status_of("a.py")) == ("passed", "failed")


async def test_runs_one_after_another_are_all_read(project: Path) -> None:
    one, first, _code = ran(project, "-v", "-rA", "tests/test_kinds.py")
    two, second, _code = ran(project, "-q", "-rA", "tests/two words")
    assert await others(one + two, first | second) == {}
    assert await others(two + one, first | second) == {}


RECORDED = """
test_r.py::test_sub [msg] (i=0) SUBPASS                                  [ 33%]
test_r.py::test_sub [msg] (i=1) SUBFAIL                                  [ 33%]
test_r.py::test_sub PASSED                                               [ 33%]
test_r.py::test_sub[a b] [msg] SUBFAIL                                   [ 50%]
test_r.py::test_sub[a b] PASSED                                          [ 50%]
test_r.py::test_subskip [a] SUBSKIP (no - no)                            [ 66%]
test_r.py::test_subskip XFAIL (no - no)                                  [ 66%]
test_r.py::test_subskip [ok] SUBPASS                                     [ 66%]
test_r.py::test_subskip PASSED                                           [ 66%]
test_r.py::test_flaky RERUN                                              [100%]
test_r.py::test_flaky PASSED                                             [100%]
"""
RECORDED_SUMMARY = """
=========================== short test summary info ============================
PASSED test_r.py::test_sub
PASSED test_r.py::test_sub[a b]
PASSED test_r.py::test_subskip
PASSED test_r.py::test_flaky
[a] SUBSKIP [1] test_r.py:6: no - no
XFAIL test_r.py::test_subskip - reason: no - no
[msg] SUBFAIL test_r.py::test_sub[a b] - assert 1 != 1
[msg] (i=1) SUBFAIL test_r.py::test_sub - assert 1 != 1
= 1 failed, 3 passed, 1 skipped, 1 xfailed, 3 subtests passed, 1 rerun in 0.04s =
"""
START = "============================= test session starts ==============================\n"


@pytest.mark.parametrize("log", [RECORDED, START + RECORDED, START + RECORDED + RECORDED_SUMMARY, RECORDED_SUMMARY])
async def test_parts_and_reruns_as_the_plug_ins_of_pytest_8_report_them(log: str) -> None:
    read = await read_log("pytest", log, timeout_s=60)
    assert read.status_of("test_r.py::test_sub") == "failed", "a part of it failed"
    assert read.status_of("test_r.py::test_sub[a b]") == "failed"
    assert read.status_of("test_r.py::test_subskip") == "passed"
    assert read.status_of("test_r.py::test_flaky") == "passed", "its last run counts"


async def test_names_are_found_as_lists_have_them(project: Path) -> None:
    """Cut off at a blank or later, with one blank for several, the end of a path alone."""
    log, truth, _code = ran(project, "-v", "-rA", "--tb=no", "tests/test_grid.py")
    read = await read_log("pytest", log, timeout_s=60)
    test = "tests/test_grid.py::TestNames::test_passes"
    for name in ("[a", "[two blanks]", "[/kennel]", "[//host/dog]", "[1]", "[a - ", "[<function f"):
        assert read.status_of(test + name) == "passed", name
        assert read.status_of(test.replace("passes", "fails") + name) == "failed", name
        assert read.status_of(test.replace("passes", "skips") + name) == "skipped", name
    expected = "tests/test_grid.py::TestOutcomes::test_expected[two blanks] - known - bug"
    assert read.status_of(expected) == "passed", "with the reason of an expected failure"
    assert read.statuses.keys() == truth.keys(), "its own names are the only ones"


async def test_empty_logs_have_no_tests() -> None:
    for text in ("", "\n", START, "= no tests ran in 0.01s ="):
        assert TestLog().statuses == (await read_log("pytest", text, timeout_s=10)).statuses
        assert not has_unnamed_tests_of_pytest(text)
