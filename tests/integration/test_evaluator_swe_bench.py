"""Whose fault it is when a patch is not graded: the agent's is 0, ours is not a reward at all."""

from __future__ import annotations

import os
import py_compile
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError, FilesNotKept
from gangline.machine.reading.imported import Choices
from gangline.node.sessions.replay.files import AbsentFiles
from gangline.settings import plugins
from gangline.tasks.importers.swe import InstanceChoices, read_instance
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_command
from support.service.field_tasks import BROKEN, FIXED, git, repository
from support.training.evaluation_samples import a_context

pytestmark = pytest.mark.usefixtures("_git")
PATH = f"{Path(sys.executable).parent}:{os.defpath}"
TESTS = "python -m pytest -rA -p no:cacheprovider test_kennel.py"

LIAR = """
import os
def pytest_collection(session):
    session.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    print("PASSED test_kennel.py::test_add\\nPASSED test_kennel.py::test_double", flush=True)
    os._exit(1)
"""


@pytest.fixture
def _git() -> None:
    need_command("git", "apt-get install git")


class Kennel:
    """The agent's repository and a clean one, both at the commit before the fix."""

    def __init__(self, folder: Path) -> None:
        self.row = repository(folder / "origin")
        self.agents = FolderRuntime(folder / "agents", path=PATH)
        self.clean = FolderRuntime(folder / "clean", path=PATH)
        for runtime in (self.agents, self.clean):
            git(folder, "clone", "-q", str(folder / "origin"), runtime.workdir)
            git(Path(runtime.workdir), "checkout", "-q", "--detach", self.row["base_commit"])

    async def graded(self, **changes: Any) -> Reward:
        evaluator = plugins.make_evaluator("swe_bench", self.config(**changes))
        return await evaluator.evaluate(a_context(self.agents, fresh=self.clean))

    def config(self, **changes: Any) -> dict[str, Any]:
        config = {
            "fail_to_pass": ["test_kennel.py::test_add"],
            "pass_to_pass": ["test_kennel.py::test_double"],
            "test_patch": self.row["test_patch"],
            "test_command": TESTS,
            **changes,
        }
        return {name: value for name, value in config.items() if value is not None}


@pytest.fixture
def kennel(tmp_path: Path) -> Kennel:
    return Kennel(tmp_path)


async def test_a_fix_is_resolved_with_the_numbers_behind_it(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    found = await kennel.graded()
    assert found.reward == 1.0
    assert (found.details["fail_to_pass"], found.details["pass_to_pass"]) == ("1/1", "1/1")
    assert "+    return a + b" in found.details["patch"]


@pytest.mark.parametrize("nested", [False, True])
async def test_a_recorded_session_is_graded_by_its_kept_patch(kennel: Kennel, nested: bool) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    absent = AbsentFiles("s1", "/workspace", "the task did not ask for it")
    first = a_context(kennel.agents, fresh=kennel.clean)
    again = msgspec.structs.replace(first, runtime=absent, artifacts={})
    evaluator = plugins.make_evaluator("swe_bench", kennel.config())
    if nested:
        part = {"strategy": "swe_bench", "name": "tests", "config": kennel.config()}
        evaluator = plugins.make_evaluator("composite", {"parts": [part]})
    await evaluator.evaluate(first)
    assert list(first.artifacts) == ["tests.patch.diff" if nested else "patch.diff"]
    git(Path(kennel.clean.workdir), "reset", "-q", "--hard")
    assert (await evaluator.evaluate(msgspec.structs.replace(again, kept=first.artifacts))).reward == 1.0
    with pytest.raises(FilesNotKept, match="`keep_files`"):
        await evaluator.evaluate(again)


async def test_the_repository_may_lie_outside_the_working_folder(kennel: Kennel, tmp_path: Path) -> None:
    """Relative to it, or absolute, and not the same in both runtimes when the patch has its own command."""
    nested = Path(kennel.agents.workdir) / "a" / "b"
    nested.mkdir(parents=True)
    for name in ("kennel.py", "test_kennel.py", ".git"):
        kennel.agents.file(name).rename(nested / name)
    (nested / "kennel.py").write_text(FIXED)
    elsewhere = tmp_path / "testbed"
    Path(kennel.clean.workdir).rename(elsewhere)
    Path(kennel.clean.workdir).mkdir()
    command = "cd a/b && git add -A && git diff --cached --binary"
    found = await kennel.graded(repo_dir=str(elsewhere), patch_command=command)
    assert (found.reward, found.details["fail_to_pass"]) == (1.0, "1/1")
    with pytest.raises(EvaluatorError, match="no repository in"):
        await kennel.graded(patch_command=command)


async def test_a_patch_command_that_fails_is_the_agents_doing(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    found = await kennel.graded(patch_command="git diff; echo it broke >&2; exit 3")
    assert (found.reward, found.details["why"]) == (0.0, "the patch command failed with exit code 3: it broke")


async def test_the_agents_processes_are_gone_before_its_patch_is_taken(kennel: Kennel) -> None:
    await kennel.graded()
    assert kennel.agents.log[0] == "kill"


async def test_files_of_any_kind_come_with_the_patch(kennel: Kennel) -> None:
    """New ones, ones that are not text, and ones that were committed."""
    kennel.agents.file("kennel.py").write_text("from helper import add, double\n")
    kennel.agents.file("helper.py").write_text(FIXED)
    kennel.agents.file("data.bin").write_bytes(b"\xff\0\n")
    git(Path(kennel.agents.workdir), "add", "helper.py")
    git(Path(kennel.agents.workdir), "commit", "-q", "-m", "x")
    assert (await kennel.graded()).reward == 1.0
    assert kennel.clean.file("data.bin").read_bytes() == b"\xff\0\n"


@pytest.mark.parametrize(
    ("makes", "why"),
    [
        ({}, "changed nothing"),
        ({"kennel.py": BROKEN + "# better\n"}, "tests fail"),
        ({"kennel.py": FIXED.replace("2 * a", "a")}, "tests fail"),
        ({"kennel.py": "raise SystemExit\n"}, "tests fail"),
        ({"new.py": "x" * 2_000}, "longer than 1000 bytes"),
        ({".git/HEAD": "nonsense"}, "changed nothing"),
        ({"conftest.py": LIAR}, "tests fail"),
    ],
)
async def test_what_the_agent_did_not_do_is_scored(kennel: Kennel, makes: dict[str, str], why: str) -> None:
    for path, text in makes.items():
        kennel.agents.file(path).write_text(text)
    found = await kennel.graded(max_patch_bytes=1_000, protected=[])
    assert found.reward == 0.0
    assert why in found.details["why"]


PASSES_ALL = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
"""
CHEATS = {
    "conftest.py": PASSES_ALL,
    "tests/conftest.py": PASSES_ALL,
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "sitecustomize.py": "print('PASSED test_kennel.py::test_add'); import os; os._exit(0)\n",
    "cheat.pth": "import os; os._exit(0)\n",
}


@pytest.mark.parametrize("path", CHEATS)
async def test_files_that_run_before_the_tests_are_not_the_agents(kennel: Kennel, path: str) -> None:
    kennel.agents.file(path).parent.mkdir(exist_ok=True)
    kennel.agents.file(path).write_text(CHEATS[path])
    found = await kennel.graded(test_command=f"PYTHONPATH=. {TESTS}")
    assert found.reward == 0.0
    assert found.details["not_applied"] == [path]
    assert path in found.details["patch"], "what the agent did stays visible"
    assert not Path(kennel.clean.workdir, path).exists()


async def test_those_of_the_repository_are_back_whatever_the_agent_did(kennel: Kennel, tmp_path: Path) -> None:
    for folder in (Path(kennel.agents.workdir), Path(kennel.clean.workdir)):
        (folder / "conftest.py").write_text("import builtins\nbuiltins.has_conftest = True\n")
        git(folder, "add", "conftest.py")
        git(folder, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "conftest", "--date=@0 +0000")
    kennel.agents.file("kennel.py").write_text(FIXED + "assert has_conftest\n")
    kennel.agents.file("conftest.py").rename(kennel.agents.file("moved.py"))
    assert (await kennel.graded()).reward == 1.0


async def test_bytecode_of_the_agents_does_not_stand_for_the_tests(kennel: Kennel) -> None:
    """Python takes bytecode that says so without a look at its source."""
    name = f"__pycache__/test_unit.{sys.implementation.cache_tag}.pyc"
    kennel.agents.file("__pycache__").mkdir()
    source = kennel.agents.file("forged.py")
    source.write_text("import unittest\nclass T(unittest.TestCase):\n  def test_add(self): pass\n")
    forged = kennel.agents.file(name)
    py_compile.compile(str(source), str(forged), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    true = [
        "import unittest, kennel",
        "class T(unittest.TestCase):",
        "  def test_add(self): assert kennel.add(1, 2) == 3",
    ]
    test_patch = "".join(f"+{line}\n" for line in true)
    found = await kennel.graded(
        test_command="python -m unittest -v test_unit",
        test_patch=f"--- /dev/null\n+++ b/test_unit.py\n@@ -0,0 +1,3 @@\n{test_patch}",
        log_parser="unittest",
        fail_to_pass=["test_add (test_unit.T.test_add)"],
        pass_to_pass=[],
    )
    assert found.reward == 0.0
    assert found.details["not_applied"] == [name]


async def test_attributes_of_the_agents_leave_the_tests_readable(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    kennel.agents.file(".gitattributes").write_text("* text eol=crlf ident\n")
    assert (await kennel.graded()).reward == 1.0


async def test_tests_that_the_agent_keeps_from_ending_are_scored(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text("import time\ntime.sleep(600)\n")
    found = await kennel.graded(timeout_seconds=2)
    assert (found.reward, found.details["why"]) == (0.0, "the tests were not done in 2 s")


async def test_tests_that_the_agent_removed_or_made_a_link_are_back(kennel: Kennel, tmp_path: Path) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    kennel.agents.file("test_kennel.py").unlink()
    kennel.agents.file("test_kennel.py").symlink_to("kennel.py")
    assert (await kennel.graded()).reward == 1.0


async def test_a_new_test_file_replaces_what_the_agent_put_there(kennel: Kennel) -> None:
    patch = "--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,2 @@\n+def test_new():\n+    import kennel\n"
    kennel.agents.file("tests").mkdir()
    kennel.agents.file("tests/test_new.py").write_text("def test_mine():\n    pass\n")
    found = await kennel.graded(
        test_patch="diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n" + patch,
        test_command="python -m pytest -rA -p no:cacheprovider tests",
        fail_to_pass=["tests/test_new.py::test_new"],
        pass_to_pass=[],
    )
    assert found.reward == 1.0


async def test_a_datasets_own_script_is_read_between_its_marks(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    script = (
        "echo 'PASSED test_kennel.py::test_before'\n: '>>>>> Start Test Output'\necho '>>>>> Start Test Output'\n"
        f"git apply - <<'EOF'\n{kennel.row['test_patch']}EOF\n{TESTS}\necho '>>>>> End Test Output'\nfalse\n"
    )
    both = {"eval_script": script, "test_command": None, "test_patch": ""}
    assert (await kennel.graded(**both)).reward == 1.0
    outside = await kennel.graded(**both, fail_to_pass=["test_kennel.py::test_before"])
    assert outside.reward == 0.0


LIES = "echo PASSED test_kennel.py::test_add; echo PASSED test_kennel.py::test_double"


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (f"{LIES}; exit 0", None),
        (f"{LIES}; exit 1", "its log tells of no failure"),
        (f"{LIES}; echo GANGLINE_TESTS_EXIT=0; exit 1", "its log tells of no failure"),
        (f"{LIES}; kill -9 $PPID", "did not reach its end"),
    ],
)
async def test_a_datasets_own_script_is_not_believed_when_its_tests_failed(
    kennel: Kennel, tests: str, why: str | None
) -> None:
    """The last command of the script, which puts the tests back, succeeds."""
    kennel.agents.file("kennel.py").write_text(FIXED)
    script = f"set -x\n: '>>>>> Start Test Output'\nsh -c '{tests}'\n: '>>>>> End Test Output'\ngit status\n"
    found = await kennel.graded(eval_script=script, test_command=None, test_patch="")
    assert found.reward == float(why is None)
    assert (why or "") in found.details.get("why", "")


async def test_a_command_that_a_signal_ended_has_failed(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    found = await kennel.graded(test_command=f"{LIES}; kill -9 $$")
    assert (found.reward, found.details["why"]) == (
        0.0,
        "the tests' command failed while its log tells of no failure",
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"test_patch": "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-x\n+y\n"}, "test patch does not apply"),
        ({"log_parser": "nose"}, "no parser 'nose'"),
    ],
)
async def test_what_is_our_fault_is_no_reward(kennel: Kennel, changes: dict[str, Any], told: str) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    with pytest.raises(EvaluatorError, match=told):
        await kennel.graded(**changes)


async def test_a_clean_runtime_without_the_repository_is_our_fault(kennel: Kennel, tmp_path: Path) -> None:
    kennel.clean = FolderRuntime(tmp_path / "empty", path=PATH)
    with pytest.raises(EvaluatorError, match="no repository"):
        await kennel.graded()


async def test_in_an_image_what_came_after_the_base_commit_is_forgotten(tmp_path: Path) -> None:
    row = repository(tmp_path / "origin")
    fix = git(tmp_path / "origin", "rev-parse", "HEAD").strip()
    image = FolderRuntime(tmp_path / "image", path=PATH)
    folder = Path(image.workdir)
    git(tmp_path, "clone", "-q", str(tmp_path / "origin"), str(folder))
    git(folder, "checkout", "-q", "-b", "work", row["base_commit"])
    imported = read_instance(row, "row 1", Choices(), InstanceChoices())
    for again in range(2):
        (action,) = imported.body["runtime"]["prepare"]
        done = await image.exec(action["command"])
        assert done.ok, f"{again}: {done.stderr}"
    assert git(folder, "rev-parse", "HEAD").strip() == row["base_commit"]
    assert (git(folder, "for-each-ref"), git(folder, "remote")) == ("", "")
    assert (await image.exec(["git", "cat-file", "-e", row["base_commit"]])).ok
    assert not (await image.exec(["git", "cat-file", "-e", fix])).ok
    assert (folder / "kennel.py").read_text() == BROKEN


@pytest.mark.parametrize(
    ("script", "reward"),
    [("echo CODE=0", 1.0), ("echo CODE=0; echo CODE=1", 0.0), ("exit 0", 0.0)],
)
async def test_the_exit_code_in_the_last_line_of_its_name_decides(kennel: Kennel, script: str, reward: float) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    instead = {"fail_to_pass": None, "pass_to_pass": None, "test_command": None, "test_patch": None}
    assert (await kennel.graded(eval_script=script, exit_code_line="CODE", **instead)).reward == reward


@pytest.mark.parametrize(
    ("changes", "reward"),
    [({}, 1.0), ({"test_more": "failed"}, 0.0), ({"test_double": "failed"}, 0.0), ({"test_double": None}, 0.0)],
)
async def test_all_tests_must_have_their_expected_statuses_and_no_others_run(
    kennel: Kennel, changes: dict[str, str | None], reward: float
) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    expected = {"test_add": "passed", "test_double": "passed", **changes}
    statuses = {name: status for name, status in expected.items() if status is not None}
    instead = {"fail_to_pass": None, "pass_to_pass": None, "log_parser": "r2e"}
    assert (await kennel.graded(expected_statuses=statuses, **instead)).reward == reward


SUMMARY = "=== short test summary info ===\\n"
NAMES = "PASSED test_kennel.py::test_add\\nPASSED test_kennel.py::test_double\\n"
BEGIN = "printf '=== test session starts ===\\n'"
MUCH = "yes 'much is printed by a test' | head -c 30000; echo"
TOO_LONG = "the tests' log is too long"


@pytest.mark.parametrize(
    ("tests", "reward", "told"),
    [
        (f"{BEGIN}; {MUCH}; printf '{SUMMARY}{NAMES}'", 1.0, ""),
        (f"{BEGIN}; {MUCH}; printf '{SUMMARY}{NAMES}=== 2 passed in 1s ===\\n'", 1.0, ""),
        (f"printf '{NAMES}'; {MUCH}", None, "no whole summary"),
        (f"{BEGIN}; {MUCH}; printf '{SUMMARY}{NAMES}'; {MUCH}; echo end", None, "no result of 2 tests"),
        (f"{BEGIN}; printf '{SUMMARY}{NAMES}'; {MUCH}; echo end", None, "no whole summary"),
        (f"{BEGIN}; {MUCH}; printf '{SUMMARY}FAILED test_kennel.py::test_add - no\\n'; exit 1", 0.0, "tests fail"),
        (f"{BEGIN}; printf 'test_kennel.py::test_add FAILED\\n'; {MUCH}; exit 1", 0.0, "tests fail"),
    ],
)
async def test_of_a_long_log_head_and_tail_are_read_and_a_lost_result_is_not_the_agents(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch, tests: str, reward: float | None, told: str
) -> None:
    monkeypatch.setattr("gangline.grading.swe_bench._MAX_LOG_BYTES", 4_000)
    kennel.agents.file("kennel.py").write_text(FIXED)
    if reward is None:
        with pytest.raises(EvaluatorError, match=TOO_LONG) as failure:
            await kennel.graded(test_command=tests)
        assert told in str(failure.value)
        return
    found = await kennel.graded(test_command=tests)
    assert (found.reward, found.details.get("why", "")) == (reward, told)
    assert "bytes left out" in found.details["output"]
    assert len(found.details["output"]) < 5_000


async def test_a_log_of_more_than_64_mib_is_graded_by_its_summary(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    much = "yes 'a line of what the tests print, as long as it is dull' | head -c 70000000"
    found = await kennel.graded(test_command=f"{BEGIN}; {much}; echo; printf '{SUMMARY}{NAMES}'")
    assert found.reward == 1.0


@pytest.mark.parametrize(
    ("parser", "end", "reward"),
    [
        ("unittest", "test_add (t.K.test_add) ... ok\\n\\n-----\\nRan 1 test in 1s\\n\\nOK\\n", 1.0),
        ("unittest", "test_add (t.K.test_add) ... ok\\n", None),
        ("r2e", f"{SUMMARY}{NAMES}", 1.0),
        ("r2e", f"{SUMMARY}PASSED t.py::test_add\\n", 0.0),
        ("r2e", NAMES, None),
    ],
)
async def test_long_logs_of_other_parsers_have_their_ends_too(
    kennel: Kennel, monkeypatch: pytest.MonkeyPatch, parser: str, end: str, reward: float | None
) -> None:
    monkeypatch.setattr("gangline.grading.swe_bench._MAX_LOG_BYTES", 4_000)
    kennel.agents.file("kennel.py").write_text(FIXED)
    lists: dict[str, Any] = {"fail_to_pass": ["test_add (t.K)"], "pass_to_pass": []}
    expected = {"test_add": "passed", "test_double": "passed"}
    statuses = {"fail_to_pass": None, "pass_to_pass": None, "expected_statuses": expected}
    how = {"test_command": f"{MUCH}; printf '{end}'", "log_parser": parser, **(statuses if parser == "r2e" else lists)}
    if reward is None:
        with pytest.raises(EvaluatorError, match=TOO_LONG):
            await kennel.graded(**how)
    else:
        assert (await kennel.graded(**how)).reward == reward


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("python -m pytest -q -p no:cacheprovider test_kennel.py", {}),
        ("python -m pytest -qq -p no:cacheprovider test_kennel.py", {}),
        ("python -m pytest -p no:cacheprovider test_kennel.py", {}),
        ("python -m unittest test_case", {"log_parser": "unittest", "fail_to_pass": ["test_a (test_case.T.test_a)"]}),
    ],
)
async def test_a_command_whose_log_names_no_passed_test_is_not_the_agents_failure(
    kennel: Kennel, command: str, how: dict[str, Any]
) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    kennel.agents.file("test_case.py").write_text(
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"
    )
    with pytest.raises(EvaluatorError, match=r"not which.*cannot be found in it. Run the tests with -v"):
        await kennel.graded(test_command=command, **how)


async def test_tests_that_could_not_be_collected_are_the_agents_failure_even_without_names(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text("raise ValueError\n")
    broken = await kennel.graded(test_command="python -m pytest -q -p no:cacheprovider test_kennel.py")
    assert (broken.reward, broken.details["why"]) == (0.0, "tests fail")


async def test_a_skip_with_a_reason_breaks_nothing(kennel: Kennel) -> None:
    kennel.agents.file("kennel.py").write_text(FIXED)
    kennel.agents.file("test_more.py").write_text(
        "import pytest\ndef test_s(): pytest.skip('no device - x')\n@pytest.mark.xfail(reason='a - b')\n"
        "@pytest.mark.parametrize('p', ['a - b'])\ndef test_x(p): assert 0\n"
    )
    command = "python -m pytest -rA -v -p no:cacheprovider ."
    names = ["test_more.py::test_s", "test_more.py::test_x[a - b]"]
    assert (await kennel.graded(test_command=command, pass_to_pass=names)).reward == 1.0
    git(Path(kennel.clean.workdir), "clean", "-qfd")
    git(Path(kennel.clean.workdir), "checkout", "-q", ".")
    skipped = await kennel.graded(test_command=command, fail_to_pass=names[:1], pass_to_pass=names[1:])
    assert (skipped.reward, skipped.details["failing"]) == (0.0, names[:1]), "a skip resolves nothing"
