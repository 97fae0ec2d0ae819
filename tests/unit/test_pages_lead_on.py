"""Pages of the docs: every link's anchor is there, also in messages of the source, and every table is a table."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2 *$\n?", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
ANCHORED = re.compile(r"\]\(([^)\s#]*)#([^)\s]+)\)")
RULE = re.compile(r"\|( *:?-{3,}:? *\|)+")
NAMED_IN_SOURCE = re.compile(r"([\w/-]+\.md)#([\w-]+)")


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchor(heading: str) -> str:
    """As GitHub and the site make it: letters, digits, `-` and `_` of the text that is read, with `-` for spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.replace("`", "")).strip().lower().replace(" ", "-")


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    found = [anchor(heading) for heading in HEADING.findall(prose(page))]
    again = {f"{name}{mark}{count}" for name in found for count in range(1, found.count(name)) for mark in "-_"}
    return frozenset(found) | again | frozenset(re.findall(r'(?:id|name)="([^"]+)"', page.read_text()))


def broken(page: Path) -> Iterator[str]:
    for target, fragment in ANCHORED.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if path.suffix == ".md" and (not path.is_file() or fragment not in anchors(path)):
            yield f"{target}#{fragment}"


def tables_that_are_none(text: str) -> list[str]:
    """Lines that hold the rule of a table and more, rows of another number of columns, and rows without a table."""
    lines = [line.strip() for line in FENCED.sub("", text).splitlines()]
    faults = [line for line in lines if RULE.search(line) and not RULE.fullmatch(line)]
    rows: set[int] = set()
    for number, line in enumerate(lines):
        if RULE.fullmatch(line):
            found = [at for at in (number - 1, number, *_below(lines, number)) if at >= 0]
            rows.update(found)
            faults += [lines[at] for at in found if not _is_row(lines[at], _columns(line))]
            faults += [] if number else [line]
    return faults + [line for at, line in enumerate(lines) if line.startswith("|") and at not in rows]


def _below(lines: list[str], rule: int) -> Iterator[int]:
    """The rows below a table's rule, until an empty line or a mark of the page's maker."""
    for number in range(rule + 1, len(lines)):
        if not lines[number] or lines[number].startswith("<!--"):
            return
        yield number


def _is_row(line: str, columns: int) -> bool:
    return line.startswith("|") and line.endswith("|") and _columns(line) == columns


def _columns(row: str) -> int:
    plain = re.sub(r"`[^`]*`", "", row)
    return len(re.findall(r"(?<!\\)\|", plain))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_of_a_link_is_a_heading_of_its_page(page: Path) -> None:
    assert list(broken(page)) == []


def test_every_heading_that_a_message_of_the_source_names_is_there() -> None:
    """A message names a page as `training.md#hooks`, with or without its folders."""
    files = [path for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert [
        f"{file.relative_to(ROOT)}: {name}#{fragment}"
        for file in files
        for name, fragment in NAMED_IN_SOURCE.findall(file.read_text())
        if not any(fragment in anchors(page) for page in PAGES if page.as_posix().endswith(f"/{name}"))
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_starts_its_line_and_has_its_columns(page: Path) -> None:
    assert tables_that_are_none(page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "| a | b | |---|---| | 1 | 2 |\n",
        "Text | a | |---|\n",
        "| a | b |\n|---|---|\n| 1 | 2 | | 3 | 4 |\n",
        "| a | b |\n|---|---|\n| 1 | 2\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\nMore text.\n",
        "\n|---|---|\n| 1 | 2 |\n",
        "|---|---|\n| 1 | 2 |\n",
        "Text:\n\n| 1 | 2 |\n| 3 | 4 |\n",
    ],
)
def test_a_table_that_lost_its_lines_is_found(text: str) -> None:
    assert tables_that_are_none(text) != []


def test_a_table_may_have_bars_in_code_and_stand_in_a_list() -> None:
    text = "1. One:\n\n   | a | b |\n   |---|---|\n   | `x \\| y` | `x|y` |\n\n```\n| a | |---| b\n```\n"
    assert tables_that_are_none(text) == []
