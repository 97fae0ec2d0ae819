"""A table of the command line breaks no word, whatever its columns, its rows and the terminal's width."""

from __future__ import annotations

import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from gangline.cli.terminal.tables import Column, FactTable

WORD = st.text("abc/[]-.:日", min_size=1, max_size=70)
CELL = st.lists(WORD, max_size=6).map(" ".join)
COLUMN = st.builds(
    Column, st.sampled_from(["", "id", "state"]), st.integers(0, 3), is_prose=st.booleans(), is_number=st.booleans()
)


@st.composite
def tables(draw: Any) -> tuple[list[Column], list[list[str]]]:
    columns = draw(st.lists(COLUMN, min_size=1, max_size=5))
    cells = st.lists(CELL, min_size=len(columns), max_size=len(columns))
    return columns, draw(st.lists(cells, min_size=1, max_size=4))


def drawn(columns: list[Column], rows: list[list[str]], width: int | None) -> str:
    """width: None is a pipe."""
    table = FactTable(*columns)
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=width or 80, force_terminal=width is not None, soft_wrap=True, color_system=None).print(
        table
    )
    return file.getvalue()


@given(tables(), st.integers(1, 150))
def test_no_word_is_broken_at_any_width(made: tuple[list[Column], list[list[str]]], width: int) -> None:
    columns, rows = made
    told = " ".join(drawn(columns, rows, width).split()).partition("No room for")[0]
    whole = {word for row in rows for cell in row for word in cell.split()}
    assert set(told.split()) - {column.title for column in columns} <= whole
    for row in rows:
        kept = [cell for cell, column in zip(row, columns, strict=True) if not column.goes]
        assert {word for cell in kept for word in cell.split()} <= set(told.split())


@given(tables())
def test_a_pipe_gets_one_line_for_each_row(made: tuple[list[Column], list[list[str]]]) -> None:
    columns, rows = made
    lines = drawn(columns, rows, None).splitlines()
    has_heading = any(column.title for column in columns)
    assert len(lines) == len(rows) + has_heading
    assert [line.split() for line in lines[has_heading:]] == [" ".join(row).split() for row in rows]


@given(st.text("a b\n日", max_size=60), st.integers(1, 30))
def test_styles_and_lines_of_a_text_stay(text: str, width: int) -> None:
    table = FactTable(Column("", is_prose=True))
    table.add_row(Text(text, "bold"))
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, soft_wrap=True, color_system=None).print(table)
    assert file.getvalue().split() == text.split()
