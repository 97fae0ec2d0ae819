"""The table of the command line. Ids, numbers and paths stay whole at any width, so that they can be copied.

A column contains facts, which are never broken, or prose, which wraps between words. If a terminal is too narrow, the
least important columns are dropped, and a line below names them. If even the others do not fit, each row becomes a
block of lines. If stdout is not a terminal, columns are not dropped or wrapped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from gangline.cli.terminal.output import printable

GAP = 2
"""Cells between two columns."""
_LEAST_PROSE = 24

Row = tuple[Text, ...]


@dataclass(frozen=True)
class Column:
    title: str
    goes: int = 0
    """Columns with higher values are dropped earlier; 0 stays."""
    is_prose: bool = False
    """Whether it becomes narrower instead of being dropped."""
    is_number: bool = False


def prose(title: str, goes: int = 0) -> Column:
    """A column of text that may wrap between words."""
    return Column(title, goes, is_prose=True)


def numbers(title: str, goes: int = 0) -> Column:
    return Column(title, goes, is_number=True)


class FactTable:
    """A table without lines. If no column has a title, there is no heading and no column is dropped."""

    def __init__(self, *columns: str | Column, title: str = "") -> None:
        """columns: a string is the title of a column of facts that stays; `#` at its end makes it a column of
        numbers."""
        self._columns = [
            Column(column.removesuffix("#"), is_number=column.endswith("#")) if isinstance(column, str) else column
            for column in columns
        ]
        self._title = title
        self._rows: list[Row] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """A string is shown unchanged on one line, without control characters; a `Text` may have several lines and
        styles."""
        self._rows.append(tuple(Text(printable(cell), style) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A console without soft wrap cuts longer lines.
        width = sys.maxsize if console.soft_wrap and not console.is_terminal else options.max_width
        has_heading = any(column.title for column in self._columns)
        wide = columns_that_fit(self._columns, self._rows, width, self._least)
        if self._title:
            yield Text(self._title, "italic")
        if has_heading and sum(wide.values()) + GAP * (len(wide) - 1) > width:
            yield from self._blocks(width)
            return
        if has_heading:
            yield from self._lines(tuple(Text(one.title, "bold") for one in self._columns), wide)
        for row in self._rows:
            yield from self._lines(row, wide)
        if gone := [column.title for at, column in enumerate(self._columns) if at not in wide]:
            notice = f"No room for {', '.join(gone)}: a wider terminal, a pipe or --json has them."
            yield from _wrapped(Text(notice, "dim"), width)

    def _least(self, at: int) -> int:
        """Minimum width of a prose column: its longest word."""
        words = [word for row in self._rows if at < len(row) for word in row[at].plain.split()]
        return max([_LEAST_PROSE, *map(cell_len, words)])

    def _lines(self, row: Row, wide: dict[int, int]) -> Iterator[Text]:
        shown = {at: row[at] for at in wide if at < len(row)}
        pieces = [_wrapped(cell, wide[at]) for at, cell in shown.items()]
        for parts in zip_longest(*pieces, fillvalue=Text()):
            line = _line()
            for at, part in zip(shown, parts, strict=True):
                is_number, room = self._columns[at].is_number, " " * (wide[at] - part.cell_len)
                line.append(room if is_number else "").append_text(part).append("" if is_number else room)
                line.append(" " * GAP)
            line.rstrip()
            yield line

    def _blocks(self, width: int) -> Iterator[Text]:
        label = max(cell_len(column.title) for column in self._columns) + GAP
        for row in self._rows:
            if row is not self._rows[0]:
                yield Text()
            for column, cell in zip(self._columns, row, strict=False):
                title = Text(column.title.ljust(label), "dim")
                room = width - label if column.is_prose else sys.maxsize
                for part in _wrapped(cell, room) if cell else ():
                    yield _line().append_text(title).append_text(part)
                    title = Text(" " * label)


def columns_that_fit(
    columns: Sequence[Column], rows: Sequence[Row], width: int, least: Callable[[int], int]
) -> dict[int, int]:
    """Index of each column that fits -> its width in cells. Columns that always stay may exceed the width.

    least: index of a prose column -> its minimum width.
    """
    wide = {at: cell_len(column.title) for at, column in enumerate(columns)}
    for row in rows:
        wide |= {at: max(wide[at], *map(cell_len, cell.plain.split("\n"))) for at, cell in enumerate(row)}
    while (over := sum(wide.values()) + GAP * (len(wide) - 1) - width) > 0:
        spare = {at: max(wide[at] - least(at), 0) for at in wide if columns[at].is_prose}
        going = max(wide, key=lambda at: columns[at].goes)
        if sum(spare.values()) < over and columns[going].goes and len(wide) > 1:
            del wide[going]
            continue
        for at in sorted(spare, key=spare.__getitem__, reverse=True):
            over -= (cut := min(spare[at], over))
            wide[at] -= cut
        break
    return wide


def _line() -> Text:
    return Text(no_wrap=True, overflow="ignore")


def _wrapped(cell: Text, width: int) -> list[Text]:
    """Lines broken only between words; Rich itself cuts or folds a word that is too long."""
    lines = [part for line in cell.split("\n", allow_blank=True) for part in line.divide(_breaks(line.plain, width))]
    for line in lines:
        line.rstrip()
    return lines


def _breaks(line: str, width: int) -> Iterator[int]:
    used = 0
    for word in re.finditer(r"\s*\S+", line):
        if used and used + cell_len(word[0]) > width:
            yield word.end() - len(word[0].lstrip())
            used = cell_len(word[0].lstrip())
        else:
            used += cell_len(word[0])
