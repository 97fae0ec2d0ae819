"""Reads CSV and TSV row by row. A row that cannot be read is returned as its error, and the others are read."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any, TextIO

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.lines import MAX_LINE_CHARS, NumberedRow, lines_of

_DELIMITERS = ",;\t|"
_STATED = re.compile(r"sep=(.)\s*")
"""First line of some of Excel's files."""


def rows_of_csv(text: TextIO, kind: str, where: str) -> Generator[NumberedRow]:
    """Each row as column -> text. Empty fields are null, because these formats do not distinguish them.

    kind: `.csv` or `.tsv`. Raises: InvalidRequest if the file has no header, or a header with a duplicate column.
    """
    csv.field_size_limit(MAX_LINE_CHARS)
    lines = _Lines(text, where)
    try:
        first = next((line for line in lines if line.strip()), "")
        delimiter = "\t" if kind == ".tsv" else _delimiter_of(first)
        if stated := _STATED.fullmatch(first):
            delimiter, first = stated[1], next(lines, "")
        lines.give_again(first)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        columns = _columns(next(reader, list[str]()), where)
        yield from _rows(reader, lines, columns)
    except csv.Error as error:
        raise InvalidRequest(f"cannot read {where}: {error}") from error


class _Lines:
    """Lines of the file. The total size of a row's lines is limited."""

    def __init__(self, text: TextIO, where: str) -> None:
        self.number = 0
        """Number of the last line read, counted from 1."""
        self._lines = lines_of(text, where)
        self._where = where
        self._again = ""
        self._num_chars = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line, self._again = self._again, ""
        if not line:
            line = next(self._lines)
            self.number += 1
        self._num_chars += len(line)
        if self._num_chars > MAX_LINE_CHARS:
            raise InvalidRequest(
                f"{self._where}, line {self.number}: is a row of more than {MAX_LINE_CHARS:,} characters."
            )
        return line

    def give_again(self, line: str) -> None:
        self._again = line
        self.begin_row()

    def begin_row(self) -> None:
        self._num_chars = 0


def _delimiter_of(header: str) -> str:
    """The delimiter that splits the header into the most columns; a comma in a tie."""
    return max(_DELIMITERS, key=lambda one: len(next(iter(csv.reader([header], delimiter=one)))))


def _columns(header: list[str], where: str) -> list[str]:
    names = [name.strip() or f"column {at}" for at, name in enumerate(header, 1)]
    if not names:
        raise InvalidRequest(f"cannot read {where}: is empty; its first line must name the columns")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise InvalidRequest(f"cannot read {where}: two columns are called {name!r}: rename one")
    return names


def _rows(reader: Iterator[list[str]], lines: _Lines, columns: list[str]) -> Generator[NumberedRow]:
    while True:
        line = lines.number + 1
        lines.begin_row()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            is_open = "end of data" in str(error)
            why = (
                "has a quote that is never closed: nothing behind it could be read"
                if is_open
                else f"is not a CSV: {error}"
            )
            yield NumberedRow(line, InvalidRequest(why))
            continue
        if fields:
            yield NumberedRow(line, _row(fields, columns))


def _row(fields: list[str], columns: list[str]) -> Any:
    while len(fields) > len(columns) and not fields[-1].strip():
        fields.pop()
    if len(fields) != len(columns):
        return InvalidRequest(f"has {len(fields)} fields, and the header names {len(columns)}")
    return {name: text or None for name, text in zip(columns, fields, strict=True)}
