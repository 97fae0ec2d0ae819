"""Reads text files of a dataset line by line, and JSON in them. A row that cannot be read is returned as its error.

The length of a line is limited, because it is unknown before reading.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Generator
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.documents import is_more_than_one, parsed_json

MAX_LINE_CHARS = 64 << 20
"""Also the limit of a row: a submission is at most 64 MiB."""
_MAX_JSON_BYTES = 512 << 20
"""Limit of a file with a single list, which is held in memory."""
_HEAD_BYTES = 4096
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_LINES = {".jsonl", ".json", ".ndjson"}
_BEGINS_LIST = re.compile(r"\s*\[\s*(?:\{|$)")
_KINDS = "Rows are read from JSON lines, JSON, CSV, TSV, Parquet and Arrow"


class NumberedRow(NamedTuple):
    line: int
    """The row's first line, counted from 1; 0 if the file has no lines."""
    row: Any
    """An `InvalidRequest` if it cannot be read."""


def text_of(file: BinaryIO, where: str) -> TextIO:
    """The text of a file, without its byte order mark. A byte that is not UTF-8 becomes a lone surrogate, because of
    which its row is refused. Raises: InvalidRequest if the file is not text.
    """
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    if head[:2] in _UTF16:
        return io.TextIOWrapper(file, "utf-16", newline="")
    if b"\0" in head:
        raise InvalidRequest(f"cannot read {where}: is not text. {_KINDS}.")
    return io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")


def lines_of(text: TextIO, where: str) -> Generator[str]:
    """Raises: InvalidRequest, also for a line that is too long."""
    number = 0
    try:
        while line := text.readline(MAX_LINE_CHARS + 1):
            number += 1
            if len(line) > MAX_LINE_CHARS:
                raise InvalidRequest(f"{where}, line {number}: is longer than {MAX_LINE_CHARS:,} characters.")
            yield line
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"cannot read {where}: {error}") from error


def rows_of_json(text: TextIO, where: str) -> Generator[NumberedRow]:
    """A list, a single object, or JSON lines in a `.json` file. Raises: InvalidRequest."""
    if os.fstat(text.fileno()).st_size > _MAX_JSON_BYTES:
        raise InvalidRequest(f"{where}: is larger than {_MAX_JSON_BYTES >> 20} MiB: write JSON lines, as .jsonl.")
    try:
        document = parsed_json(text.read(), where)
    except UnicodeError as error:
        raise InvalidRequest(f"cannot read {where}: {error}") from error
    except InvalidRequest as error:
        if not is_more_than_one(error):
            raise
        text.seek(0)
        yield from rows_of_lines(text, ".json", where)
        return
    rows = cast("list[Any]", document) if isinstance(document, list) else [document]
    yield from (NumberedRow(0, row) for row in rows)


def rows_of_lines(text: TextIO, kind: str, where: str) -> Generator[NumberedRow]:
    """kind: suffix of the file's name. Raises: InvalidRequest, also if a file with an unknown suffix does not begin
    with JSON.
    """
    is_guess = kind not in _LINES
    for number, line in enumerate(lines_of(text, where), 1):
        if number == 1 and kind != ".json" and _BEGINS_LIST.match(line):
            text.seek(0)
            yield from rows_of_json(text, where)
            return
        if not line.strip():
            continue
        row = _or_error(line)
        if isinstance(row, InvalidRequest) and is_guess:
            raise InvalidRequest(f"{where}, line {number} {row.message}. {_KINDS}, by the end of the file's name.")
        is_guess = False
        yield NumberedRow(number, row)


def _or_error(line: str) -> Any:
    try:
        return parsed_json(line.rstrip("\r\n"))
    except InvalidRequest as error:
        return error
