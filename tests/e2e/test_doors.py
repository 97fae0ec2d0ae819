"""The three doors of README.md, as text. `tests/release/test_bare_machine.py` runs their commands from a wheel."""

from __future__ import annotations

import re

import pytest

from support.service.doors import DOORS, README, SHORTER, door
from support.service.terminal import blocks

MAX_LINKS = 12
MAX_LINES = 60


@pytest.mark.parametrize("title", DOORS)
def test_a_door_is_one_screen_with_a_picture_and_a_command(title: str) -> None:
    text = door(title)
    assert len(text.splitlines()) <= MAX_LINES
    assert re.search(r"!\[[^\]]+\]\(docs/images/", text)
    assert "sh" in {block.kind for block in blocks(text)}


def test_the_readme_leads_to_few_pages() -> None:
    assert len(re.findall(r"(?<!!)\[[^\]]+\]\((?!#)", README.read_text())) <= MAX_LINKS


def test_every_shorter_line_stands_in_the_readme() -> None:
    lines = [line for title in DOORS for block in blocks(door(title)) for line in block.text.splitlines()]
    assert set(SHORTER) <= set(lines)
