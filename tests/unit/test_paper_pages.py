"""Each listing of the papers is on a page, beside the test that posts or runs it, or with the reason why none does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.service.papers import FOLDER

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "guides" / "papers").glob("*.md"))
ROW = re.compile(r"^\| .*?\(`([\w.-]+)`\) \| (.+) \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
LISTINGS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".txt", ".json"))


def rows() -> dict[str, str]:
    """Listing -> the last cell of its row."""
    found = [row for page in PAGES for row in ROW.findall(page.read_text())]
    assert len({name for name, _, _ in found}) == len(found), "a listing is on the pages twice"
    return {name: cell for name, _, cell in found}


def test_every_listing_is_on_a_page_and_no_other() -> None:
    assert sorted(rows()) == LISTINGS


@pytest.mark.parametrize("name", LISTINGS)
def test_its_row_names_a_test_that_reads_it_or_says_why_none_does(name: str) -> None:
    cell = rows()[name]
    tests = TEST.findall(cell)
    if not tests:
        assert cell.startswith("none: "), cell
        return
    for path, test in tests:
        source = (ROOT / path).read_text()
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{path} has no {test}"
        assert name in source, f"{path} does not read {name}"


def test_the_readme_leads_to_each_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES if f"docs/guides/papers/{page.name}" not in readme] == []
