"""CSV and TSV, row by row. A row that cannot be read is its error; the others are read."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

from gangline.domain.errors import InvalidRequest

__all__ = ["NumberedRow", "opened_text", "rows_of_csv"]

_DELIMITERS = ",;\t|"
_STATED = re.compile(r"sep=(.)\s*")
"""First line of some of Excel's files."""
_LONGEST_FIELD_CHARS = 1 << 30
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class NumberedRow(NamedTuple):
    line: int
    """The first one, counted from 1."""
    row: Any
    """An `InvalidRequest` where it cannot be read."""


def opened_text(path: Path) -> Any:
    """A text file, without its byte order mark. A byte that is no UTF-8 becomes a lone surrogate, for which its row is
    refused. Raises: InvalidRequest, also when it is no text."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
        if head[:2] not in _UTF16 and b"\0" in head:
            raise InvalidRequest(
                f"cannot read {path}: is no text. Rows are read from JSON lines, JSON, CSV, TSV, Parquet and Arrow."
            )
        encoding = "utf-16" if head[:2] in _UTF16 else "utf-8-sig"
        return path.open(encoding=encoding, errors="surrogateescape" if encoding != "utf-16" else "strict", newline="")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def rows_of_csv(path: Path) -> Generator[NumberedRow]:
    """Each row as column -> text; an empty field is null, as no file of this kind tells them apart.

    Raises: InvalidRequest when the file has no header, or one with a column twice.
    """
    csv.field_size_limit(_LONGEST_FIELD_CHARS)
    with opened_text(path) as file:
        try:
            lines = enumerate(file, 1)
            at, first = next(((at, line) for at, line in lines if line.strip()), (1, ""))
            delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter_of(first)
            if stated := _STATED.fullmatch(first):
                delimiter, (at, first) = stated[1], next(lines, (1, ""))
            reader = csv.reader(itertools.chain([first], (line for _, line in lines)), delimiter=delimiter, strict=True)
            columns = _columns(next(iter(reader), list[str]()), path)
            yield from _rows(reader, columns, at - 1)
        except (csv.Error, UnicodeError) as error:
            raise InvalidRequest(f"cannot read {path}: {error}") from error


def _delimiter_of(header: str) -> str:
    """The one that divides the header into most columns; a comma where several do."""
    return max(_DELIMITERS, key=lambda one: len(next(iter(csv.reader([header], delimiter=one)))))


def _columns(header: list[str], path: Path) -> list[str]:
    names = [name.strip() or f"column {at}" for at, name in enumerate(header, 1)]
    if not names:
        raise InvalidRequest(f"cannot read {path}: is empty; its first line must name the columns")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"cannot read {path}: two columns are called {twice!r}: rename one")
    return names


def _rows(reader: Any, columns: list[str], num_before: int) -> Generator[NumberedRow]:
    """num_before: lines of the file that the reader has not seen."""
    while True:
        line = num_before + reader.line_num + 1
        try:
            fields: list[str] = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            is_open = "end of data" in str(error)
            why = (
                "has a quote that is never closed: nothing behind it could be read"
                if is_open
                else f"is no CSV: {error}"
            )
            yield NumberedRow(line, InvalidRequest(why))
            continue
        if fields:
            yield NumberedRow(line, _row(fields, columns))


def _row(fields: list[str], columns: list[str]) -> Any:
    while len(fields) > len(columns) and not fields[-1].strip():
        fields = fields[:-1]
    if len(fields) != len(columns):
        return InvalidRequest(f"has {len(fields)} fields, and the header names {len(columns)}")
    return {name: text or None for name, text in zip(columns, fields, strict=True)}
