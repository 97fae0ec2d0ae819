"""The count of unusual English: its findings by kind, package figures, and its exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "english.py"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *options], capture_output=True, text=True, check=False
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_plain_docstrings_pass(tmp_path: Path) -> None:
    write(tmp_path / "tree" / "store.py", '"""Tasks in SQL. Returns the count of `a; b; c`."""\n')
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "tree" in done.stdout


def test_every_kind_is_listed_with_its_file_and_line(tmp_path: Path) -> None:
    module = tmp_path / "gateway" / "calls.py"
    write(
        module,
        '"""Model calls."""\n\n\n'
        "class Call:\n"
        '    """What a client sent, whatever it told."""\n\n'
        "    x: int = 0\n"
        '    """Of one call."""\n\n'
        "    def end(self) -> None:\n"
        '        """End it.\n\n        First a; then b; then c.\n        """\n',
    )
    done = run(tmp_path)
    assert done.returncode == 1
    findings = done.stdout.split("\n\n", 1)[1]
    places = {block.split(":")[0]: block.splitlines()[1:] for block in findings.strip().split("\n\n")}
    assert places == {
        "what": [f"  {module}:5", f"  {module}:5"],
        "tell": [f"  {module}:5"],
        "begins with Of": [f"  {module}:8"],
        "semicolons": [f"  {module}:13"],
    }


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        ("is no", "A path that is no folder."),
        ("one that", "A node, or one that ended."),
        ("those of", "Its tokens and those of its prompt."),
        ("of its own", "A process of its own."),
        ("none", "None, or none at all."),
        ("goes on", "The command goes on."),
        ("beside", "A file beside it."),
        ("nobody", "A key that nobody knows."),
    ],
)
def test_a_mark_is_listed_with_its_place(tmp_path: Path, mark: str, sentence: str) -> None:
    write(tmp_path / "a.py", f'"""{sentence}"""\n')
    done = run(tmp_path)
    assert done.returncode == 1
    assert f"{mark}: " in done.stdout
    assert f"{tmp_path}/a.py:1" in done.stdout


def test_the_figures_are_per_1000_words_of_each_package(tmp_path: Path) -> None:
    write(tmp_path / "a" / "one.py", f'"""What {"word " * 99}"""\n')
    write(tmp_path / "b.py", f'"""{"word " * 100}"""\n')
    rows = {line.split()[0]: line.split()[1:] for line in run(tmp_path).stdout.splitlines() if line}
    assert rows["a"][:2] == ["100", "10.00"]
    assert rows["."][:2] == ["100", "0.00"]
    assert rows["total"][:2] == ["200", "5.00"]


def test_a_bar_holds_for_the_whole_and_all_lists_places_below_it(tmp_path: Path) -> None:
    write(tmp_path / "a" / "one.py", f'"""What {"word " * 99}"""\n')
    write(tmp_path / "b" / "two.py", f'"""{"word " * 3000}"""\n')
    assert run(tmp_path).returncode == 0
    assert "one.py:1" not in run(tmp_path).stdout
    assert "one.py:1" in run(tmp_path, "--all").stdout
