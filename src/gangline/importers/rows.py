"""Rows of a dataset's file: JSON lines, JSON or Parquet, read one after another."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.importers.files import read_text
from gangline.installation import extra_command

__all__ = ["read_rows"]

_ROWS_AT_ONCE = 256


def read_rows(path: Path) -> Generator[tuple[str, Any]]:
    """Each row with its place, `FILE, row N`, counted from 1. A row may be of any JSON type.

    Raises: InvalidRequest when the file cannot be read, or pyarrow is missing.
    """
    rows = {".parquet": _of_parquet, ".json": _of_json}.get(path.suffix, _of_lines)
    for number, row in enumerate(rows(path), 1):
        yield f"{path}, row {number}", row


def _of_json(path: Path) -> Generator[Any]:
    document = _parsed(read_text(path), str(path))
    yield from cast("list[Any]", document) if isinstance(document, list) else [document]


def _of_lines(path: Path) -> Generator[Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parsed(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{where} is no JSON: {error}") from error


def _of_parquet(path: Path) -> Generator[Any]:
    try:
        from pyarrow import parquet  # noqa: PLC0415 - of the extra `parquet`
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"reading Parquet needs pyarrow. Run: {extra_command('parquet')}") from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in cast("Iterator[Any]", file.iter_batches(batch_size=_ROWS_AT_ONCE)):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error
