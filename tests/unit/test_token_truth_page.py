"""docs/token-truth.md names a test for every case, and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "token-truth.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(test_\w+)`")


def test_every_case_has_a_row_and_every_row_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*$", PAGE, flags=re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 29))
    for row in re.findall(r"^\| \d+ \|.*$", PAGE, flags=re.MULTILINE):
        assert NAMED.search(row), row


def test_every_test_that_is_named_is_there() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert set(NAMED.findall(PAGE)) - defined == set()
