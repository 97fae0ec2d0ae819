"""Patches by the real git over names and kinds of changes, and what data sets make of their text."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gangline.grading.swe_bench_rows import SweBenchRow, grading_of
from gangline.grading.untrusted.patch_text import completed, files_of, names_of
from gangline.settings import plugins
from gangline.tasks.vetting.subject import subject_of
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_command
from support.service.field_tasks import git
from support.training.evaluation_samples import a_context

PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
NAMES = (
    "plain.py",
    "tests/test_é.py",
    "tests/two words.py",
    "tests/ leading.py",
    "tests/trailing .py ",
    "tests/tab\there.py",
    'tests/"quoted".py',
    "tests/it's.py",
    "tests/back\\slash.py",
    "tests/line\nfeed.py",
    "tests/emoji 😀 b.py",
    "tests/data[1].py",
    "tests/star*.py",
    "tests/a b/a b.py",
    "b/b b/b.py",
    "tests/$HOME `x`.py",
    "tests/\x01\x7f\r.py",
    "-dash.py",
    "a -> b.py",
    "tests/日本語.py",
)
ALPHABET = "ab /\"'\\\t\n[]*é😀-+@.$~\x02"
BODY = "".join(f"line {number}\n" for number in range(12))
TRICKY = "-- a/fake.py\n++ b/fake.py\ndiff --git a/fake.py b/fake.py\n@@ -1 +1 @@\n"


@pytest.fixture(autouse=True)
def _git() -> None:
    need_command("git", "apt-get install git")


def drawn_names(num_names: int) -> tuple[str, ...]:
    draw = random.Random(43)
    drawn = ("".join(draw.choices(ALPHABET, k=draw.randint(1, 9))) for _ in range(num_names))
    return tuple(f"drawn {at}/{name.replace('/', '')}.py" for at, name in enumerate(drawn))


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("line 5", "LINE 5"))


def edit_tricky(path: Path) -> None:
    path.write_text(path.read_text() + TRICKY)


def lose_last_line_feed(path: Path) -> None:
    path.write_text(path.read_text().rstrip("\n"))


def move(path: Path) -> None:
    path.rename(path.with_name(f"moved {path.name}"))


def move_and_edit(path: Path) -> None:
    edit(path)
    move(path)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "edit": edit,
    "tricky": edit_tricky,
    "line feed": lose_last_line_feed,
    "remove": Path.unlink,
    "move": move,
    "move and edit": move_and_edit,
    "mode": lambda path: path.chmod(0o755),
    "binary": lambda path: path.write_bytes(b"\0\1\2" * 50),
    "empty": lambda path: path.write_text(""),
    "new": lambda path: path.with_name(f"new {path.name}").write_text("new\n"),
    "new empty": lambda path: path.with_name(f"new {path.name}").write_text(""),
    "new binary": lambda path: path.with_name(f"new {path.name}").write_bytes(b"\0\1"),
    "CRLF": lambda path: path.write_text(BODY, newline="\r\n"),
}
OPTIONS = (
    (),
    ("-M",),
    ("--no-renames",),
    ("-M", "-C", "--find-copies-harder"),
    ("-U0",),
    ("-U30",),
    ("--full-index",),
    ("--src-prefix=i/", "--dst-prefix=w/"),
)


def repository(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    folder.mkdir()
    git(folder, "init", "-q")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name!r}\n{BODY}")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")
    return folder


def diff(folder: Path, *options: str) -> str:
    command = ["git", "-C", str(folder), "diff", "--cached", "--binary", *options]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def names_by_git(folder: Path, *options: str) -> set[str]:
    """By `-z`, which quotes nothing; not those that are copied only."""
    fields = iter(diff(folder, "--name-status", "-z", *options).split("\0")[:-1])
    found = set[str]()
    for status in fields:
        names = [next(fields), *([next(fields)] if status[0] in "RC" else [])]
        found |= set(names[1:] if status[0] == "C" else names)
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_files_of_a_patch_are_those_that_git_says(tmp_path: Path, change: str) -> None:
    folder = repository(tmp_path / "repo", (*NAMES, *drawn_names(30)))
    for name in (*NAMES, *drawn_names(30)):
        CHANGES[change](folder / name)
    git(folder, "add", "-A")
    for quoted in ("true", "false"):
        git(folder, "config", "core.quotePath", quoted)
        for options in OPTIONS:
            expected = names_by_git(folder, *options)
            assert expected, options
            assert set(names_of(diff(folder, *options))) == expected, (quoted, options)


def stripped_of_lines_ends(patch: str) -> str:
    """Editors take the blank of an empty line of context."""
    return "".join(line if line.strip(" \n") else "\n" for line in patch.splitlines(keepends=True))


LOSSES: dict[str, Callable[[str], str]] = {
    "nothing": lambda patch: patch,
    "the last line feed": lambda patch: patch.removesuffix("\n"),
    "what strip takes": lambda patch: patch.strip(),
    "what strip takes, with a line feed": lambda patch: patch.strip() + "\n",
    "blanks of empty lines": stripped_of_lines_ends,
    "both": lambda patch: stripped_of_lines_ends(patch).strip(),
    "CRLF": lambda patch: patch.replace("\n", "\r\n"),
    "CRLF, stripped": lambda patch: patch.strip().replace("\n", "\r\n"),
    "more line feeds": lambda patch: f"\n{patch}\n\n",
    "a letter": lambda patch: f"From 1 Mon Sep 17\nSubject: x\n---\n x | 2 +-\n\n{patch}-- \n2.39.5\n\n",
}
ENDS: dict[str, tuple[str, str]] = {
    "empty lines": ("a\nb\n\n\n\nz\n", "a\nB\n\n\n\nz\n"),
    "empty lines at the end": ("a\nb\n\n\n", "a\nB\n\n\n"),
    "an empty last line": ("a\n\n", "b\n\n"),
    "no line feed": ("a\nb", "a\nB"),
    "its line feed is new": ("a\nb", "a\nb\n"),
    "its line feed is gone": ("a\nb\n", "a\nb"),
    "an empty line more": ("a\n", "a\n\n"),
    "an empty line less": ("a\n\n", "a\n"),
    "binary": ("\0\1", "\0\2"),
    "new": ("", "a\n\n"),
    "gone": ("a\n\n", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_patch_applies_whatever_a_data_set_stripped_of_its_text(tmp_path: Path, end: str) -> None:
    folder = repository(tmp_path / "repo")
    before, after = ENDS[end]
    for name in ("x.py", "tests/test_é.py"):  # in a patch of several files, the last one only is cut
        (folder / name).write_text(before)
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "before")
    for name in ("x.py", "tests/test_é.py"):
        (folder / name).write_text(after)
    git(folder, "add", "-A")
    patch = diff(folder)
    for loss, lose in LOSSES.items():
        git(folder, "reset", "-q", "--hard")
        subprocess.run(["git", "apply", "--index", "-"], cwd=folder, input=completed(lose(patch)).encode(), check=True)
        assert diff(folder) == patch, loss
    assert completed(patch) == patch


@pytest.mark.parametrize("text", ["", "\n", "no patch", "--- a/x\n", "diff --git", "@@ -1 +1 @@", "diff --git a/x b/x"])
def test_a_text_that_is_no_patch_names_no_other_files(text: str) -> None:
    assert set(names_of(text)) <= {"x"}
    assert completed(text).strip() == text.strip()


def row(patch: str, **more: Any) -> SweBenchRow:
    fields = {"instance_id": "a__b-1", "repo": "a/b", "test_patch": patch, "FAIL_TO_PASS": ["data.py::test_a"]}
    return SweBenchRow.model_validate({**fields, **more})


def told(patch: str, **more: Any) -> list[str]:
    """Words that the shell gives the runner of tests."""
    command = grading_of(row(patch, **more), test_command="printf '%s\\0' {tests}")["test_command"]
    return subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("change", ["edit", "tricky", "move", "move and edit", "new", "mode"])
def test_the_runner_of_tests_is_told_the_files_that_the_patch_leaves(tmp_path: Path, change: str) -> None:
    folder = repository(tmp_path / "repo")
    names = [name for name in NAMES if name.endswith(".py")]
    for name in names:
        CHANGES[change](folder / name)
    git(folder, "add", "-A")
    given = told(diff(folder, "-M"))
    assert len(given) == len(names)
    prefix = {"move": "moved ", "move and edit": "moved ", "new": "new "}.get(change, "")
    assert set(given) == {str(Path(name).with_name(f"{prefix}{Path(name).name}")) for name in names}


def test_files_that_are_gone_or_empty_are_not_run_and_a_patch_of_data_runs_the_listed_ones(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repo")
    (folder / "plain.py").unlink()
    (folder / "tests/__init__.py").write_text("")
    (folder / "tests/data.txt").write_text("a\n")
    git(folder, "add", "-A")
    patch = diff(folder)
    assert told(patch) == ["data.py"]
    assert told(patch, PASS_TO_PASS=["a b.py::test_a[x]", "data.py::test_b"]) == ["data.py", "a b.py"]


TEST = "from kennel import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n\n"


@pytest.mark.parametrize("name", ["tests/test_é.py", "tests/test two.py", 'tests/test_"q".py'])
@pytest.mark.parametrize("loss", ["nothing", "what strip takes", "CRLF"])
async def test_hidden_tests_of_any_name_judge_the_agents_work(tmp_path: Path, name: str, loss: str) -> None:
    folder = repository(tmp_path / "origin", ("kennel.py", name))
    (folder / "kennel.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / name).write_text("def test_old():\n    pass\n\n")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "bug")
    (folder / name).write_text(TEST)
    git(folder, "add", "-A")
    patch = LOSSES[loss](diff(folder))
    git(folder, "reset", "-q", "--hard")
    given = row(patch, FAIL_TO_PASS=[f"{name}::test_add"])
    config = grading_of(given, test_command=f"{sys.executable} -m pytest -rA -p no:cacheprovider {{tests}}")
    runtimes = [FolderRuntime(tmp_path / one, path=PATH) for one in ("agents", "clean")]
    for runtime in runtimes:
        git(tmp_path, "clone", "-q", str(folder), runtime.workdir)
    runtimes[0].file(name).unlink()
    runtimes[0].file("kennel.py").write_text("def add(a, b):\n    return a + b\n")
    evaluator = plugins.make_evaluator("swe_bench", config)
    found = await evaluator.evaluate(a_context(runtimes[0], fresh=runtimes[1]))
    assert found.reward == 1.0, found.details


def test_a_solution_without_its_end_is_still_one(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repo")
    (folder / "plain.py").write_text("a\n")
    git(folder, "add", "-A")
    patch = diff(folder)
    git(folder, "reset", "-q", "--hard")
    body = {"instruction": "x", "agent": {"harness": "shell"}, "solution": {"patch": patch.strip()}}
    solution = subject_of("x", body).solution
    assert solution is not None
    subprocess.run(solution.command, cwd=folder, input=(solution.stdin or "").encode(), check=True)
    assert (folder / "plain.py").read_text() == "a\n"


def test_a_copy_leaves_its_origin_to_the_agent() -> None:
    patch = "diff --git a/src/x.py b/tests/x.py\nsimilarity index 100%\ncopy from src/x.py\ncopy to tests/x.py\n"
    assert names_of(patch) == ["tests/x.py"]
    assert [file.after for file in files_of(patch)] == ["tests/x.py"]
