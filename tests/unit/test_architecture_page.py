"""`docs/architecture.md` names files and functions that are there, and the folders are what it says of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gangline

SOURCE = Path(gangline.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
JOURNEYS = PAGE[PAGE.index("## A task's journey") :]
STEPS = re.findall(r"`([\w/]+\.py)`(?:: `([\w.]+)`)?", JOURNEYS)
BESIDE = re.findall(r"`([\w/]+\.py)`: `[\w.]+`[^`\n]*`([A-Za-z_]\w*)`", JOURNEYS)
"""A second name after the first one, of the same file."""

PLACES = PAGE[PAGE.index("## Where is ...?") : PAGE.index("## Where a sampling field goes")]
FIELD = PAGE[PAGE.index("## Where a sampling field goes") : PAGE.index("## A task's journey")]
ANSWERS = re.findall(r"`([\w/]+(?:\.py|/))`(?:: `([\w.]+)`)?", PLACES)
QUESTIONS = {
    "a Gemini tool call is parsed": "wire/dialects/google/tools.py",
    "a prompt is stitched": "node/capture/stitch.py",
    "a lease is given, renewed and expires": "store/sql/leasing.py",
    "a session's outcome is decided": "node/sessions/harness/run.py",
    "a reward is written into traces": "rows/rewards.py",
    "a sandbox's memory limit is set": "sandbox/confinement/cgroups.py",
}
"""Questions of newcomers, which names of files have to answer."""

OTHER_WINGS = ("interop", "tasks", "testing", "train")
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))


def defined(file: Path) -> set[str]:
    """Names of a module's top, and `Class.name` of what its classes define."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            own = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{each.name}" for each in own}
    return names


@pytest.mark.parametrize(("file", "name"), [*STEPS, *BESIDE], ids=lambda value: value)
def test_every_step_names_what_is_there(file: str, name: str) -> None:
    assert (SOURCE / file).is_file()
    assert not name or name in defined(SOURCE / file)


@pytest.mark.parametrize(("place", "name"), ANSWERS, ids=lambda value: value)
def test_every_answer_names_what_is_there(place: str, name: str) -> None:
    assert (SOURCE / place).exists()
    assert not name or name in defined(SOURCE / place)


@pytest.mark.parametrize(("question", "file"), QUESTIONS.items(), ids=lambda value: value)
def test_questions_of_newcomers_are_answered(question: str, file: str) -> None:
    assert re.search(rf"^\| {question} \| `{file}`: `", PLACES, re.M)


def test_a_sampling_field_passes_the_listed_files_and_no_other() -> None:
    core_and_engines = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in OTHER_WINGS]
    passed = {str(path.relative_to(SOURCE)) for path in core_and_engines if re.search(r"\btop_k\b", path.read_text())}
    assert set(re.findall(r"`([\w/]+\.py)`", FIELD)) == passed


def test_both_journeys_are_told_in_numbered_steps() -> None:
    for journey in JOURNEYS.split("\n## "):
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", journey, re.M)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) > 10


def test_the_tables_have_every_entry_and_no_other() -> None:
    tables = PAGE[: PAGE.index("## Where is ...?")]
    named = re.findall(r"^\| `(\w+)/` \|", tables, re.M)
    assert sorted(named) == sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_folder_says_where_to_start(package: Path) -> None:
    if package != SOURCE:
        told = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
        assert re.search(r"\bStart\s+with\b", told)
