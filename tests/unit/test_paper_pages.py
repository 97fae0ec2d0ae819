"""The pages of the papers: each listing and claim is alongside the test that shows it, or the reason why none does.

Each row of what was read in their sources has a verdict; and every test, route, setting and name on them is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.task import TaskRequest
from support.service.papers import FOLDER

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "guides" / "papers").glob("*.md"))
ROW = re.compile(r"^\| .*?\(`([\w.-]+)`\) \| (.+) \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
LISTINGS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".txt", ".json"))


VERDICTS = ("same", "accepted", "refused", "differs", "stricter", "more", "left out", "404", "its clients", "keep ")
"""First words of a verdict. The last two say what a client sees, or has to do."""
CODE = re.compile(r"`([^`]+)`")
WORD = re.compile(r"[A-Za-z_]\w+")


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


def test_the_front_page_of_the_docs_leads_to_each_page() -> None:
    front = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in PAGES if f"(guides/papers/{page.name})" not in front] == []


def test_papers_are_named_by_their_titles_and_not_by_our_numbers() -> None:
    number = re.compile(r"([Pp]aper|Sources?:|as in) 00[0-4]\b|\b00[0-4], section")
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    assert [str(path.relative_to(ROOT)) for path in places if number.search(path.read_text())] == []


def tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """(head, rows) of each table, as cells."""
    lines: list[list[str]] = []
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split("|")])
        elif lines:
            yield lines[0], lines[2:]
            lines = []


def cells(page: Path, column: str) -> list[str]:
    return [row[head.index(column)] for head, found in tables(page) if column in head for row in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_rows_are_whole(page: Path) -> None:
    for head, found in tables(page):
        assert [row for row in found if len(row) != len(head) or "" in row] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_is_named_is_there(page: Path) -> None:
    named = TEST.findall(page.read_text())
    assert len(named) == page.read_text().count("`tests/") - len(re.findall(r"`tests/[\w/]+\.py`", page.read_text()))
    for path, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_claim_is_shown_by_a_test_or_says_why_not(page: Path) -> None:
    claims = cells(page, "shown by")
    assert claims
    for cell in claims:
        reason = re.match(r"(differs|not shown): (.+)", cell)
        assert TEST.match(cell) or (reason and len(reason[2].split()) >= 4), cell


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_verdict_is_a_known_word_and_what_is_not_the_same_says_what_is(page: Path) -> None:
    for head, found in tables(page):
        for row in found if "verdict" in head else ():
            here, verdict = row[head.index("here")], row[head.index("verdict")]
            assert verdict.startswith(VERDICTS), row
            if not verdict.startswith(("same", "accepted")):
                assert len(here.split()) > 1 or len(verdict.split()) > 2 or CODE.search(here) or here == "none", row


def routes() -> dict[str, str]:
    """`METHOD /path/{}` -> the row of the reference, which is made from the code."""
    text = (ROOT / "docs" / "reference" / "http.md").read_text()
    return {
        re.sub(r"{\w+}", "{}", found[1]): found[0]
        for found in re.finditer(r"^\| `(\w+ /[^`]*)` .*$", text, re.MULTILINE)
    }


def test_every_route_that_is_ours_is_served() -> None:
    served = routes()
    named = [code for page in PAGES for cell in cells(page, "here") for code in CODE.findall(cell)]
    ours = [code for code in named if re.match(r"(GET|POST|PUT|DELETE) /", code)]
    assert len(ours) > 5
    for code in ours:
        path, _, query = code.partition("?")
        row = served.get(re.sub(r"{\w+}", "{}", path))
        assert row is not None, code
        assert query.partition("=")[0] in row, code


def resolves(names: list[str], schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Whether a task may have this setting. What is free, such as a harness's settings, may have any."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if not names:
        return True
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(resolves(names, option, definitions) for option in options)
    if "properties" not in schema:
        return schema.get("type") == "object" or schema == {}
    return names[0] in schema["properties"] and resolves(names[1:], schema["properties"][names[0]], definitions)


def test_every_setting_of_a_task_is_one() -> None:
    schema = TaskRequest.model_json_schema()
    fields = "|".join(TaskRequest.model_fields)
    named = {code for page in PAGES for cell in cells(page, "here") for code in CODE.findall(cell)}
    settings = {code for code in named if re.fullmatch(rf"({fields})(\.\w+)+", code)}
    assert len(settings) > 5
    assert [one for one in sorted(settings) if not resolves(one.split("."), schema, schema["$defs"])] == []


def test_every_name_that_is_ours_is_in_the_source() -> None:
    source = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".json")]
    known = {word for path in [*source, ROOT / "pyproject.toml"] for word in WORD.findall(path.read_text())}
    for page in PAGES:
        for cell in cells(page, "here"):
            for code in CODE.findall(TEST.sub("", cell)):
                unknown = [word for word in WORD.findall(code) if word not in known and not word.isupper()]
                assert unknown == [] or (ROOT / code).exists(), f"{page.name}: {code}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        text = (page.parent / path).resolve().read_text() if path else page.read_text()
        headings = [
            re.sub(r"[^\w -]", "", title).strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        ]
        assert not anchor or anchor in {title.replace(" ", "-") for title in headings}, target
