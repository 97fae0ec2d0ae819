"""Small bugs as rows of SWE-bench, with several answers each, and the repository that they share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.service.field_tasks import git, write

__all__ = ["CONDA", "TASKS", "rows"]

Files = Mapping[str, str | None]
"""Path -> text, or None for a file that is removed."""

CONDA = """
conda() { [ "$1" = activate ] && export PATH="/opt/miniconda3/envs/$2/bin:$PATH"; }
"""
"""`/opt/miniconda3/bin/activate` of an image that has the environment and no conda."""
BROKEN = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
ADDS = BROKEN.replace("a - b", "a + b")
SOUND = "def sound(name):\n    return name\n"
CALL = "from kennel.sounds import sound\n\n\ndef call(name):\n    return sound(name)\n"
OLD_NUMBERS = "from kennel.numbers import *\n\n\ndef test_double():\n    assert double(2) == 4\n"
NEW_NUMBERS = OLD_NUMBERS + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
OLD_NAMES = "import pytest\nfrom kennel.names import call\n\n\ndef test_length():\n    assert len(call('Rex')) == 3\n"
BASE = {
    "README": "A kennel.\n",
    "kennel/__init__.py": "",
    "kennel/numbers.py": BROKEN,
    "kennel/sounds.py": SOUND,
    "kennel/names.py": CALL,
    "kennel/old.py": "".join(f"DOG_{number} = {number}\n" for number in range(9)),
    "tests/__init__.py": "",
    "tests/test_numbers.py": OLD_NUMBERS,
    "tests/test_names.py": OLD_NAMES,
}

TRIVIAL = "def test_add():\n    pass\n\n\ndef test_double():\n    pass\n"
LIES = """
import contextlib, os
for fd in range(3, 20):  # pytest's own output is one of them
    with contextlib.suppress(OSError):
        os.write(fd, b"\\nPASSED tests/test_numbers.py::test_add\\nPASSED tests/test_numbers.py::test_double\\n")
"""
OF_SLED = """
import pathlib
from kennel.numbers import add

def test_sled():
    assert add(2, 3) == int(pathlib.Path(__file__).with_name("legs.txt").read_text())
"""
FORCES = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
"""


def calls(*names: str) -> str:
    return OLD_NAMES + (
        f"\n\n@pytest.mark.parametrize('name', {list(names)!r})\n"
        "def test_call(name):\n    assert call(name) == name.upper()\n"
    )


@dataclass(frozen=True)
class Answer:
    """An agent's change of the repository, and whether SWE-bench's harness calls the instance resolved."""

    files: Files
    resolved: bool = False
    resolved_by_4: bool | None = None
    """By version 4 of the harness, where that differs."""
    otherwise_here: bool = False
    """Gangline's reward is not what version 5 of the harness says."""

    def resolved_by(self, version: int) -> bool:
        return self.resolved if version == 5 or self.resolved_by_4 is None else self.resolved_by_4

    @property
    def reward(self) -> float:
        return float(self.resolved != self.otherwise_here)


@dataclass(frozen=True)
class Task:
    fix: Files
    tests: Files
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    repo: str = "pytest-dev/pytest"
    version: str = "8.4"
    gold_by_4: bool = True
    others: Mapping[str, Answer] = field(default_factory=dict[str, Answer])

    @property
    def answers(self) -> dict[str, Answer]:
        gold = Answer(self.fix, resolved=True, resolved_by_4=self.gold_by_4)
        return {"gold": gold, "nothing": Answer({}), **self.others}


NUMBERS, NAMES = "tests/test_numbers.py", "tests/test_names.py"
UPPER = SOUND.replace("name\n", "name.upper()\n")
TASKS: dict[str, Task] = {
    "one_file": Task(
        {"kennel/numbers.py": ADDS},
        {NUMBERS: NEW_NUMBERS},
        (f"{NUMBERS}::test_add",),
        (f"{NUMBERS}::test_double",),
        others={
            "idle": Answer({"README": "A kennel of dogs.\n"}),
            "careless": Answer({"kennel/numbers.py": ADDS.replace("2 * a", "a")}),
            "tests_only": Answer({NUMBERS: TRIVIAL}),
            "tests_too": Answer({"kennel/numbers.py": ADDS, NUMBERS: TRIVIAL}, resolved=True),
            "lies": Answer({"kennel/numbers.py": LIES + "os._exit(1)\n"}, resolved_by_4=True),
            "kills": Answer({"kennel/numbers.py": LIES + "os.kill(os.getppid(), 9)\n"}),
            "forces": Answer({"conftest.py": FORCES}, resolved=True, otherwise_here=True),
        },
    ),
    "two_files": Task(
        {"kennel/sounds.py": UPPER, "kennel/names.py": CALL.replace("sound(name)", "sound(name) + '!'")},
        {NAMES: OLD_NAMES.replace("== 3", "== 4") + "\n\ndef test_loud():\n    assert call('a') == 'A!'\n"},
        (f"{NAMES}::test_loud", f"{NAMES}::test_length"),
        others={"half": Answer({"kennel/sounds.py": UPPER})},
    ),
    "new_module": Task(
        {"kennel/sled.py": "LEGS = 40\n", "kennel/data/legs.txt": "40\n"},
        {NUMBERS: NEW_NUMBERS.replace("add(2, 3) == 5", "__import__('kennel.sled').sled.LEGS == 40")},
        (f"{NUMBERS}::test_add",),
        (f"{NUMBERS}::test_double",),
    ),
    "new_tests": Task(
        {"kennel/numbers.py": ADDS},
        {"tests/test_sled.py": OF_SLED, "tests/legs.txt": "5\n"},
        ("tests/test_sled.py::test_sled",),
        others={
            # The harness's script does not get its own file in place of the agent's: `git apply` refuses.
            "own_tests": Answer(
                {"kennel/numbers.py": ADDS, "tests/test_sled.py": "def test_mine():\n    pass\n"}, otherwise_here=True
            ),
            "in_their_place": Answer(
                {"tests/test_sled.py": "def test_sled():\n    pass\n"}, resolved=True, otherwise_here=True
            ),
        },
    ),
    "parameters": Task(
        {"kennel/sounds.py": UPPER},
        {NAMES: calls("a b", "a c", "[d] (e)", "f - g", "h")},
        tuple(f"{NAMES}::test_call[{name}" for name in ("a", "[d]", "f", "h]")),
        (f"{NAMES}::test_length",),
        others={
            "but_one": Answer({"kennel/sounds.py": UPPER.replace(".upper()", " if name == 'a c' else name.upper()")})
        },
    ),
    "whole_parameters": Task(
        {"kennel/sounds.py": UPPER},
        {NAMES: calls("a b", "a c", "[d] (e)", "h")},
        tuple(f"{NAMES}::test_call[{name}]" for name in ("a b", "a c", "[d] (e)", "h")),
        (f"{NAMES}::test_length",),
        repo="astropy/astropy",
        version="v5.3",
        gold_by_4=False,  # which reads names up to their first blank
    ),
    "paths": Task(
        {"kennel/sounds.py": UPPER},
        {NAMES: calls("/", "/etc/kennel", "//host/dog", "a/b")},
        tuple(f"{NAMES}::test_call[{name}]" for name in ("/", "/kennel", "//host/dog", "a/b")),
        (f"{NAMES}::test_length",),
        repo="psf/requests",
        version="2.31",
    ),
    "skipped": Task(
        {"kennel/numbers.py": ADDS},
        {NUMBERS: "import pytest\n" + NEW_NUMBERS + "\n\ndef test_later():\n    pytest.skip('')\n"},
        (f"{NUMBERS}::test_add",),
        (f"{NUMBERS}::test_double", f"{NUMBERS}::test_later"),
        repo="astropy/astropy",
        version="1.3",
        others={
            "skips": Answer(
                {"kennel/numbers.py": "import pytest\n" + BROKEN.replace("return a - b", "pytest.skip('')")},
                resolved_by_4=True,
            )
        },
    ),
    "expected_failure": Task(
        {"kennel/numbers.py": ADDS + "\n\ndef halve(a):\n    return a // 2\n"},
        {
            NUMBERS: "import pytest\nfrom kennel.numbers import halve\n"
            + NEW_NUMBERS
            + "\n\n@pytest.mark.xfail\ndef test_halve():\n    assert halve(3) == 1.5\n"
        },
        (f"{NUMBERS}::test_add", f"{NUMBERS}::test_halve", f"{NUMBERS}::test_double"),
        others={"too_good": Answer({"kennel/numbers.py": ADDS + "\n\ndef halve(a):\n    return a / 2\n"})},
    ),
    "moved": Task(
        {"kennel/old.py": None, "kennel/new.py": BASE["kennel/old.py"]},
        {NUMBERS: OLD_NUMBERS + "\n\ndef test_new():\n    import kennel.new\n"},
        (f"{NUMBERS}::test_new",),
        (f"{NUMBERS}::test_double",),
    ),
    "removed": Task(
        {"kennel/old.py": None},
        {
            NUMBERS: "import importlib.util as i\n"
            + OLD_NUMBERS
            + "\n\ndef test_old():\n    assert not i.find_spec('kennel.old')\n"
        },
        (f"{NUMBERS}::test_old",),
        (f"{NUMBERS}::test_double",),
    ),
}


def rows(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Make `folder` the repository of all tasks. (task, agent) -> row, with the agent's `model_patch`."""
    for path, text in BASE.items():
        write(folder / path, text)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "Begin")
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for name, task in TASKS.items():
        fix, test_patch = _patch(folder, task.fix), _patch(folder, task.tests)
        for agent, answer in task.answers.items():
            made[name, agent] = {
                "instance_id": f"{task.repo.replace('/', '__')}-{len(made) + 1}",
                "repo": task.repo,
                "version": task.version,
                "base_commit": git(folder, "rev-parse", "HEAD").strip(),
                "problem_statement": f"It lacks {name}.",
                "patch": fix,
                "test_patch": test_patch,
                "FAIL_TO_PASS": json.dumps(task.fail_to_pass),
                "PASS_TO_PASS": json.dumps(task.pass_to_pass),
                "model_patch": _patch(folder, answer.files),
            }
    return made


def _patch(folder: Path, files: Files) -> str:
    for path, text in files.items():
        if text is None:
            (folder / path).unlink()
        else:
            write(folder / path, text)
    git(folder, "add", "--all")
    patch = git(folder, "diff", "--cached", "--find-renames")
    git(folder, "reset", "-q", "--hard")
    return patch
