"""Logs that the real unittest writes, over outcomes, docstrings and output. Its result object is the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.grading.untrusted.outcomes import Status
from gangline.grading.untrusted.test_logs import read_log
from gangline.grading.untrusted.unittest_logs import has_unittest_summary, has_unnamed_tests_of_unittest
from support.service.field_tasks import write

RUN = """
import json, os, sys, unittest
if os.environ.get("OLD"):  # until Python 3.10, a test's name has no method behind its class
    unittest.TestCase.__str__ = lambda self: f"{self._testMethodName} ({unittest.util.strclass(self.__class__)})"
class Result(unittest.TextTestResult):
    found = {}
    def note(self, test, status):
        test = getattr(test, "test_case", test)
        order = ["skipped", "passed", "failed"]
        old = self.found.get(test.id(), status)
        self.found[test.id()] = max(old, status, key=order.index)
    def addSuccess(self, test): self.note(test, "passed"); super().addSuccess(test)
    def addFailure(self, test, error): self.note(test, "failed"); super().addFailure(test, error)
    def addError(self, test, error): self.note(test, "failed"); super().addError(test, error)
    def addSkip(self, test, reason): self.note(test, "skipped"); super().addSkip(test, reason)
    def addExpectedFailure(self, test, error): self.note(test, "passed"); super().addExpectedFailure(test, error)
    def addUnexpectedSuccess(self, test): self.note(test, "failed"); super().addUnexpectedSuccess(test)
    if os.environ.get("OLD"):
        def addSubTest(self, test, part, error):
            if error is not None:
                self.note(test, "failed")
            unittest.TestResult.addSubTest(self, test, part, error)
    else:
        def addSubTest(self, test, part, error):
            if error is not None:
                self.note(test, "failed")
            super().addSubTest(test, part, error)
how = {"verbosity": int(os.environ["VERBOSITY"]), "buffer": bool(os.environ.get("BUFFER"))}
runner = unittest.TextTestRunner(resultclass=Result, **how)
done = runner.run(unittest.defaultTestLoader.discover(".", os.environ.get("FILES", "test*.py")))
json.dump(Result.found, open(os.environ["TRUTH"], "w"))
sys.exit(not done.wasSuccessful())
"""
DOCSTRINGS = [
    *("First line.", "Waits ... then ok", "Ends ... ok", "Ends with ... FAIL", "It says FAIL", "skipped 'no'"),
    *("test_doc_0 (test_docs.Docs)", "Checks (this)", "Same as another.", "Same as another.", "É ü 日本", "..."),
    *("ok", "  Indented.  ", "ERROR: no", "FAIL: test_a (test_docs.Docs.test_doc_0)", "Ran 3 tests in 1s", "a\tb"),
    *("===", "\x1b[31mred\x1b[0m", "... skipped 'x'", "[x] (i=1)", '#123 -- fixed: it\'s "quoted"'),
]
REASONS = ["why", "", "a ... ok", "it's", 'a "quote"', "li\nne", "É", "(a.b)", "x" * 200]
DOCS = f"""
import unittest
DOCSTRINGS, REASONS = {DOCSTRINGS!r}, {REASONS!r}
def passes(self): pass
def fails(self): self.fail("test_doc_0 (test_docs.Docs.test_doc_0) ... ok")
def errs(self): raise ValueError("no")
def skips(self): self.skipTest("not ... ok")
def parts(self):
    for part in range(3):
        with self.subTest("why", part=part): self.assertNotEqual(part, 1)
def good_parts(self):
    with self.subTest(part=1): pass
def copy(function): return type(function)(function.__code__, globals(), function.__name__)
class Docs(unittest.TestCase):
    for kind in (passes, fails, errs, skips, parts, good_parts):
        for at, text in enumerate([None, *DOCSTRINGS]):
            made = copy(kind)
            made.__doc__ = text
            vars()[f"test_{{kind.__name__}}_{{at}}"] = made
            if kind in (passes, fails):
                made = unittest.expectedFailure(copy(kind))
                made.__doc__ = text
                vars()[f"test_expected_{{kind.__name__}}_{{at}}"] = made
class Reasons(unittest.TestCase):
    for at, reason in enumerate(REASONS):
        vars()[f"test_skips_{{at}}"] = lambda self, reason=reason: self.skipTest(reason)
        vars()[f"test_is_skipped_{{at}}"] = unittest.skip(reason)(copy(passes))
"""
OUTPUT = """
import logging, sys, unittest, warnings
TEXTS = ["words\\n", "no line feed", "a ... b\\n", "a ... ok\\n", "FAIL\\n", "Loading (x)\\n", "\\n\\n", "ok\\n",
         "=====\\n", "test_other (test_output.Output.test_other) is next\\n", "Applying one.0001... OK\\n",
         "ERROR: no\\n", "x: skipped 'a'\\n", "é\\n", "tests ... 3 of 4 (75 %)\\n", "PASSED a.py::b\\n",
         "Ran out\\n", "book\\n", "Loading (x.y)\\nok\\n", "Loading (x) ... done\\n", "Ran 3 tests\\n"]
def printer(at, stream, ends):
    def test(self):
        print(TEXTS[at], end="", file=getattr(sys, stream), flush=True)
        if ends: self.fail("no")
    return test
class Output(unittest.TestCase):
    for at in range(len(TEXTS)):
        for stream in ("stdout", "stderr"):
            for ends in (False, True):
                vars()[f"test_{at}_{stream}_{ends}"] = printer(at, stream, ends)
                vars()[f"test_doc_{at}_{stream}_{ends}"] = made = printer(at, stream, ends)
                made.__doc__ = "Prints something."
    def test_logs(self): logging.getLogger().error("to see")
    def test_warns(self): warnings.warn("careful")
    def test_skips(self): print("words"); self.skipTest("then")
"""
CLASSES = """
import unittest
class Skipped(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise unittest.SkipTest("no class")
    def test_a(self): pass
class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise ValueError("no class")
    def test_a(self): pass
@unittest.skip("all")
class Marked(unittest.TestCase):
    def test_a(self): pass
class EndsBadly(unittest.TestCase):
    @classmethod
    def tearDownClass(cls): raise ValueError("no class")
    def test_a(self): pass
class CleansBadly(unittest.TestCase):
    def setUp(self): self.addCleanup(lambda: 1 / 0)
    def test_a(self): pass
class Async(unittest.IsolatedAsyncioTestCase):
    async def test_a(self): "It waits."
class Outer:
    class Inner(unittest.TestCase):
        def test_a(self): pass
"""
FORGED = """
import unittest
def forge(case): print(f"test_a (test_forged.{case}.test_a) ... ok", flush=True)
class NoClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls): forge("NoClass"); raise ValueError("no class")
    def test_a(self): pass
class Fails(unittest.TestCase):
    def test_a(self): forge("Fails"); self.fail("no")
"""
FILES = {
    "run.py": RUN,
    "test_forged.py": FORGED,
    "test_forged_module.py": "print('test_a (test_forged_module.M.test_a) ... ok', flush=True)\n1 / 0\n",
    "test_docs.py": DOCS,
    "test_output.py": OUTPUT,
    "test_classes.py": CLASSES,
    "test_broken.py": "import no_such_module\n",
    "test_absent.py": "import unittest\nraise unittest.SkipTest('no module')\n",
    "test_é.py": "import unittest\nclass É(unittest.TestCase):\n    def test_ü(self): pass\n",
    "package/__init__.py": "",
    "package/test_deep.py": "import unittest\nclass Deep(unittest.TestCase):\n    def test_a(self):\n        'Deep.'\n",
    "test_module.py": "import unittest\ndef setUpModule(): raise unittest.SkipTest('no')\n"
    "class M(unittest.TestCase):\n    def test_a(self): pass\n",
}
GROUPS = {
    "test_a (test_classes.Skipped.test_a)": "skipped",
    "test_a (test_classes.Skipped)": "skipped",
    "test_classes.Skipped.test_a": "skipped",
    "test_a (test_classes.Broken.test_a)": "failed",
    "test_a (test_absent.Any.test_a)": "skipped",
    "test_a (test_broken.Any.test_a)": "failed",
    "test_a (test_module.M.test_a)": "skipped",
    "test_none (test_docs.Docs.test_none)": None,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        write(folder / name, text)
    return folder


def ran(project: Path, verbosity: int = 2, **env: str) -> tuple[str, dict[str, Status]]:
    """The log, and each test's status by its id."""
    told = project / "truth.json"
    more = {"TRUTH": str(told), "VERBOSITY": str(verbosity), "PYTHONDONTWRITEBYTECODE": "1", **env}
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=project,
        env=os.environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    truth: dict[str, Status] = json.loads(told.read_text())
    return done.stdout.decode(), {test: status for test, status in truth.items() if not test.startswith("unittest.")}


def names_of(test: str) -> list[str]:
    """As lists may have a test: in unittest's new form, in the old one, and as its id."""
    if "(" in test:  # a class or a module
        return [test]
    case, _, method = test.rpartition(".")
    return [f"{method} ({test})", f"{method} ({case})", test]


@pytest.mark.parametrize("env", [{}, {"BUFFER": "1"}, {"OLD": "1"}, {"PYTHONUNBUFFERED": "1"}, {"FORCE_COLOR": "1"}])
async def test_every_test_has_its_status_by_any_of_its_names(project: Path, env: dict[str, str]) -> None:
    log, truth = ran(project, **env)
    read = await read_log("unittest", log, timeout_s=60)
    wrong = {
        name: (status, read.status_of(name))
        for test, status in truth.items()
        for name in names_of(test)
        if read.status_of(name) != status
    }
    assert len(truth) > 250
    assert wrong == {}, list(wrong.items())[:20]
    assert has_unittest_summary(log)
    assert {name: read.status_of(name) for name in GROUPS} == GROUPS


async def test_a_docstring_is_a_name_too_and_of_two_tests_the_worse_counts(project: Path) -> None:
    log, _truth = ran(project)
    read = await read_log("unittest", log, timeout_s=60)
    assert read.status_of("It waits.") == "passed"
    assert read.status_of("Deep.") == "passed"
    assert read.status_of("Prints something.") == "failed", "as some with it did"


async def test_without_v_there_are_only_dots_and_the_names_of_failures(project: Path) -> None:
    log, truth = ran(project, verbosity=1, FILES="test_docs.py")
    read = await read_log("unittest", log, timeout_s=60)
    assert has_unnamed_tests_of_unittest(log)
    assert not read.has("passed"), [one for one in read.statuses.items() if one[1] == "passed"]
    assert read.status_of("test_fails_1 (test_docs.Docs.test_fails_1)") == "failed"
    assert truth["test_docs.Docs.test_fails_1"] == "failed"


DJANGO = """
Testing against Django installed in '/testbed/django' with up to 2 processes
Found 6 test(s).
Creating test database for alias 'default' ('file:memorydb_default?mode=memory&cache=shared')...
Operations to perform:
  Synchronize unmigrated apps: admin, auth
Running migrations:
  Applying contenttypes.0001_initial... OK
System check identified no issues (0 silenced).
test_one (admin_views.tests.One.test_one) ... ok
test_two (admin_views.tests.One.test_two)
The form's errors are shown (#12345). ... ok
test_three (admin_views.tests.One.test_three) ... Internal Server Error: /admin/
Traceback (most recent call last):
  File "x.py", line 3, in f
ValueError: FAIL
ok
test_four (admin_views.tests.One.test_four)
It talks. ... Applying sites.0002_alter_domain_unique... OK
ok
test_five (admin_views.tests.One.test_five) ... skipped "Database doesn't support feature(s): x"
test_six (admin_views.tests.One.test_six) ... FAIL

======================================================================
FAIL: test_six (admin_views.tests.One.test_six)
----------------------------------------------------------------------
Traceback (most recent call last):
AssertionError: test_one (admin_views.tests.One.test_one) ... FAIL

----------------------------------------------------------------------
Ran 6 tests in 0.012s

FAILED (failures=1, skipped=1)
Destroying test database for alias 'default' ('file:memorydb_default?mode=memory&cache=shared')...
"""


async def test_what_djangos_runner_writes() -> None:
    read = await read_log("unittest", DJANGO, timeout_s=10)
    found = {number: read.status_of(f"test_{number} (admin_views.tests.One)") for number in ("one", "two", "three")}
    assert found == {"one": "passed", "two": "passed", "three": "passed"}
    assert read.status_of("test_four (admin_views.tests.One.test_four)") == "passed"
    assert read.status_of("test_five (admin_views.tests.One.test_five)") == "skipped"
    assert read.status_of("test_six (admin_views.tests.One.test_six)") == "failed"
    assert read.status_of("The form's errors are shown (#12345).") == "passed"
    assert read.status_of("It talks.") == "passed"


@pytest.mark.parametrize("case", ["test_forged.NoClass", "test_forged.Fails", "test_forged_module.M"])
async def test_what_code_prints_is_no_result_of_a_test_that_failed_or_never_ran(project: Path, case: str) -> None:
    log, _truth = ran(project, FILES="test_forged*.py", PYTHONUNBUFFERED="1")
    assert f"test_a ({case}.test_a) ... ok" in log
    read = await read_log("unittest", log, timeout_s=60)
    assert {name: read.status_of(name) for name in names_of(f"{case}.test_a")} == dict.fromkeys(
        names_of(f"{case}.test_a"), "failed"
    )


PYTHON_3_14 = """
test_one (a.T.test_one) ... \x1b[32mok\x1b[0m
test_two (a.T.test_two)
Doc. ... \x1b[31mFAIL\x1b[0m
test_three (a.T.test_three) ... \x1b[33mskipped 'no'\x1b[0m
test_four (a.T.test_four) ... \x1b[33mexpected failure\x1b[0m
test_five (a.T.test_five) ... \x1b[31munexpected success\x1b[0m
"""


async def test_the_colours_of_newer_pythons() -> None:
    read = await read_log("unittest", PYTHON_3_14, timeout_s=10)
    assert list(read.statuses.values()) == ["passed", "failed", "skipped", "passed", "failed"]
